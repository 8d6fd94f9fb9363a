"""Pipeline schedules: valid, and as long, as small and as talkative as the closed forms of the
literature say.
"""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections.abc import Callable
from typing import Any

import pytest

from jaxpar.base.config import Config, override
from jaxpar.base.config.checks import check as check_config
from jaxpar.base.errors import UserError
from jaxpar.base.registry import SCHEDULES
from jaxpar.parallel.pipeline.program import program
from jaxpar.parallel.pipeline.schedules import (
    Action,
    Table,
    Times,
    check_table,
    register_schedule,
    schedule,
    simulate_schedule,
)

# those of which the literature has closed forms
NAMES = ("gpipe", "1f1b", "interleaved", "looped")
CHUNKED = ("interleaved", "looped")
STAGES = (1, 2, 3, 4, 5, 8)

every_schedule = pytest.mark.parametrize("name", NAMES)
every_stages = pytest.mark.parametrize("P", STAGES)


def batches(P: int) -> list[int]:
    """M to try."""
    return sorted(
        {
            1,
            2,
            max(P - 1, 1),
            P,
            P + 1,
            2 * P,
            2 * P + 1,
            3 * P,
            3 * P + 2,
        }
    )


def sizes(name: str, P: int) -> list[tuple[int, int]]:
    """M and v to try."""
    return [(M, v) for M in batches(P) for v in ((1, 2, 3) if name in CHUNKED else (1,))]


def some_times(*seed: Any, count: int = 3) -> list[Times]:
    """Unit times, and some at random, in whole numbers so that sums are exact."""
    draw = random.Random(str(seed))
    weights = [draw.randint(1, 8) for _ in range(count)]
    return [
        Times(),
        *(Times(draw.randint(1, 9), draw.randint(1, 5) + W) for W in weights),
    ]


def group(P: int, M: int) -> int:
    """The largest group that goes through the chunks together: P, or what more it takes to share
    out M.
    """
    groups = max(M // P, 1)
    return max(P, -(-M // groups))


# Valid tables.


@every_stages
@every_schedule
def test_every_table_is_valid_in_ticks_of_one_kind(name, P):
    for M, v in sizes(name, P):
        table = schedule(name, P, M, v)
        check_table(table)
        kinds = [{action.kind for action in tick if action} for tick in table.ticks]
        assert {len(kind) for kind in kinds} == {1}
        ticks = M * v + P - 1 if M >= P else v * P + M - 1
        assert kinds.count({"forward"}) == kinds.count({"backward"}) == ticks == len(kinds) / 2


# Time. In one program, where a transfer takes none.


@every_stages
@every_schedule
def test_time(name, P):
    """(M v + P - 1)(f + b): GPipe (Huang et al. 2018, arXiv:1811.06965), 1F1B (Narayanan et al.
    2021, arXiv:2104.04473, section 2.2), and with chunks f = F/v, an idle time of (P - 1)(F + B)/v:
    interleaved (ibid.), looped (Lamy-Poirier 2022, arXiv:2211.05953). Interleaved is given for M a
    multiple of P; these tables need M >= P only. With less, a microbatch is back at the first stage
    after P ticks and finds it idle: (v P + M - 1)(f + b).
    """
    for (M, v), times in itertools.product(
        sizes(name, P),
        some_times(name, P),
    ):
        found = simulate_schedule(schedule(name, P, M, v), times)
        one = times.forward + times.backward
        assert found.makespan == (M * v + P - 1 if M >= P else v * P + M - 1) * one
        if M >= P:
            assert found.makespan - M * v * one == (P - 1) * one
            assert found.bubble == pytest.approx((P - 1) / (M * v + P - 1))


# Memory.


@every_stages
@every_schedule
def test_stash(name, P):
    """GPipe keeps all M inputs, looped all M v. 1F1B in one program keeps 2(P - s) - 1 at most, the
    warm-up of "eager" 1F1B (Zhuang et al. 2022, arXiv:2211.05322); interleaved (v - 1) G + 2(P - 1
    - s) + 1, for G = P the warm-up of Megatron-LM (`num_warmup_microbatches`) and one. So at most
    2P - 1 without chunks.
    """
    for M, v in sizes(name, P):
        found = simulate_schedule(schedule(name, P, M, v))
        G = group(P, M)
        formulas = {
            "gpipe": lambda s, M=M: M,
            "1f1b": lambda s, M=M: min(M, 2 * (P - s) - 1),
            "interleaved": lambda s, M=M, v=v, G=G: (
                min(
                    M * v,
                    (v - 1) * G + 2 * (P - 1 - s) + 1,
                )
                if M >= P
                else (v - 1) * M
                + min(
                    M,
                    2 * (P - 1 - s) + 1,
                )
            ),
            "looped": lambda s, M=M, v=v: M * v,
        }
        assert list(found.stash) == [formulas[name](s) for s in range(P)]
        steps = program(schedule(name, P, M, v))
        # one more for what a stage writes while it is idle
        assert 0 <= steps.stash - max(found.stash) <= 1


# Transfers.


@pytest.mark.parametrize("P", STAGES[1:])
@every_schedule
def test_what_transfers_cost(name, P):
    """What no other tick of their round hides, though it would have the time: in 1F1B the warm-up's
    P - 1 and as many at the end, with chunks P v - 1 of each; without other ticks every one.
    """
    times = Times(5, 12, transfer=2)
    for M, v in sizes(name, P):
        late = {
            "gpipe": 2 * (M + P - 2),
            "1f1b": 2 * (P - 1),
            "interleaved": 2 * (P * v - 1),
            "looped": 2 * (M * v + P - 2),
        }
        if M % P == 0 or (name not in CHUNKED) or (name == "looped" and M > P):
            table = schedule(name, P, M, v)
            cost = (
                simulate_schedule(table, times).makespan
                - simulate_schedule(table, times._replace(transfer=0)).makespan
            )
            assert cost == late[name] * times.transfer


def test_a_transfer_by_hand():
    """Two stages, one microbatch: forward 0-3, sent until 5, forward 5-8, backward 8-12, sent until
    14, backward.
    """
    times = Times(3, 4, transfer=2)
    found = simulate_schedule(schedule("gpipe", 2, 1), times)
    assert (found.makespan, found.starts, found.bubble) == (
        18,
        (0, 5, 8, 14),
        pytest.approx(1 - 14 / 36),
    )
    # a stage sends nothing to itself
    assert simulate_schedule(schedule("gpipe", 1, 4), times).makespan == 28


@every_schedule
def test_no_stage_does_two_things_and_nothing_comes_early(name):
    P = 4
    M = 9
    v = 2 if name in CHUNKED else 1
    table = schedule(name, P, M, v)
    times = Times(2, 7, transfer=4)
    starts = simulate_schedule(table, times).starts
    begin = {
        (a, s): starts[t] for t, tick in enumerate(table.ticks) for s, a in enumerate(tick) if a
    }
    by_stage = [
        sorted((time, a) for (a, stage), time in begin.items() if stage == s) for s in range(P)
    ]
    for column in by_stage:
        assert all(
            after >= time + times.of(a.kind) for (time, a), (after, _) in itertools.pairwise(column)
        )
    for (action, s), time in begin.items():
        place = action.chunk * P + s
        if action.kind == "forward":
            before = place - 1
        else:
            before = place + 1
        if 0 <= before < P * v:
            sender = action._replace(chunk=before // P)
            assert time >= begin[sender, before % P] + times.of(action.kind) + times.transfer


# The checker.


def first_of_stage_1_before_its_input(rows: list[list[Action | None]]) -> None:
    rows[0][1] = rows[1][1]
    rows[1][1] = None


def last_stage_a_tick_early(rows: list[list[Action | None]]) -> None:
    column = [row[-1] for row in rows[1:]] + [None]
    for row, action in zip(rows, column, strict=True):
        row[-1] = action


def last_microbatch_dropped(rows: list[list[Action | None]]) -> None:
    last = max(action.microbatch for row in rows for action in row if action)
    for row in rows:
        row[:] = [None if action and action.microbatch == last else action for action in row]


def one_backward_forgotten(rows: list[list[Action | None]]) -> None:
    t, s = next(
        (t, s)
        for t, row in enumerate(rows)
        for s, a in enumerate(row)
        if a and a.kind == "backward"
    )
    rows[t][s] = None


def one_microbatch_twice(rows: list[list[Action | None]]) -> None:
    rows.append(
        [
            next(action for action in rows[0] if action),
            *[None] * (len(rows[0]) - 1),
        ]
    )


def two_ticks_swapped(rows: list[list[Action | None]]) -> None:
    rows[1], rows[2] = rows[2], rows[1]


def last_tick_first(rows: list[list[Action | None]]) -> None:
    rows.insert(0, rows.pop())


def chunks_taken_for_each_other(rows: list[list[Action | None]]) -> None:
    for row in rows:
        if row[0] and row[0].kind == "forward":
            row[0] = row[0]._replace(chunk=1 - row[0].chunk)


def changed(
    table: Table,
    change: Callable[[list[list[Action | None]]], None],
) -> Table:
    rows = [list(tick) for tick in table.ticks]
    change(rows)
    return Table(
        table.stages, table.microbatches, table.virtual, tuple((tuple(row),) for row in rows)
    )


FAULTS = [
    (
        first_of_stage_1_before_its_input,
        "1f1b",
        1,
        "tick 0, stage 1: forward of microbatch 0, chunk 0 needs forward of microbatch 0, chunk "
        "0 of stage 0: "
        "is done in tick 0",
    ),
    (last_stage_a_tick_early, "1f1b", 1, "tick 2, stage 3: forward of microbatch 0"),
    (
        last_microbatch_dropped,
        "gpipe",
        1,
        "stage 0: the end, and forward of microbatch 4, chunk 0 is never done",
    ),
    (
        one_microbatch_twice,
        "looped",
        2,
        "stage 0: forward of microbatch 0, chunk 0: done before, in tick 0",
    ),
    (
        two_ticks_swapped,
        "gpipe",
        1,
        "tick 1, stage 1: forward of microbatch 1, chunk 0 needs .* is done in tick 2",
    ),
    (
        last_tick_first,
        "gpipe",
        1,
        "tick 0, stage 0: backward of microbatch 4, chunk 0 needs .* is done in tick",
    ),
    (
        one_backward_forgotten,
        "interleaved",
        2,
        "needs backward of microbatch 0, chunk 1 of stage 3: is never done",
    ),
    (
        chunks_taken_for_each_other,
        "interleaved",
        2,
        "tick 0, stage 0: forward of microbatch 0, chunk 1 needs forward of microbatch 0, chunk "
        "0 of stage 3",
    ),
    (
        chunks_taken_for_each_other,
        "1f1b",
        1,
        "tick 0, stage 0: forward of microbatch 0, chunk 1: this table has .* chunks 0 to 0",
    ),
]


@pytest.mark.parametrize(("change", "name", "v", "message"), FAULTS)
def test_a_fault_is_found_and_named(change, name, v, message):
    table = schedule(name, 4, 5, v)
    check_table(changed(table, lambda rows: None))
    with pytest.raises(
        UserError, match=f"tick .*{message}" if not message.startswith("tick") else message
    ):
        check_table(changed(table, change))
    with pytest.raises(UserError):
        simulate_schedule(changed(table, change))


def test_cells_that_no_table_has():
    one = Action("forward", 0), Action("backward", 0)
    for ticks, message in [
        (((one[0],), (None, one[1])), "tick 1 has 2 stages, not 1"),
        (
            ((one[0],), (Action("backward", 1),)),
            "tick 1, stage 0: backward .*: this table has .* microbatches 0 to 0",
        ),
        (((Action("rest", 0),),), "tick 0, stage 0: rest"),  # type: ignore
        (((one[0],), (Action("weight", 0),)), "weight .*: this table has"),  # type: ignore
        (
            ((one[0],), (None,), (one[1],)),
            "round 1 .*nothing",
        ),
    ]:
        with pytest.raises(UserError, match=message):
            check_table(Table(1, 1, 1, tuple((tick,) for tick in ticks)))


def test_what_the_executor_could_not_run_is_refused():
    """Its ticks are of one kind, and a scan over rounds has one row of each kind."""
    F0 = Action("forward", 0)
    F1 = Action("forward", 1)
    B0 = Action("backward", 0)
    B1 = Action("backward", 1)
    mixed = (
        (F0, None),
        (None, F0),
        (F1, B0),
        (B0, F1),
        (None, B1),
        (
            B1,
            None,
        ),
    )
    with pytest.raises(
        UserError,
        match=r"round 2 .*backward and forward",
    ):
        check_table(Table(2, 2, 1, tuple((tick,) for tick in mixed)))
    rows = schedule("gpipe", 2, 1).ticks
    with pytest.raises(UserError, match=r"round 0 .*forward, forward"):
        check_table(
            Table(
                2,
                1,
                1,
                (rows[:2], rows[2:3], rows[3:]),
            )
        )


def is_valid(table: Table) -> bool:
    """The definition by tick numbers: a microbatch's ticks rise along the stages and fall back, all
    of one kind.
    """
    if any(len({action.kind for action in tick if action}) != 1 for tick in table.ticks):
        return False
    P = table.stages
    M = table.microbatches
    v = table.virtual
    when: dict[tuple[str, int, int], list[int]] = {}
    for t, tick in enumerate(table.ticks):
        for s, a in enumerate(tick):
            if a:
                when.setdefault((a.kind, a.microbatch, a.chunk * P + s), []).append(t)
    chain = [
        [(kind, i, p) for p in places]
        for i in range(M)
        for kind, places in (("forward", range(P * v)), ("backward", range(P * v - 1, -1, -1)))
    ]
    paths = [chain[2 * i] + chain[2 * i + 1] for i in range(M)]
    if any(len(when.get(place, [])) != 1 for path in paths for place in path):
        return False
    return all(when[a][0] < when[b][0] for path in paths for a, b in itertools.pairwise(path))


@pytest.mark.parametrize("name", NAMES)
def test_the_checker_finds_what_the_definition_does(name):
    """Two cells of a stage exchanged, at random: sometimes it matters, and sometimes not."""
    table = schedule(name, 3, 4, 2 if name in CHUNKED else 1)
    draw = random.Random(name)
    found = []
    for _ in range(300):
        s = draw.randrange(3)
        (a, b) = draw.sample(range(len(table.ticks)), 2)

        def exchange(
            rows: list[list[Action | None]],
            s: int = s,
            a: int = a,
            b: int = b,
        ) -> None:
            rows[a][s], rows[b][s] = rows[b][s], rows[a][s]

        other = changed(table, exchange)
        try:
            check_table(other)
            found.append(True)
        except UserError:
            found.append(False)
        assert found[-1] == is_valid(other)
    assert {True, False} == set(found)


# What is refused.


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ("1f1", 4, 8, 1),
            r"is one of gpipe, 1f1b, interleaved, looped.*, found '1f1' \(did you mean '1f1b'\?\)",
        ),
        (("1f1b", 0, 8, 1), "found 0, 8, 1"),
        (("1f1b", 4, 0, 1), "found 4, 0, 1"),
        (("looped", 4, 8, 0), "found 4, 8, 0"),
        (
            ("1f1b", 4, 8, 2),
            "1f1b .*pipeline.virtual=2: try pipeline.schedule",
        ),
        (("gpipe", 4, 8, 3), "found pipeline.virtual=3"),
    ],
)
def test_schedules_that_there_are_not(words, message):
    with pytest.raises(UserError, match=message):
        schedule(*words)


def test_the_bubble_of_as_many_microbatches_as_stages():
    assert simulate_schedule(schedule("1f1b", 8, 8)).bubble == pytest.approx(7 / 15)


# Schedules of one's own.


def last_first(action: Action | None, microbatches: int) -> Action | None:
    if action is None or action.kind == "forward":
        return action
    return action._replace(microbatch=microbatches - 1 - action.microbatch)


@pytest.fixture
def late():
    """A schedule of one's own: GPipe whose last microbatch has its backward first."""

    @register_schedule("late")
    def build(stages, microbatches, virtual):
        ours = schedule("gpipe", stages, microbatches, virtual)
        rounds = tuple(
            tuple(tuple(last_first(action, microbatches) for action in tick) for tick in part)
            for part in ours.rounds
        )
        return dataclasses.replace(ours, rounds=rounds)

    yield build
    SCHEDULES.remove("late")


def test_a_schedule_of_ones_own_is_named_by_a_config_and_by_the_messages(late):
    config = override(Config(), {"pipeline.schedule": "late", "mesh.stage": 2})
    assert check_config(config) is config
    assert schedule("late", 2, 4) == late(2, 4, 1)
    with pytest.raises(
        UserError, match=r"pipeline.schedule is one of gpipe, .*, late, found 'lat'"
    ):
        check_config(override(Config(), {"pipeline.schedule": "lat", "mesh.stage": 2}))
    with pytest.raises(UserError, match="late has one virtual"):
        schedule("late", 2, 4, 2)


def test_a_registered_schedule_that_is_wrong_is_refused_by_its_name(late):
    @register_schedule("wrong")
    def wrong(stages, microbatches, virtual):
        table = late(stages, microbatches, virtual)
        return dataclasses.replace(table, rounds=table.rounds[:-1])

    @register_schedule("other_sizes")
    def other_sizes(stages, microbatches, virtual):
        return late(stages, 1, virtual)

    try:
        with pytest.raises(UserError, match="wrong made no valid"):
            schedule("wrong", 2, 4)
        with pytest.raises(UserError, match=r"other_sizes made a table of \(2, 1, 1\)"):
            schedule("other_sizes", 2, 4)
        with pytest.raises(UserError, match="'late' is registered already"):
            register_schedule("late")(wrong)
        with pytest.raises(UserError, match="given 'two words'"):
            register_schedule("two words")(wrong)
    finally:
        SCHEDULES.remove("wrong")
        SCHEDULES.remove("other_sizes")
