"""A rehearsal made up from a small simulation: as large and as varied as a real one, and consistent
with itself.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

from jaxpar.rehearse.report.schema import SCHEMA, Rehearsal

LANES = ["compute", "ici:x", "ici:y", "ici:z", "dma", "host"]
SOURCES = {
    "block/attention/qkv": "models/llama.py:72",
    "block/attention/kernel": "jaxpar/parallel/linear/column.py:141",
    "block/attention/out": "models/llama.py:84",
    "block/mlp/up": "models/llama.py:97",
    "block/mlp/down": "models/llama.py:101",
    "block/norm": "models/llama.py:66",
    "embed": "models/llama.py:120",
    "head/loss": "models/llama.py:133",
    "optimizer": "jaxpar/train/optimizer/definition.py:44",
}


@dataclass
class _Replay:
    """Microseconds. Compute goes on task by task; what is asynchronous runs on its lane until
    someone waits for it.
    """

    now: float = 0.0
    free: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    rows: list[tuple] = field(default_factory=list)
    index: dict[tuple, int] = field(default_factory=dict)
    events: list[list[float]] = field(default_factory=list)
    exposed: dict[tuple, float] = field(default_factory=lambda: defaultdict(float))
    busy: dict[tuple, float] = field(default_factory=lambda: defaultdict(float))
    count: dict[tuple, int] = field(default_factory=lambda: defaultdict(int))

    def _bar(self, lane: str, start: float, duration: float, row: tuple) -> None:
        i = self.index.setdefault(row, len(self.index))
        self.events.append(
            [
                LANES.index(lane),
                round(start, 3),
                round(duration, 3),
                i,
                0,
            ]
        )

    def work(
        self, name: str, kind: str, scope: str, phase: str, duration: float, size: int = 0
    ) -> None:
        row = (name, kind, scope, SOURCES[scope], phase, size)
        self._bar("compute", self.now, duration, row)
        self.now += duration
        self.busy[row] += duration
        self.count[row] += 1

    def start(
        self, name: str, kind: str, lane: str, scope: str, phase: str, duration: float, size: int
    ) -> tuple:
        """Begin something asynchronous; what it returns is to be waited for."""
        row = (name, kind, scope, SOURCES[scope], phase, size)
        begin = max(self.now, self.free[lane])
        self._bar(lane, begin, duration, row)
        self.free[lane] = begin + duration
        self.busy[row] += duration
        self.count[row] += 1
        return row, begin + duration

    def wait(self, started: tuple) -> None:
        row, end = started
        self.exposed[row] += max(0.0, end - self.now)
        self.now = max(self.now, end)


def _forward(replay: _Replay, phase: str, weights: tuple) -> tuple:
    """One block forward; returns the gather of the next block's weights."""
    replay.wait(weights)
    gather = replay.start(
        "all-gather.41", "all-gather", "ici:z", "block/attention/qkv", phase, 95, 67_108_864
    )
    replay.work("fusion.210", "fusion", "block/norm", phase, 35, 40_000_000)
    replay.wait(gather)
    following = replay.start(
        "all-gather.12", "all-gather", "ici:x", "block/mlp/up", phase, 560, 436_207_616
    )
    replay.work("fusion.77", "matmul", "block/attention/qkv", phase, 420, 90_000_000)
    replay.work("fusion.78", "fusion", "block/attention/qkv", phase, 60, 30_000_000)
    replay.work("copy.31", "copy", "block/attention/kernel", phase, 45, 33_000_000)
    replay.work("splash.3", "kernel", "block/attention/kernel", phase, 910, 50_000_000)
    replay.work("fusion.80", "matmul", "block/attention/out", phase, 290, 70_000_000)
    scatter = replay.start(
        "reduce-scatter.9", "reduce-scatter", "ici:z", "block/attention/out", phase, 95, 67_108_864
    )
    replay.wait(scatter)
    replay.work("fusion.211", "fusion", "block/norm", phase, 35, 40_000_000)
    gather = replay.start(
        "all-gather.42", "all-gather", "ici:z", "block/mlp/up", phase, 95, 67_108_864
    )
    replay.wait(gather)
    for i in range(4):
        replay.work(f"fusion.9{i}", "matmul", "block/mlp/up", phase, 240, 60_000_000)
    replay.work("fusion.95", "fusion", "block/mlp/down", phase, 55, 58_000_000)
    replay.work("fusion.96", "matmul", "block/mlp/down", phase, 510, 60_000_000)
    replay.wait(
        replay.start(
            "reduce-scatter.10", "reduce-scatter", "ici:z", "block/mlp/down", phase, 95, 67_108_864
        )
    )
    return following


def _backward(
    replay: _Replay,
    weights: tuple,
    last: tuple | None,
) -> tuple[tuple, tuple]:
    """One block recomputed and backward; returns the gather of the next weights and the scatter of
    its gradients.
    """
    following = _forward(replay, "recomputed", weights)
    for scope in ("block/mlp/down", "block/mlp/up", "block/attention/out", "block/attention/qkv"):
        gather = replay.start(
            "all-gather.50", "all-gather", "ici:z", scope, "backward", 95, 67_108_864
        )
        replay.work("fusion.300", "matmul", scope, "backward", 330, 80_000_000)
        replay.wait(gather)
        replay.work("fusion.301", "matmul", scope, "backward", 340, 80_000_000)
        replay.work("fusion.302", "fusion", scope, "backward", 25, 20_000_000)
    replay.work("splash.4", "kernel", "block/attention/kernel", "backward", 1900, 90_000_000)
    if last:
        replay.wait(last)
    scatter = replay.start(
        "reduce-scatter.70",
        "reduce-scatter",
        "ici:y",
        "block/mlp/up",
        "backward",
        1050,
        872_415_232,
    )
    return following, scatter


def _play(layers: int) -> _Replay:
    replay = _Replay()
    replay.work("gather.2", "fusion", "embed", "forward", 180, 70_000_000)
    weights = replay.start(
        "all-gather.11", "all-gather", "ici:x", "block/mlp/up", "forward", 560, 436_207_616
    )
    for _ in range(layers):
        weights = _forward(replay, "forward", weights)
    for i in range(8):
        replay.work(f"fusion.40{i}", "matmul", "head/loss", "forward", 900, 200_000_000)
    replay.wait(
        # unplanned
        replay.start(
            "all-reduce.5", "all-reduce", "ici:z", "head/loss", "forward", 310, 131_072_000
        )
    )
    scatter = None
    for _ in range(layers):
        weights, scatter = _backward(replay, weights, scatter)
    if scatter:
        replay.wait(scatter)
    replay.wait(
        replay.start("copy-start.1", "host_copy", "host", "optimizer", "update", 800, 25_000_000)
    )
    for i in range(12):
        replay.work(f"fusion.60{i}", "fusion", "optimizer", "update", 110, 300_000_000)
    return replay


def fake_rehearsal(layers: int = 32, **changes: Any) -> Rehearsal:
    """A LLaMA-3-8B step on v5p-64 as it might be: about 60 events a layer.

    Args:
      layers: trips of the two loops.
      changes: keys of the report to replace.
    """
    replay = _play(layers)
    waits = {"all-gather", "reduce-scatter", "all-reduce", "host_copy"}
    seconds = {row: 1e-6 * value for row, value in replay.busy.items()}
    exposed = {row: 1e-6 * value for row, value in replay.exposed.items()}
    compute = sum(value for row, value in seconds.items() if row[1] not in waits)
    stall = sum(value for row, value in exposed.items() if row[1] == "host_copy")
    by_category: dict[str, float] = defaultdict(float)
    for row, value in seconds.items():
        if row[1] == "host_copy" or row[1] not in waits:
            kind = row[1]
        else:
            kind = "collective"
        by_category[kind] += value
    step = 1e-6 * replay.now
    columns = list(zip(*replay.index, strict=True))
    rehearsal: Rehearsal = {
        "schema": SCHEMA,
        "config": "llama3_8b",
        "command": "jaxpar rehearse llama3_8b --target v5p-64 --mesh.fsdp 16 --mesh.tensor 4",
        "date": "2026-01-15",
        "versions": {"jaxpar": "0.1.0", "jax": "0.10.2", "jaxlib": "0.10.2", "libtpu": "0.0.42"},
        "target": {
            "name": "v5p-64",
            "chip": "TPU v5p",
            "chips": 64,
            "slices": 1,
            "topology": "4x4x4",
            "hbm_bytes": 95 * 2**30,
            "peak_flops": 459e12,
            "dtype": "bfloat16",
            "note": "64 chips; Google Cloud counts cores and calls it v5p-128",
        },
        "mesh": {"fsdp": 16, "tensor": 4},
        "model": {"family": "llama", "parameters": 8_030_261_248},
        "batch": {"sequences": 16, "seq_len": 8192, "tokens": 131_072, "accumulation": 1},
        "compile_seconds": 27.4,
        "memory": _memory(),
        "time": {
            "step": step,
            "compute": compute,
            "exposed_communication": sum(exposed.values()) - stall,
            "host_stall": stall,
            "copy_stall": 0.0,
            "idle": max(
                0.0,
                round(step - compute - sum(exposed.values()), 12),
            ),
            "mfu": 0.443,
            "hfu": 0.578,
            "tokens_per_second": 131_072 / step,
            "by_category": dict(by_category),
            "estimated_without_cycles": 0.21,
        },
        "lines": _lines(replay, seconds, exposed, waits),
        "collectives": _collectives(replay, seconds, exposed, waits),
        "timeline": {
            "lanes": LANES,
            "names": list(columns[0]),
            "kinds": list(columns[1]),
            "scopes": list(columns[2]),
            "sources": list(columns[3]),
            "phases": list(columns[4]),
            "bytes": list(columns[5]),
            "events": replay.events,
        },
        "findings": _findings(),
        "notes": [
            "while.7: no trip count, taken as 1",
            "splash attention: 910 us by its own cost estimate",
        ],
    }
    return {**rehearsal, **changes}  # pyright: ignore[reportReturnType]


def _memory() -> dict[str, Any]:
    mib = 2**20
    categories = {
        "parameters": 479,
        "optimizer": 958,
        "gradients": 479,
        "activations": 1604,
        "temporaries": 1310,
        "batch": 1,
        "program": 180,
    }
    return {
        "hbm_bytes": 95 * 2**30,
        "usable_bytes": 95 * 2**30,
        "total": sum(categories.values()) * mib,
        "fits": True,
        "categories": {name: size * mib for name, size in categories.items()},
        "host": {"activations": 512 * mib},
        "advice": [],
    }


def _lines(
    replay: _Replay,
    seconds: dict,
    exposed: dict,
    waits: set[str],
) -> list[dict[str, Any]]:
    lines: dict[tuple, dict[str, Any]] = {}
    for row, value in seconds.items():
        _, kind, scope, source, phase, size = row
        line = lines.setdefault(
            (scope, source, phase),
            {
                "scope": scope,
                "source": source,
                "phase": phase,
                "compute": 0.0,
                "communication": 0.0,
                "exposed": 0.0,
                "flops": 0.0,
                "bytes": 0,
                "count": 0,
            },
        )
        line["communication" if kind in waits else "compute"] += value
        line["exposed"] += exposed.get(row, 0.0) if kind != "host_copy" else 0.0
        line["flops"] += 4.0e14 * value if kind == "matmul" else 0.0
        line["bytes"] += size * replay.count[row]
        line["count"] += replay.count[row]
    return list(lines.values())


def _collectives(
    replay: _Replay, seconds: dict, exposed: dict, waits: set[str]
) -> list[dict[str, Any]]:
    found = []
    for row, value in seconds.items():
        name, kind, scope, source, phase, size = row
        if kind not in waits or kind == "host_copy":
            continue
        weights = name in ("all-gather.11", "all-gather.12", "reduce-scatter.70")
        planned = kind != "all-reduce"
        found.append(
            {
                "kind": kind,
                "axes": ["fsdp"] if weights else ["tensor"],
                "bytes": size,
                "sent_bytes": 0.75 * size * replay.count[row],
                "count": replay.count[row],
                "asynchronous": weights,
                "seconds": value,
                "exposed": exposed.get(row, 0.0),
                "scope": scope,
                "source": source,
                "phase": phase,
                "planned": planned,
                **({} if planned else {"reason": "the plan has no all-reduce over tensor here"}),
            }
        )
    return found


def _findings() -> list[dict[str, Any]]:
    return [
        {
            "rule": "unplanned-collective",
            "severity": "error",
            "scope": "head/loss",
            "source": "models/llama.py:133",
            "bytes": 131_072_000,
            "seconds": 3.1e-4,
            "message": (
                "all-reduce over tensor of the logits (bf16[1,8192,32064]); the plan "
                "sums their maxima only"
            ),
        },
        {
            "rule": "large-copy",
            "severity": "warning",
            "scope": "block/attention/kernel",
            "source": "jaxpar/parallel/linear/column.py:141",
            "bytes": 33_000_000,
            "seconds": 2.9e-3,
            "message": (
                "copy of bf16[1,8192,8,128] from layout {3,2,1,0} to {3,1,2,0} in each of 64 trips"
            ),
        },
        {
            "rule": "replicated-activation",
            "severity": "warning",
            "scope": "",
            "source": "",
            "bytes": 67_108_864,
            "seconds": 0.0,
            "message": "bf16[1,8192,4096] is whole on every device of tensor=4",
        },
    ]
