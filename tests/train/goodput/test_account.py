"""What the time of a run went on: one process by a clock, and several by their accounts."""

import json
import threading
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxpar.train.goodput import (
    CAUSES,
    GOODPUT,
    Account,
    Clock,
    DeviceClock,
    Life,
    add_up,
    read_lives,
)
from jaxpar.train.goodput.account import Mark
from jaxpar.train.goodput.measured import measure_run


class Hands:
    """A clock that a test turns by hand."""

    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now

    def turn(self, seconds):
        self.now += seconds


def found(seconds):
    """The causes that took time."""
    return {cause: value for cause, value in seconds.items() if value}


def test_a_phase_is_taken_out_of_the_one_around_it():
    hands = Hands()
    clock = Clock(began=97.0, time_now=hands)
    hands.turn(1)
    with clock.during("evaluation"):
        hands.turn(10)
        with clock.during("compiling"):
            hands.turn(5)
        hands.turn(2)
    hands.turn(4)
    clock.enter("productive")
    hands.turn(8)
    expected = {"startup": 3 + 1 + 4, "evaluation": 12, "compiling": 5, "productive": 8}
    assert found(clock.seconds()) == expected


def test_a_phase_that_an_error_leaves_has_ended():
    hands = Hands()
    clock = Clock(time_now=hands)
    with suppress(ValueError), clock.during("saving"):
        hands.turn(1)
        raise ValueError
    hands.turn(2)
    assert found(clock.seconds()) == {"saving": 1, "startup": 2}


@given(st.lists(st.tuples(st.sampled_from(list(CAUSES)), st.floats(0, 1e6)), max_size=20))
def test_every_second_has_one_cause(phases):
    hands = Hands()
    clock = Clock(time_now=hands)
    for cause, seconds in phases:
        clock.enter(cause)
        hands.turn(seconds)
        clock.move(cause, "other", seconds / 3)
    assert sum(clock.seconds().values()) == pytest.approx(hands.now - 100.0)
    assert min(clock.seconds().values()) >= 0


def test_no_more_is_moved_than_there_is():
    hands = Hands()
    clock = Clock(time_now=hands)
    clock.enter("data")
    hands.turn(2)
    clock.move("data", "productive", 3.0)
    clock.move("evaluation", "productive", 3.0)
    assert found(clock.seconds()) == {"productive": 2}


class Step:
    """An array of a device that finishes when the test says so."""

    def __init__(self):
        self.done = threading.Event()

    def block_until_ready(self):
        assert self.done.wait(20)


def test_a_wait_counts_only_once_the_device_has_nothing_to_do():
    hands = Hands()
    device = DeviceClock(hands)
    assert device.busy_seconds(100.0, 101.0) == 0.0  # before the first step
    step = Step()
    device.step_began(step)
    assert device.busy_seconds(100.0, 104.0) == 4.0  # it runs still
    hands.turn(3)
    step.done.set()
    device.close()
    for thread in threading.enumerate():
        if thread.name == "device clock":
            thread.join(20)
    assert device.busy_seconds(101.0, 110.0) == 2.0
    assert device.busy_seconds(104.0, 110.0) == 0.0


def life(began, seconds, lowest=0, step=0, marks=(), saves=0):
    seconds = dict.fromkeys(CAUSES, 0.0) | seconds
    marks = [Mark(*mark) for mark in marks]
    return Life(began, began + sum(seconds.values()), lowest, step, saves, seconds, marks)


def test_what_a_fault_has_cost_is_wasted_and_the_time_between_is_down():
    first = life(1000, {"startup": 5, "productive": 50}, 0, 25, [(10, 20), (20, 40)])
    second = life(1060, {"startup": 4, "restoring": 1, "productive": 30}, 20, 35)
    total = add_up([first, second])
    expected = {"startup": 9, "restoring": 1, "productive": 70, "wasted": 10, "down": 5}
    assert found(total.seconds) == expected
    assert total.wall == second.ended - first.began
    assert total.goodput == pytest.approx(70 / 95)
    assert total.lives == 2


def test_work_counts_once_where_a_later_process_goes_back_behind_an_earlier_one():
    """The checkpoint of step 20 was damaged, so that the third goes on from step 10."""
    first = life(0, {"productive": 50}, 0, 25, [(10, 20), (20, 40)])
    second = life(50, {"productive": 30}, 20, 35, [(30, 20)])
    third = life(80, {"productive": 60}, 10, 40)
    total = add_up([first, second, third])
    assert found(total.seconds) == {"productive": 80, "wasted": 60}


def test_time_in_which_two_processes_were_there_counts_once():
    first = life(0, {"productive": 10}, 0, 5, [(5, 10)])
    second = life(8, {"startup": 5, "productive": 10}, 5, 10)
    total = add_up([first, second])
    assert found(total.seconds) == {"productive": 20, "startup": 3}
    assert total.wall == 23 == second.ended - first.began


def test_time_in_which_two_processes_were_there_counts_once_however_long_it_is():
    """It was taken out of the start-up alone, and the wall time was longer than it is."""
    first = life(0, {"productive": 100}, 0, 10)
    second = life(50, {"startup": 1, "saving": 9, "productive": 90}, 10, 20)
    total = add_up([first, second])
    assert found(total.seconds) == {"productive": 150}
    third = life(60, {"startup": 1, "productive": 9}, 20, 21)
    assert add_up([first, second, third]).wall == 150


def open_account(folder, hands, first=0):
    account = Account(began=hands.now, time_now=hands)
    account.open(folder, first)
    return account


def test_a_step_that_is_skipped_is_no_goodput(tmp_path):
    hands = Hands()
    account = open_account(tmp_path, hands)
    account.clock.enter("productive")
    for step in (1, 2, 3):
        hands.turn(2.0 * step)
        account.step_ended(step)
        if step > 1:
            account.skip(step)
    assert found(account.totals().seconds) == {"productive": 2, "guard": 10}
    account.close()


def test_steps_that_are_rolled_back_are_no_goodput(tmp_path):
    hands = Hands()
    account = open_account(tmp_path, hands)
    account.clock.enter("productive")
    for step in (1, 2, 3):
        hands.turn(2.0)
        account.step_ended(step)
        if step == 1:
            account.saving(step)
    account.roll_back(1)
    assert found(account.totals().seconds) == {"productive": 2, "guard": 4}
    hands.turn(3.0)
    account.roll_back(0)
    assert found(account.totals().seconds) == {"guard": 9}
    assert account.totals().saves == 1
    account.close()


@pytest.mark.parametrize("first", [0, 5])
def test_the_first_step_after_a_start_or_a_way_back_is_no_goodput_where_it_is_skipped(
    tmp_path, first
):
    hands = Hands()
    account = open_account(tmp_path, hands, first)
    account.clock.enter("productive")
    hands.turn(2.0)
    account.step_ended(first + 1)
    account.skip(first + 1)
    assert found(account.totals().seconds) == {"guard": 2}
    hands.turn(3.0)
    account.saving(first + 2)
    hands.turn(4.0)
    account.step_ended(first + 3)
    account.roll_back(first + 2)
    hands.turn(5.0)
    account.step_ended(first + 3)
    account.skip(first + 3)
    assert found(account.totals().seconds) == {"productive": 3, "guard": 2 + 4 + 5}
    account.close()


def test_a_run_that_goes_back_over_many_saves_keeps_what_is_before_them(tmp_path):
    """The oldest of 64 marks were dropped, and with them all work before."""
    hands = Hands()
    account = open_account(tmp_path, hands)
    account.clock.enter("productive")
    for step in range(1, 2001):
        # the first quarter of the steps takes twice as long
        hands.turn(2.0 if step <= 500 else 1.0)
        account.step_ended(step)
        if step % 10 == 0:
            account.saving(step)
    account.close()
    (written,) = read_lives(tmp_path).lives
    assert len(written.marks) <= 64
    back = life(hands.now, {"productive": 1}, 1000, 1001)
    total = add_up([written, back])
    assert total.seconds["productive"] == pytest.approx(1500, rel=0.01)
    assert total.seconds["wasted"] == pytest.approx(1000, rel=0.01)
    # to the second where the mark is there
    assert written.productive_until(1990) == 2490
    assert written.productive_until(1985) == 2485


def test_the_cost_of_a_save_is_that_of_the_run_folder(tmp_path):
    """The mean was over both tiers, so that the best interval was too short."""
    hands = Hands()
    account = open_account(tmp_path, hands)
    for step in range(1, 11):
        with account.clock.during("saving"):
            account.saving(step)
            if step % 5:
                hands.turn(1.0)
                account.saved_locally(1.0)
            else:
                hands.turn(30.0)
    account.close()
    assert measure_run(tmp_path).costs.save == 30
    line = json.loads((tmp_path / GOODPUT).read_text())
    assert (line.pop("local_saves"), line.pop("local_seconds")) == (8, 8.0)
    # as an earlier version has written it
    (tmp_path / GOODPUT).write_text(json.dumps(line))
    assert measure_run(tmp_path).costs.save == 6.8


def test_accounts_go_on_in_the_next_process(tmp_path):
    hands = Hands()
    account = open_account(tmp_path, hands)
    account.clock.enter("productive")
    hands.turn(7)
    account.saving(10)
    hands.turn(2)
    account.step_ended(12)
    account.note(at_once=True)
    (written,), damaged = read_lives(tmp_path)
    assert (written.step, written.marks, damaged) == (12, [Mark(10, 7.0)], 0)
    later = open_account(tmp_path, hands, first=10)
    hands.turn(1)
    total = later.totals()
    assert total.lives == 2
    assert total.seconds["productive"] == 7
    assert total.seconds["wasted"] == 2
    row = total.row()
    shares = [value for key, value in row.items() if key not in ("goodput", "wall_seconds")]
    assert sum(shares) == pytest.approx(row["wall_seconds"])
    account.close()  # a process that has ended writes no more over the one after it
    later.close()
    assert [one.lowest for one in read_lives(tmp_path).lives] == [0, 10]


def test_a_process_that_does_not_own_the_folder_writes_nothing(tmp_path):
    hands = Hands()
    account = Account(began=hands.now, time_now=hands)
    account.open(tmp_path, 0, owns=lambda: False)
    account.close()
    assert not (tmp_path / GOODPUT).exists()


def test_a_folder_that_was_moved_is_not_made_again(tmp_path):
    hands = Hands()
    folder = tmp_path / "run"
    folder.mkdir()
    account = open_account(folder, hands)
    folder.rename(tmp_path / "moved")
    account.note(at_once=True)
    account.close()
    assert not folder.exists()


@given(st.data())
def test_a_flipped_bit_costs_one_account_at_most(tmp_path_factory, data):
    folder = tmp_path_factory.getbasetemp() / "damaged_goodput"
    folder.mkdir(exist_ok=True)
    lives = [
        life(1000.0, {"startup": 5.5, "productive": 50.0}, 0, 25, [(10, 20), (20, 40)], 2),
        life(1060.0, {"startup": 4.25, "productive": 30.0}, 20, 35, [(30, 20)], 1),
    ]
    whole = "".join(one.as_json() for one in lives).encode()
    at = data.draw(st.integers(0, len(whole) - 2))
    bit = data.draw(st.integers(0, 7))
    (folder / GOODPUT).write_bytes(whole[:at] + bytes([whole[at] ^ 1 << bit]) + whole[at + 1 :])
    read = read_lives(folder)
    assert len(read.lives) >= (0 if whole[at] == ord("\n") else 1)
    total = add_up(read.lives)
    assert all(value >= 0 for value in total.seconds.values())
    if read.lives:
        last = max(one.ended for one in read.lives)
        assert total.wall == pytest.approx(last - read.lives[0].began, abs=2.5)


def test_damaged_accounts_are_said_and_the_run_goes_on(tmp_path):
    (tmp_path / GOODPUT).write_text(json.dumps({"began": 1}) + "\n[]\n{\n")
    said = []
    account = Account()
    account.open(tmp_path, 3, say=said.append)
    account.close()
    assert ["damaged lines, 3 in number" in line for line in said] == [True]
    assert [one.lowest for one in read_lives(tmp_path).lives] == [3]


def test_the_causes_of_a_row_are_words_of_the_page():
    """docs/metrics.md lists each key."""
    total = add_up([life(0, dict.fromkeys(CAUSES, 1.0))])
    page = (Path(__file__).parents[3] / "docs" / "metrics.md").read_text(encoding="utf-8")
    assert [key for key in total.row() if f"`{key}`" not in page] == []
