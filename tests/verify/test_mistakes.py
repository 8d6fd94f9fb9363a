"""Each mistake is recognised from the arrays alone, and a gradient that is merely rounded is not
taken for one.
"""

from __future__ import annotations

from typing import Any, get_args

import numpy as np
import pytest

from jaxpar.verify.mistakes import Evidence, MistakeKind, diagnose, guesses_of_part


def drawn(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


WANT = drawn(0, 8, 12, 8)
SIZES = {"data": 2, "fsdp": 4}
ERROR = drawn(1, *WANT.shape)


def split_in(count: int) -> list[np.ndarray]:
    """Random arrays that add up to WANT."""
    shares = drawn(count, count - 1, *WANT.shape)
    return [*shares, WANT - shares.sum(axis=0)]


def found(got: np.ndarray, **changes: Any) -> tuple[str, str]:
    evidence = Evidence(
        got + np.float32(1e-7) * ERROR[..., ::-1], WANT, **{"axis_sizes": SIZES, **changes}
    )
    finding = diagnose(evidence)
    assert finding.kind in get_args(MistakeKind)
    assert finding.fits == (finding.kind not in ("unknown", "rounding"))
    return finding.kind, finding.says


FACTORS = [
    (2.0, "sum doubled", "2 times the reference, the size of data, as if summed over it once more"),
    (4.0, "sum doubled", "4 times the reference, the size of fsdp"),
    (8.0, "sum doubled", "8 times the reference, the size of data x fsdp"),
    (1 / 4, "scaled", "1/4 of the reference, one over the size of fsdp: a mean in place of a sum?"),
    (3.0, "scaled", "3 times the reference"),
    (0.75, "scaled", "3/4 times the reference"),
    (1.001, "scaled", "1.001 times the reference"),
    (0.98, "scaled", "49/50 times the reference"),
    (-1.0, "sign", "minus the reference"),
    (0.0, "zero", "zero"),
]


@pytest.mark.parametrize(("factor", "kind", "says"), FACTORS)
def test_a_factor_is_named_by_what_has_that_size(factor: float, kind: str, says: str) -> None:
    got_kind, got_says = found(WANT * np.float32(factor))
    assert got_kind == kind
    assert got_says.startswith(says)


def test_two_axes_of_one_size_are_both_named() -> None:
    sizes = {"data": 2, "fsdp": 2, "tensor": 2}
    _, says = found(2 * WANT, sizes={"accumulation": 2}, axis_sizes=sizes)
    assert says == (
        "2 times the reference, the size of data or fsdp or tensor, as if summed over it once more"
    )


@pytest.mark.parametrize(
    ("dim", "order", "names"),
    [
        (0, [1, 2, 3, 0], "fsdp"),
        (0, [0, 2, 1, 3], "fsdp"),
        (2, [1, 0], "data"),
    ],
)
def test_permuted_blocks_are_put_in_order(dim: int, order: list[int], names: str) -> None:
    blocks = np.split(WANT, len(order), axis=dim)
    got = np.concatenate([blocks[place] for place in order], axis=dim)
    kind, says = found(
        got,
        split=[("fsdp",), (), ("data",)],
    )
    assert kind == "permuted"
    assert says == (
        f"the reference with its {len(order)} blocks along dim {dim} ({names}) in the order {order}"
    )


def test_some_layers_of_a_stacked_parameter_need_not_divide_over_stages() -> None:
    """Of eight layers on four stages three may differ, and be explained by themselves."""
    got = drawn(2, 3, 8, 8)
    want = WANT[:3, :8]
    assert (
        diagnose(Evidence(got, want, axis_sizes={"stage": 4}, split=[("stage",), (), ()])).kind
        == "unknown"
    )


def test_blocks_of_two_axes_together_are_permuted() -> None:
    order = [4, 5, 6, 7, 0, 1, 3, 2]
    kind, says = found(
        WANT[order],
        split=[("data", "fsdp"), (), ()],
    )
    assert (kind, f"(data x fsdp) in the order {order}" in says) == ("permuted", True)


def test_one_contribution_twice_alone_or_left_out() -> None:
    shards = split_in(4)
    batches = split_in(3)
    parts = [("shard", f"shard {i} of fsdp", value) for i, value in enumerate(shards)]
    parts += [("microbatch", f"microbatch {i}", value) for i, value in enumerate(batches)]
    guesses = [guess for part in parts for guess in guesses_of_part(*part, WANT)]
    assert found(shards[2], guesses=guesses) == (
        "sum missing",
        "the contribution of shard 2 of fsdp alone",
    )
    assert found(WANT - shards[1], guesses=guesses) == (
        "sum missing",
        "the reference without shard 1 of fsdp",
    )
    assert found(WANT + shards[0], guesses=guesses) == (
        "sum doubled",
        "the reference with shard 0 of fsdp counted twice",
    )
    assert found(WANT + batches[1], guesses=guesses) == (
        "microbatch",
        "the reference with microbatch 1 counted twice",
    )
    assert found(WANT - batches[2], guesses=guesses) == (
        "microbatch",
        "the reference without microbatch 2",
    )


def test_copies_that_add_up_tell_of_a_missing_sum() -> None:
    copies = np.stack(split_in(2))
    assert found(copies[0], copies={"data": copies})[0] == "sum missing"
    kind, says = found(
        copies[0],
        copies={"data": copies * np.float32(1.5)},
    )
    assert (kind, "copies along data differ by" in says) == ("copies", True)
    same = np.stack([2 * WANT, 2 * WANT])
    assert found(2 * WANT, copies={"data": same})[0] == "sum doubled"


def test_another_computation_is_recognised() -> None:
    other = drawn(2, *WANT.shape)
    guesses = [
        ("mask", "a token sees the one after it", other),
        ("documents", "documents mix", -other),
    ]
    assert found(other, guesses=guesses) == ("mask", "a token sees the one after it")


def test_errors_without_structure_are_rounding_and_larger_ones_unknown() -> None:
    kind, says = found(WANT * (1 + np.float32(2e-3) * ERROR))
    assert kind == "rounding"
    assert says.startswith("the reference but for 2.0e-03 without structure")
    assert found(WANT + ERROR)[0] == "unknown"
    spike = np.zeros_like(WANT)
    spike[3, 4, 5] = 0.1  # as small as rounding, but in one place
    assert found(WANT + spike)[0] == "unknown"


def test_the_nearest_is_named_where_none_fits() -> None:
    kind, says = found(-WANT + np.float32(0.5) * ERROR)
    assert kind == "unknown"
    assert says.startswith("nearest to ")
    assert "which leaves 2" in says


def test_nan_is_said_and_not_compared() -> None:
    got = WANT.copy()
    got[0] = np.nan
    assert found(got) == ("not finite", "not finite in 12.5% of its entries")
