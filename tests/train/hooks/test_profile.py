"""Which steps are traced, and which settings of it are refused."""

from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import jax
import pytest

from jaxpar.base.config import Config, override
from jaxpar.base.config.checks import check
from jaxpar.base.errors import UserError
from jaxpar.train.hooks import HookedRun
from jaxpar.train.hooks.profile import Profile, steps_to_trace


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
    def opened(after: int, asked: str = "20:25") -> Any:
        config = override(Config(), {"metrics.profile": asked, "train.eval_every": 0})
        experiment = SimpleNamespace(config=config)
        corpus = SimpleNamespace(val=None)
        return SimpleNamespace(
            experiment=experiment, corpus=corpus, folder=tmp_path, after=after, last=1000
        )

    assert not steps_to_trace(opened(9, ""))
    assert steps_to_trace(opened(0)) == range(20, 26)
    assert steps_to_trace(opened(22)) == range(23, 26)
    with pytest.raises(UserError, match=r"metrics.profile: .*25, try 27:31"):
        steps_to_trace(opened(25))
    (tmp_path / "profile").mkdir()
    (tmp_path / "profile" / "steps_20_25.json").write_text("{}")
    for done in (0, 22, 500):
        left = steps_to_trace(opened(done))
        assert not left, "the same command resumes a run that was traced"


@pytest.fixture
def traces(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was asked of JAX's profiler."""
    asked: list[str] = []
    monkeypatch.setattr(jax.profiler, "start_trace", lambda *_, **__: asked.append("start"))
    monkeypatch.setattr(jax.profiler, "stop_trace", lambda: asked.append("stop"))
    return asked


def begun(profile: Profile, folder: Any, after: int) -> None:
    """The profile at the begin of a run, or where it goes back."""
    run = HookedRun(MagicMock(), folder, after, print, print, lambda _: nullcontext())
    profile.on_begin(run, MagicMock())


def test_a_trace_that_an_error_breaks_off_is_ended(tmp_path, traces):
    steps = range(1, 4)
    with (
        ThreadPoolExecutor(1) as beside,
        pytest.raises(ZeroDivisionError),
        Profile(steps, steps, MagicMock(), beside) as profile,
    ):
        begun(profile, tmp_path, 0)
        profile.before_step(1)
        profile.on_started(1)
        _ = 1 / 0
    assert traces == ["start", "stop"]


def test_a_trace_ends_where_the_run_goes_back_and_what_is_run_again_has_none(tmp_path, traces):
    steps = range(1, 3)
    submitted: list[Any] = []
    beside: Any = SimpleNamespace(submit=lambda *args: submitted.append(args))
    with Profile(steps, steps, MagicMock(), beside) as profile:
        begun(profile, tmp_path, 0)
        profile.before_step(1)
        begun(profile, tmp_path, 0)
        assert traces == ["start", "stop"]
        for step in steps:
            profile.before_step(step)
            profile.on_started(step)
    assert traces == ["start", "stop"] and not submitted
