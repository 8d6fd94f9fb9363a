"""What a search is asked: a config, a target, a batch, and which choices are made already."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from jaxpar.base.config import Config, override
from jaxpar.base.console import count_text
from jaxpar.base.errors import UserError, suggest
from jaxpar.base.hardware import usable_bytes
from jaxpar.base.layout.activation_names import Keep
from jaxpar.base.layout.mesh import MESH_AXES
from jaxpar.base.layout.plan import Overlap, Pipeline
from jaxpar.base.ranges import require_ranges
from jaxpar.base.registry import require_names
from jaxpar.base.toml import flatten
from jaxpar.plan.candidate import Candidate, changes
from jaxpar.rehearse.targets import Target
from jaxpar.train.experiment import Experiment

STATE_EMBED = "rules.state_embed"
_CHOICES: dict[str, Callable[[Candidate], Any]] = {
    "train.accumulation": lambda one: one.accumulation,
    "pipeline.microbatches": lambda one: one.microbatches,
    "pipeline.schedule": lambda one: one.schedule,
    "pipeline.virtual": lambda one: one.virtual,
    "memory.policy": lambda one: one.policy,
    "memory.optimizer": lambda one: one.optimizer,
    "memory.parameters": lambda one: one.parameters,
    "memory.loss_mib": lambda one: one.loss_mib,
    "precision.moments": lambda one: one.moments,
    "model.scan_layers": lambda one: one.scan,
    "zero": lambda one: one.zero,
}


def _of_mesh(axis: str) -> dict[str, Callable[[Candidate], Any]]:
    """List the keys of a mesh axis: its size, inside a slice or node, and over them."""
    place = MESH_AXES.index(axis)
    return {
        axis: lambda one: one.mesh[place] * one.dcn[place],
        f"mesh.{axis}": lambda one: one.mesh[place],
        f"mesh.dcn.{axis}": lambda one: one.dcn[place],
    }


_MESH_KEYS = {key: read for axis in MESH_AXES for key, read in _of_mesh(axis).items()}
_READ = _CHOICES | _MESH_KEYS
"""How the value of each key that may be fixed is read from a plan."""

_HOST = ("offload", "host")
USES: dict[str, Callable[[Candidate], bool]] = {
    "data": lambda one: one.size("data") > 1,
    "fsdp": lambda one: one.size("fsdp") > 1,
    "tensor": lambda one: one.size("tensor") > 1,
    "context": lambda one: one.size("context") > 1,
    "expert": lambda one: one.size("expert") > 1,
    "pipeline": lambda one: one.size("stage") > 1,
    "hsdp": lambda one: one.size("data") > 1 and one.size("fsdp") > 1,
    "zero": lambda one: one.zero,
    "accumulation": lambda one: one.accumulation > 1,
    "offload": lambda one: one.optimizer in _HOST or one.parameters in _HOST or _sends_away(one),
    "recompute": lambda one: one.policy != "none" or _makes_again(one),
    "overlap": lambda one: bool(one.overlap),
    "unrolled": lambda one: not one.scan,
}
"""What `--forbid` may name, and whether a plan uses it."""
MAY = {
    "moments": "bfloat16 first moments, which change the numbers",
    "unrolled": "layers that are compiled one by one, for many times as long",
}
"""What `--may` may name."""


def _sends_away(one: Candidate) -> bool:
    return any(action == "offload" for _, action in one.keep)


def _makes_again(one: Candidate) -> bool:
    return any(action == "recompute" for _, action in one.keep)


@dataclass(frozen=True)
class Request:
    """The question that a search answers.

    Attributes:
      config: the config, with the global batch that was asked for.
      target: the hardware.
      budget: the bytes of a device that a step may take.
      fixed: choices that are made: the value that a key must have. Beside dotted keys there are
        the names of mesh axes, for their size over all slices or nodes, and `zero`.
      forbidden: names of `USES` that no plan may use.
      may: names of `MAY`, which are no choice otherwise.
      experiment: the experiment, where its model or its optimizer is of a program's own.
    """

    config: Config
    target: Target
    budget: int
    fixed: Mapping[str, Any] = field(default_factory=dict)
    forbidden: frozenset[str] = frozenset()
    may: frozenset[str] = frozenset()
    experiment: Experiment | None = None

    @property
    def sequences(self) -> int:
        """The sequences of a step."""
        return self.config.train.batch

    @property
    def tokens(self) -> int:
        """The tokens of a step."""
        return self.config.train.batch * self.config.data.seq_len

    def allows(self, candidate: Candidate) -> bool:
        """Return whether a plan uses nothing that is forbidden."""
        return not any(USES[name](candidate) for name in self.forbidden)

    def allows_layout(self, candidate: Candidate) -> bool:
        """Return whether the mesh of a plan has the sizes that are fixed and no forbidden axis."""
        fixed = all(
            _READ[key](candidate) == value for key, value in self.fixed.items() if key in _MESH_KEYS
        )
        return fixed and self.allows(candidate)

    def fixes_axis(self, axis: str) -> bool:
        """Return whether the size of a mesh axis is fixed."""
        return any(key in self.fixed for key in (axis, f"mesh.{axis}", f"mesh.dcn.{axis}"))

    def options(self, key: str, usual: Sequence[Any]) -> list[Any]:
        """Return the values of a key to try: the fixed one alone, or else the usual ones."""
        if key in self.fixed:
            return [self.fixed[key]]
        return list(usual)

    def config_of(self, candidate: Candidate) -> Config:
        """Return the config whose plan is a candidate."""
        plain = plain_config(self.config)
        mesh = replace(plain.mesh, distributed=self.target.hosts > 1)
        values = changes(candidate)
        if not candidate.zero and "data" in plain.rules.state_embed:
            values[STATE_EMBED] = [axis for axis in plain.rules.state_embed if axis != "data"]
        return override(replace(plain, mesh=mesh), values)


def plain_config(config: Config) -> Config:
    """Return a config without the choices that a search makes and a candidate may leave out."""
    memory = replace(config.memory, budget="", may=type(config.memory)().may, keep=Keep())
    mesh = replace(config.mesh, platform="auto")
    return replace(config, memory=memory, mesh=mesh, overlap=Overlap(), pipeline=Pipeline())


def make_request(
    experiment: Config | Experiment,
    target: Target,
    *,
    sequences: int = 0,
    tokens: int = 0,
    budget: int = 0,
    fixed: Mapping[str, Any] | None = None,
    forbidden: Sequence[str] = (),
    may: Sequence[str] = (),
) -> Request:
    """Make the request of a search.

    Args:
      experiment: the config, or an experiment; its batch and seq_len, its model and its precision
        count, and its plan does not.
      sequences: the sequences of a step; 0 = the config's.
      tokens: the tokens of a step, in place of `sequences`.
      budget: the bytes of a device that a step may take; 0 = all that a program may have.
      fixed: the values that keys must have.
      forbidden: names of `USES`.
      may: names of `MAY`.

    Raises:
      UserError: a key or a name is not known, or tokens are no whole number of sequences.
    """
    config = experiment if isinstance(experiment, Config) else experiment.config
    has = usable_bytes(target.hardware.hbm_bytes, target.platform)
    if budget > has:
        raise UserError(
            f"a budget of {budget:,} bytes is more than a device of {target.name} has for a "
            f"program, {has:,}: leave it out"
        )
    known = {fixed_key(key): value for key, value in (fixed or {}).items()}
    _require_values(config, known)
    for name in forbidden:
        if name not in USES:
            raise UserError(f"--forbid {name!r}{suggest(name, USES)}: there are {', '.join(USES)}")
    for name in may:
        if name not in MAY:
            known = "; ".join(f"{key}, {what}" for key, what in MAY.items())
            raise UserError(f"--may {name!r}{suggest(name, MAY)}: there is {known}")
    batch = _sequences(config, sequences, tokens)
    config = replace(config, train=replace(config.train, batch=batch))
    return Request(
        config,
        target,
        budget or has,
        known,
        frozenset(forbidden),
        frozenset(may),
        _own(experiment, config),
    )


def _own(experiment: Config | Experiment, config: Config) -> Experiment | None:
    """Return an experiment with a config where anything of it is of a program's own."""
    if isinstance(experiment, Config):
        return None
    if not experiment.model.has_blocks:
        raise UserError(
            "a plan is found from the shapes of a model's blocks, and this model is one function: "
            "give its blocks to jaxpar.models.Model, or choose its mesh by rehearsals"
        )
    if not experiment.model.own_parts() and experiment.own_optimizer is None:
        return None
    return replace(experiment, config=config)


def _require_values(config: Config, fixed: Mapping[str, Any]) -> None:
    """Refuse fixed values of another type than their keys', or out of their range."""
    dotted = {f"mesh.{key}" if key in MESH_AXES else key: value for key, value in fixed.items()}
    zero = dotted.pop("zero", False)
    if not isinstance(zero, bool):
        raise UserError(f"--fix zero is true or false, found {zero!r}")
    for key, value in dotted.items():
        if key in _MESH_KEYS and value == -1:
            raise UserError(f"--fix {key}=-1: give the number of devices")
    changed = override(config, dotted)
    require_ranges(Config, dotted)
    require_names(Config, flatten(changed))


def fixed_key(key: str) -> str:
    """Return the key of `Request.fixed` that a word names.

    Raises:
      UserError: a search chooses no such key.
    """
    if key not in _READ:
        raise UserError(
            f"--fix {key}{suggest(key, _READ)}: a search chooses {', '.join(_READ)}; give other "
            "settings as flags, such as --model.layers 4"
        )
    return key


def is_chosen(key: str) -> bool:
    """Return whether a search chooses a dotted key, so that a flag of it is a fixed value."""
    return key in _READ


def _sequences(config: Config, sequences: int, tokens: int) -> int:
    """Return the sequences of a step."""
    if sequences and tokens:
        raise UserError("--global-batch is in sequences and --tokens in tokens: leave one out")
    if not tokens:
        return sequences or config.train.batch
    seq_len = config.data.seq_len
    whole, rest = divmod(tokens, seq_len)
    if rest or not whole:
        near = [count * seq_len for count in (whole, whole + 1) if count]
        raise UserError(
            f"--tokens {tokens} is no whole number of sequences of data.seq_len={seq_len}: try "
            f"{' or '.join(map(str, near))}"
        )
    return whole


def read_tokens(text: str) -> int:
    """Read a number of tokens, such as `1M`, which is 2 to the 20th, or `1_000_000`.

    Raises:
      UserError: it is no such number.
    """
    units = {"k": 2**10, "m": 2**20, "g": 2**30}
    word = text.strip().replace("_", "").replace(",", "").lower()
    unit = units.get(word[-1:], 1)
    number = word[:-1] if unit > 1 else word
    try:
        value = float(number) * unit
    except ValueError:
        value = math.nan
    if not (value >= 1 and value == int(value) and math.isfinite(value)):
        raise UserError(f"--tokens {text!r} is no number of tokens: write 1048576, or 1M")
    return int(value)


def request_line(request: Request) -> str:
    """Say in one line what was asked."""
    config = request.config
    words = [
        f"{config.model.family} on {request.target.name}",
        f"{request.sequences:,} sequences of {config.data.seq_len:,} tokens a step "
        f"({count_text(request.tokens)} tokens)",
    ]
    words += [f"{key}={value}" for key, value in request.fixed.items()]
    words += [f"no {name}" for name in sorted(request.forbidden)]
    return ", ".join(words)
