"""Which steps are traced, and which settings of it are refused."""

from contextlib import closing

import jax
import pytest

from jaxpar.base.config import Config, override
from jaxpar.base.config.checks import check
from jaxpar.base.errors import UserError
from jaxpar.train.metrics import Profile


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"metrics.profile": "25:20"},
            "metrics.profile=25:20.*metrics.profile=20:25",
        ),
        ({"metrics.profile": "20"}, "two steps in order"),
        ({"metrics.profile": "0:5"}, "two steps in order"),
        ({"metrics.profile": "a:b"}, "two steps in order"),
        (
            {"metrics.profile": "95:101"},
            "metrics.profile=95:101 .*100",
        ),
        (
            {"metrics.profile": "20:25", "train.stop_at": 24},
            "the last step, .*24",
        ),
        (
            {"metrics.profile": "20:25", "train.eval_every": 8, "data.val_fraction": 0.1},
            "the evaluation after step 24 would be among them",
        ),
    ],
)
def test_steps_that_cannot_be_traced_are_refused_before_anything_runs(changes, message):
    with pytest.raises(UserError, match=message):
        check(override(Config(), {"train.steps": 100, "train.warmup_steps": 5} | changes))


def test_an_evaluation_after_the_last_of_them_is_not_among_them():
    changes = {
        "metrics.profile": "17:24",
        "train.eval_every": 8,
        "data.val_fraction": 0.1,
        "train.steps": 100,
    }
    assert check(override(Config(), {"train.warmup_steps": 5} | changes)).metrics.profiled == range(
        17, 25
    )


def test_of_a_resumed_run_the_steps_that_are_left_are_traced_and_none_twice(tmp_path):
    steps = Config().metrics.profiled
    assert (Profile(steps, tmp_path, 0).first, Profile(steps, tmp_path, 9).last) == (0, 0)
    steps = range(20, 26)
    fresh = Profile(steps, tmp_path, 0)
    inside = Profile(steps, tmp_path, 22)
    assert (fresh.first, fresh.last, inside.first, inside.last) == (20, 25, 23, 25)
    with pytest.raises(UserError, match=r"metrics.profile: .*25, try 27:31"):
        Profile(steps, tmp_path, 25)
    fresh.file.parent.mkdir()
    fresh.file.write_text("{}")
    for done in (0, 22, 500):
        again = Profile(steps, tmp_path, done)
        assert (again.first, again.last) == (0, 0), "the same command resumes a run that was traced"


def test_a_trace_that_an_error_breaks_off_is_ended(tmp_path, monkeypatch):
    called = []
    monkeypatch.setattr(
        jax.profiler, "start_trace", lambda folder, profiler_options: called.append("start")
    )
    monkeypatch.setattr(jax.profiler, "stop_trace", lambda: called.append("stop"))
    with pytest.raises(ZeroDivisionError), closing(Profile(range(1, 3), tmp_path, 0)) as profile:
        profile.start()
        _ = 1 / 0
    with closing(Profile(range(1, 3), tmp_path, 0)) as profile:
        profile.start()
        profile.close()
    assert called == ["start", "stop"] * 2
