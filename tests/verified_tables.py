"""The tables of docs/verified.md and docs/pipeline.md: plans against one device, a row each."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from jaxpar.verify.of_config import Verification


def print_table(
    head: list[str], plans: Iterable[tuple[list[str], Verification]], capsys: pytest.CaptureFixture
) -> list[str]:
    """Print each plan's cells, its errors and whether it is equal, as soon as it is there; return
    what is not.
    """
    different = []
    worst = 0.0
    count = 0

    def say(cells: list[str]) -> None:
        with capsys.disabled():
            print(f"| {' | '.join(cells)} |", flush=True)

    with capsys.disabled():
        print()
    say([*head, "loss", "worst gradient", "bfloat16"])
    say(["---"] * (len(head) + 3))
    for cells, found in plans:
        count += 1
        check, *others = found.checks
        rounded = [one for one in others if not one.of_update]
        largest = max(check.rows, key=lambda row: row.error)
        worst = max(worst, largest.error)
        shares = [row.error / row.tolerance for one in rounded for row in one.rows]
        errors = [f"{check.loss_error:.1e}", f"{largest.error:.1e} {largest.name}"]
        say(
            [
                *cells,
                *errors,
                (f"{max(shares):.2f}" if shares else "") if found.equal else "DIFFERS",
            ]
        )
        different += [] if found.equal else [str(found)]
    with capsys.disabled():
        print(f"\n{count} plans, {len(different)} different; worst gradient {worst:.1e}")
    return different
