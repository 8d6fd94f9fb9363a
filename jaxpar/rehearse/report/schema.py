"""The types of what `jaxpar rehearse --json` writes. `docs/rehearse_json.md` explains each key.

Seconds, bytes and FLOPs count one step on one device, except where a name or line says otherwise.
"""

from typing import Literal, NotRequired, TypedDict

from jaxpar.rehearse.report.task_graph import TaskGraph

SCHEMA = 4
"""The version of the schema, which goes up when a key is renamed, removed or changes its meaning; a
new key does not change it.
"""


class TargetFacts(TypedDict):
    """The hardware that was rehearsed; `hbm_bytes` and `peak_flops` (a second, in `dtype`) belong
    to one device.
    """

    name: str
    chip: str
    chips: int
    slices: int
    topology: str
    hbm_bytes: int
    peak_flops: float | None
    dtype: str
    note: NotRequired[str]


class ModelFacts(TypedDict):
    """The model in numbers."""

    family: str
    parameters: int


class Batch(TypedDict):
    """The data that all devices together train on in one step."""

    sequences: int
    seq_len: int
    tokens: int
    accumulation: int


class KernelRow(TypedDict):
    """A kernel that was priced in place of the one that the target would run."""

    op: str
    priced: str
    runs: str
    """The kernel that the target runs, which is not on the machine that rehearses."""
    install: str
    """The command that installs it here."""
    time: NotRequired[str]
    """The kernel that the time is of."""


class Memory(TypedDict):
    """The device memory by the compiler's account, and what it put into the host's memory."""

    hbm_bytes: int
    usable_bytes: int
    """The part of `hbm_bytes` that a program may take: of a GPU's, the share of JAX's pool."""
    total: int
    """The bytes that the step takes at its peak; `categories` are its parts."""
    fits: bool
    categories: dict[str, int]
    host: dict[str, int]
    """The bytes in the host's memory for this device, by the names of `categories`."""
    advice: list[str]
    basis: NotRequired[str]
    """The basis of the bytes, which differs by platform."""


class Time(TypedDict):
    """The replayed timeline in seconds: step = compute + exposed_communication + host_stall +
    copy_stall + idle.
    """

    step: float
    compute: float
    exposed_communication: float
    """The time in which the compute units wait for a collective."""
    host_stall: float
    """The time in which the compute units wait for a copy to or from the host's memory, or for what
    the host computes.
    """
    copy_stall: float
    """The time in which the compute units wait for asynchronous work of the device itself: a copy,
    or a fusion beside them.
    """
    idle: float
    """The rest of the step, which is launches."""
    mfu: float | None
    hfu: float | None
    tokens_per_second: NotRequired[float]
    """The rate of all devices together; absent where the tokens of a step are not known."""
    by_category: dict[str, float]
    """The busy seconds by kind of task; collectives, host copies and what the host computes count
    also where they run beside compute.
    """
    estimated_without_cycles: float
    """The share of the compute time, in [0, 1], that is a roofline estimate and not the compiler's
    own cycles.
    """


class Interval(TypedDict):
    """The interval in which a measured step is to be expected."""

    share: float
    """How far from the step its ends are, as a share of it: nine tenths of the runs are nearer."""
    low: float
    high: float
    runs: int
    by: str
    """The runs that say so: `published runs on v5p`."""


class NoInterval(TypedDict):
    """The reason why there is no interval."""

    why: str


class Calibration(TypedDict):
    """A measured step by which the seconds of compute were scaled; times are in seconds."""

    measured: float
    predicted: float
    """The time of that step by the prices of the chip's file."""
    compute: float
    """The factor of the seconds of compute."""


class Line(TypedDict):
    """One line of the model in one phase of the step."""

    scope: str
    source: str
    phase: str
    compute: float
    communication: float
    """The busy seconds of its collectives, overlapped or not."""
    exposed: float
    flops: float
    bytes: int
    count: int
    """The number of tasks that run."""


class CollectiveRow(TypedDict):
    """The collectives of one kind, over the same mesh axes, from the same line."""

    kind: str
    axes: list[str]
    bytes: int
    """The bytes of one group's whole array, in one execution."""
    sent_bytes: float
    count: int
    asynchronous: bool
    seconds: float
    exposed: float
    scope: str
    source: str
    phase: str
    planned: NotRequired[bool]
    """Whether the plan asked for it; absent where no plan is known. If it did not, `reason` says
    why.
    """
    reason: NotRequired[str]


class TimelineColumns(TypedDict):
    """The timeline of a step. `names` to `bytes` are columns with one entry an instruction, and
    events point into them.
    """

    lanes: list[str]
    names: list[str]
    kinds: list[str]
    """The kind of each task, or of the collective where a task is one: `matmul`, `all-gather`."""
    scopes: list[str]
    sources: list[str]
    phases: list[str]
    bytes: list[int]
    events: list[list[float]]
    """[lane, start_us, duration_us, instruction, repeats]. Where `repeats` is not 0, the bar stands
    for that many trips of a loop, which are not drawn one by one. A synchronous collective stands
    on `compute` and on its links."""


class AliveArray(TypedDict):
    """The arrays of one shape and one line that are in a device's memory at the peak."""

    argument: str
    """The argument of the program that the arrays are parts of; empty = the program makes them."""
    shape: str
    scope: str
    source: str
    phase: str
    bytes: int
    """The bytes of all the arrays, with the padding of tiles."""
    count: int


class Alive(TypedDict):
    """The content of a device's main memory over time, by the schedule: an array from what makes it
    to its last use. Gaps between arrays, code and constants are left out.
    """

    peak_bytes: int
    peak_us: float
    times_us: list[float]
    """The points of time from the start of the step; the trips of a loop stand as one, as long as
    all of them.
    """
    parts: dict[str, list[int]]
    """The bytes at each point of time, of each argument and of what the scopes of the model
    make.
    """
    arrays: list[AliveArray]
    """The arrays at the peak, the largest first."""


class LintFinding(TypedDict):
    """One finding of the linter."""

    rule: str
    severity: Literal["error", "warning"]
    message: str
    scope: str
    source: str
    bytes: float
    seconds: float


class Rehearsal(TypedDict):
    """The whole report. The model and the batch are there for a config's step only."""

    schema: int
    config: str
    command: str
    date: str
    versions: dict[str, str]
    target: TargetFacts
    mesh: dict[str, int]
    model: NotRequired[ModelFacts]
    batch: NotRequired[Batch]
    settings: NotRequired[dict[str, str]]
    """Every setting of the config as it was settled, by its dotted key, as TOML writes its value;
    there for a config's step only.
    """
    compile_seconds: float
    program: NotRequired[str]
    """The digest of the compiled program without names and metadata: equal digests, equal
    programs.
    """
    compiler_options: NotRequired[dict[str, bool | int | float | str]]
    """The options that XLA was given, the library's and the user's."""
    kernels: NotRequired[list[KernelRow]]
    """Kernels that were priced in place of those that the target would run; empty = none."""
    memory: Memory
    time: Time
    interval: NotRequired[Interval | NoInterval]
    """How sure the step's time is, by published runs."""
    calibration: NotRequired[Calibration]
    """The measured step that the time was scaled by, where one was given."""
    lines: list[Line]
    collectives: list[CollectiveRow]
    timeline: NotRequired[TimelineColumns]
    """The timeline, which is left out of files that are kept, because it is most of the bytes."""
    alive: NotRequired[Alive]
    """The memory over time; absent where the program's order is not known, or where it could not be
    followed.
    """
    graph: NotRequired[TaskGraph]
    """The step as a task graph, where that was asked for."""
    findings: list[LintFinding]
    """The findings of the linter: errors come first, then what costs most."""
    notes: list[str]
