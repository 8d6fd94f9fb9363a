"""The known mistakes that may make a gradient wrong: each predicts a gradient from the right one,
and one may fit.

The hypothesis that leaves the least of the difference unexplained is the finding. This is pure
numpy: it knows no model, no mesh and no jax.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Literal, NamedTuple

import numpy as np

# a hypothesis fits if it leaves at most this share of the difference; true ones leave only rounding
FITS = 0.05
# the largest relative error of rounding; bfloat16 has 8 bits: an ulp of each factor is at most 2^-8
_ROUNDING = 0.03
# a factor within this relative distance of a size is tried as that size, and the residual judges
_NEAR = 0.01
_LARGEST_FACTOR = 64  # the largest denominator of a factor that is written as a fraction

MistakeKind = Literal[
    "zero",
    "sign",
    "sum doubled",
    "sum missing",
    "microbatch",
    "scaled",
    "permuted",
    "mask",
    "documents",
    "mean",
    "shard",
    "copies",
    "rounding",
    "not finite",
    "unknown",
]
"""The name of a kind of mistake; docs/verify.md says what each one means."""
Guess = tuple[MistakeKind, str, np.ndarray]
"""A hypothesis: its kind, what it says, and what the gradient would be if it were true."""


@dataclass(frozen=True)
class Evidence:
    """One wrong gradient, and what it may be compared with. All arrays have the same shape unless
    stated.

    Attributes:
      got: the gradient that is wrong.
      want: the reference's gradient.
      axis_sizes: the number of devices along each mesh axis.
      sizes: other numbers that a wrong factor may be, by name, such as accumulation or query heads
        per kv head.
      split: the mesh axes that split each dim.
      guesses: what the gradient would be after mistakes that only the caller can compute.
      copies: for each mesh axis that should hold equal copies, the gradient at each coordinate of
        it, [n, *shape].
    """

    got: np.ndarray
    want: np.ndarray
    axis_sizes: Mapping[str, int] = field(default_factory=dict)
    sizes: Mapping[str, int] = field(default_factory=dict)
    split: Sequence[tuple[str, ...]] = ()
    guesses: Sequence[Guess] = ()
    copies: Mapping[str, np.ndarray] = field(default_factory=dict)

    def of_layers(self, layers: Sequence[int]) -> Evidence:
        """Return the evidence of some layers only, numbered from 0, which dim 0 counts. `split`
        still says how all layers were split.
        """
        pick = list(layers)
        guesses = [(kind, says, value[pick]) for kind, says, value in self.guesses]
        copies = {axis: value[:, pick] for axis, value in self.copies.items()}
        return replace(
            self, got=self.got[pick], want=self.want[pick], guesses=guesses, copies=copies
        )


class Finding(NamedTuple):
    """The way in which a gradient differs."""

    kind: MistakeKind
    says: str
    """The mistake in words that follow "the gradient is "."""
    residual: float
    """The norm of what the mistake leaves unexplained over the norm of the difference; 1 = nothing
    is explained.
    """

    @property
    def fits(self) -> bool:
        """Whether the mistake explains the difference and is not only the nearest guess."""
        return self.residual <= FITS


def diagnose(evidence: Evidence, layers: Sequence[int] | None = None) -> Finding:
    """Find the hypothesis that explains a wrong gradient best; `unknown`, with the nearest named,
    if none does.

    The layers that differ are explained together, or else the last of them alone, because a mistake
    there is passed back to the layers before it.

    Args:
      evidence: the wrong gradient, the right one, and what may tell how they differ.
      layers: the numbers of the layers that differ, for a gradient that is stacked over layers
        along dim 0; None or empty = take it as a whole.
    """
    if not layers:
        return _diagnose(evidence)
    together = _diagnose(evidence.of_layers(layers))
    if together.fits or len(layers) == 1:
        if len(layers) == len(evidence.want):
            return together
        only = f"layer{'s' if len(layers) > 1 else ''} {', '.join(map(str, layers))}"
        return together._replace(says=f"{together.says} (in {only} only)")
    last = _diagnose(evidence.of_layers(layers[-1:]))
    if not last.fits:
        return together
    return last._replace(
        says=f"{last.says} (in layer {layers[-1]}; those before it differ otherwise)"
    )


def _diagnose(evidence: Evidence) -> Finding:
    if not np.all(np.isfinite(evidence.got)):
        share = 1 - np.mean(np.isfinite(evidence.got))
        return Finding("not finite", f"not finite in {share:.1%} of its entries", 0.0)
    difference = _distance(evidence.got, evidence.want)
    found = _differing_copies(evidence, difference)
    # What each known mistake would have made of the reference, from the plain to the particular.
    zero: Guess = ("zero", "zero", np.zeros_like(evidence.want))
    for kind, says, predicted in (
        zero,
        *_factor(evidence),
        *_best_permutations(evidence),
        *evidence.guesses,
    ):
        found.append(
            Finding(kind, says, _distance(evidence.got, predicted) / max(difference, 1e-300))
        )
    best = min(found, key=lambda finding: finding.residual)
    if best.fits:  # take the first of those that fit equally well
        close = min(max(2 * best.residual, FITS / 50), FITS)
        return next(finding for finding in found if finding.residual <= close)
    if _is_rounding(evidence):
        error = difference / max(
            float(np.linalg.norm(_wide(evidence.want))),
            1e-300,
        )
        said = (
            f"the reference but for {error:.1e} without structure, as if computed in a lower "
            "precision"
        )
        return Finding("rounding", said, 1.0)
    if best.residual > 0.5:
        return Finding("unknown", "like nothing that was tried", min(best.residual, 1.0))
    said = f"nearest to {best.says}, which leaves {best.residual:.0%} of the difference"
    return Finding("unknown", said, best.residual)


def _factor(evidence: Evidence) -> Iterator[Guess]:
    """Yield the factor that fits best: as the meaningful number that it is near, if any, and as
    it is.
    """
    got = _wide(evidence.got)
    want = _wide(evidence.want)
    factor = float(
        np.vdot(got, want)
        / max(
            float(np.vdot(want, want)),
            1e-300,
        )
    )
    sizes = {**evidence.axis_sizes, **evidence.sizes}
    whole = evidence.want * np.float32(round(factor))
    if names := _of_size(evidence.axis_sizes, factor):
        says = (
            f"{factor:.0f} times the reference, the size of {names}, as if summed over it once more"
        )
        yield "sum doubled", says, whole
    elif names := _of_size(sizes, factor):
        yield "scaled", f"{factor:.0f} times the reference, the size of {names}", whole
    if factor and (names := _of_size(sizes, 1 / factor)):
        says = (
            f"1/{1 / factor:.0f} of the reference, one over the size of {names}: a mean in "
            "place of a sum?"
        )
        yield "scaled", says, evidence.want / np.float32(round(1 / factor))
    number = Fraction(factor).limit_denominator(_LARGEST_FACTOR)
    if number == -1:
        yield "sign", "minus the reference", -evidence.want
    elif number != 1:
        yield "scaled", f"{number} times the reference", evidence.want * np.float32(number)
    yield "scaled", f"{factor:.6g} times the reference", evidence.want * np.float32(factor)


def _of_size(sizes: Mapping[str, int], value: float) -> str:
    """Name the sizes, or products of two sizes, that a factor is near: `data or fsdp`; empty if it
    is near none.
    """
    products = {f"{a} x {b}": m * n for (a, m), (b, n) in itertools.combinations(sizes.items(), 2)}
    near = {
        name
        for name, size in {**sizes, **products}.items()
        if size > 1 and abs(value / size - 1) <= _NEAR
    }
    return " or ".join(name for name in sizes if name in near) or " or ".join(sorted(near))


def _best_permutations(evidence: Evidence) -> Iterator[Guess]:
    """Yield the shards of a dim in the order that fits best, for each mesh axis that splits it and
    for all of them.
    """
    for dim, axes in enumerate(evidence.split):
        for names in dict.fromkeys([*((axis,) for axis in axes), axes] if axes else []):
            count = math.prod(evidence.axis_sizes[name] for name in names)
            # these are only some layers of a stacked parameter
            if evidence.want.shape[dim] % count:
                continue
            got, want = (
                np.split(array, count, axis=dim) for array in (evidence.got, evidence.want)
            )
            order = [int(np.argmin([_distance(block, other) for other in want])) for block in got]
            if sorted(order) == list(range(count)) != order:
                blocks = f"{count} blocks along dim {dim} ({' x '.join(names)})"
                says = f"the reference with its {blocks} in the order {order}"
                yield "permuted", says, np.concatenate([want[place] for place in order], axis=dim)


def guesses_of_part(
    what: str,
    name: str,
    value: np.ndarray,
    want: np.ndarray,
) -> list[Guess]:
    """Guess that one contribution to a gradient stands alone, is counted twice or is left out.

    Args:
      what: `microbatch`, or `shard` where a sum over a mesh axis adds the contributions up.
      name: what the contribution is called, say `shard 0 of data`.
      value: the contribution, of the gradient's shape.
      want: the whole gradient of the reference.
    """
    missing: MistakeKind = "sum missing" if what == "shard" else "microbatch"
    doubled: MistakeKind = "sum doubled" if what == "shard" else "microbatch"
    return [
        (missing, f"the contribution of {name} alone", value),
        (doubled, f"the reference with {name} counted twice", want + value),
        (missing, f"the reference without {name}", want - value),
    ]


def _differing_copies(evidence: Evidence, difference: float) -> list[Finding]:
    """Find copies that are not equal; where they add up to the reference, the sum over their axis
    was left out.
    """
    norm = float(np.linalg.norm(_wide(evidence.want)))
    spread = {
        axis: max(_distance(copy, copies[0]) for copy in copies)
        for axis, copies in evidence.copies.items()
    }
    differing = {axis: distance for axis, distance in spread.items() if distance > 1e-4 * norm}
    found = []
    for axis in differing:
        total = evidence.copies[axis].sum(axis=0, dtype=np.float64)
        for value, what in (
            (total, "add up to"),
            (total / len(evidence.copies[axis]), "are on average"),
        ):
            says = (
                f"a part: copies along {axis} differ and {what} the reference, the sum over "
                "it is missing"
            )
            found.append(
                Finding(
                    "sum missing", says, _distance(value, evidence.want) / max(difference, 1e-300)
                )
            )
    if differing:
        share = max(differing.values()) / max(norm, 1e-300)
        says = f"not one array: copies along {' and '.join(differing)} differ by {share:.1e}"
        found.append(Finding("copies", says, FITS))
    return found


def _is_rounding(evidence: Evidence) -> bool:
    """Return whether the errors are small, do not follow the reference and are not gathered in a
    few places.
    """
    got = _wide(evidence.got)
    want = _wide(evidence.want)
    error = got - want
    rms, scale = (float(np.sqrt(np.mean(np.square(x)))) for x in (error, want))
    if rms > _ROUNDING * scale:
        return False
    follows = abs(float(np.vdot(error, want))) / max(rms * scale * error.size, 1e-300)
    return follows < 0.5 and float(np.median(np.abs(error))) > 0.02 * rms


def _distance(a: np.ndarray, b: np.ndarray) -> float:
    return float(np.linalg.norm(_wide(a) - _wide(b)))


def _wide(x: np.ndarray) -> np.ndarray:
    return np.asarray(x, np.float64).ravel()
