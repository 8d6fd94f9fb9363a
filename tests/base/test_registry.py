"""What is registered wrongly is refused in a sentence where it is registered, or where it is first
used, and never read as something else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxpar
from jaxpar import parallel
from jaxpar.base import registry
from jaxpar.base.config import ModelConfig
from jaxpar.base.errors import UserError
from jaxpar.data.corpus import load_corpus
from jaxpar.data.sources import register_source
from jaxpar.kernels import register_kernel
from jaxpar.kernels.masks import Causal, Dilated
from jaxpar.models.masks import WORDS, MaskWord, layer_masks, register_mask
from jaxpar.parallel.linear.ring_matmul import Lane, register_form
from jaxpar.parallel.pipeline import register_schedule
from jaxpar.rehearse.report.lint import LINTS, Finding, LintedStep, find_all, register_lint
from jaxpar.train.optimizer.learning_rate import register_rate
from jaxpar.train.optimizer.named_optimizers import register_optimizer
from jaxpar.train.sinks import Sink, register_sink

NAME = "of-a-test"
TABLES = (
    registry.FORMS,
    registry.KERNELS,
    registry.OPTIMIZERS,
    registry.RATES,
    registry.SCHEDULES,
    registry.SINKS,
    registry.SOURCES,
    LINTS,
    WORDS,
)


@pytest.fixture(autouse=True)
def _take_out() -> Iterator[None]:
    """Take what a test registered out again."""
    yield
    for table in TABLES:
        if NAME in table:
            table.remove(NAME)


DECORATORS: list[Any] = [
    register_form,
    register_optimizer,
    register_rate,
    register_kernel,
    register_schedule,
    register_sink,
    register_source,
    register_mask,
    lambda name: register_lint(name, "warning"),
]


# the suite checks the types of the wing of `register_form` at run time, before its own message
@pytest.mark.parametrize("register", DECORATORS[1:])
def test_a_decorator_without_its_name_is_refused(register: Callable[..., Any]) -> None:
    """It returned a function, and registered nothing."""
    with pytest.raises(UserError, match=r"is registered by a word, and was given <.*\"mine\""):
        register(lambda: None)


@pytest.mark.parametrize("register", [one for one in DECORATORS if one is not register_mask])
@pytest.mark.parametrize("function", [lambda: None, "ring"])
def test_what_cannot_be_called_as_it_will_be_is_refused(
    register: Callable[..., Any], function: Any
) -> None:
    with pytest.raises(UserError, match=r"is called with .*(takes|give a function)"):
        register(NAME)(function)


def _word(made: Any) -> type[MaskWord]:
    class Odd(MaskWord):
        apart: int = 2
        mask = made

    return dataclass(frozen=True)(Odd)


def test_the_mask_of_a_word_takes_a_length() -> None:
    with pytest.raises(UserError, match=r"mask of model.masks 'of-a-test' is called with"):
        register_mask(NAME)(_word(lambda self: Causal()))


def test_a_word_makes_a_mask() -> None:
    register_mask(NAME)(_word(lambda self, length: jnp.ones((length, length))))
    with pytest.raises(UserError, match=r"makes Array\(.* which is no mask") as caught:
        layer_masks(ModelConfig(masks=(NAME,)))
    assert "\n" not in str(caught.value)


def test_the_name_of_a_word_may_have_a_hyphen() -> None:
    """Every registry takes one, and a config could not name it with its numbers."""
    register_mask(NAME)(_word(lambda self, length: Causal() & Dilated(length, self.apart)))
    config = ModelConfig(masks=(f"{NAME}(3)",))
    mask = Causal() & Dilated(config.max_seq_len, 3)
    assert layer_masks(config) == (mask,)


@pytest.mark.parametrize(
    "lanes",
    [
        [],
        None,
        [Lane(0, 1, 1)],
        [Lane(0, 2, 1), Lane(3, 1, 1)],
        [Lane(0, 4, 2)],
        [Lane(0, 5, 1)],
        [(0, 4, 1)],
    ],
)
def test_a_form_covers_a_chunk(lanes: Any) -> None:
    """What covered a part of it gave wrong numbers."""
    register_form(NAME)(lambda rows: lanes)
    layout = jaxpar.Layout(jaxpar.make_mesh(tensor=2, devices=jax.devices()[:2]))
    x = jnp.ones((2, 8, 4))
    weight = jnp.ones((4, 6))
    with pytest.raises(UserError, match=f"the form '{NAME}' .* a chunk of 4 rows .* cover it"):
        jax.eval_shape(
            lambda x, w: parallel.column_linear(x, w, ("mlp",), layout, overlap=NAME), x, weight
        )


@pytest.mark.parametrize("found", [None, Finding("bad"), ["bad"]])
def test_a_rule_of_the_linter_yields_findings(found: Any) -> None:
    register_lint(NAME, "warning")(lambda step: found)
    with pytest.raises(UserError, match=rf"rule '{NAME}' of the linter (returned|yields)"):
        find_all(LintedStep())


def test_a_rule_is_an_error_or_a_warning() -> None:
    with pytest.raises(UserError, match="has the severity 'info'"):
        register_lint(NAME, "info")  # pyright: ignore[reportArgumentType]


def test_a_source_reads_settings_that_there_are() -> None:
    """A misspelt one refused the setting that the source reads, as having no effect."""
    with pytest.raises(UserError, match=r"reads 'paths', .* \(did you mean 'path'\?\)"):
        register_source(NAME, reads={"paths"})


@pytest.mark.parametrize("found", [None, [np.arange(5)], ([np.arange(5)], None), ([], None)])
def test_a_source_returns_parts_and_a_tokenizer(found: Any) -> None:
    register_source(NAME)(lambda paths, data, vocab_size: found)
    data = replace(jaxpar.load_config("tiny").data, source=NAME, path="text")
    with pytest.raises(UserError, match=f"data.source={NAME} returns a pair, a list with .*Part"):
        load_corpus(data, 256)


@pytest.mark.parametrize("found", [None, (print, print), (1, 2, None), (print, print, 7)])
def test_a_sink_returns_two_functions_and_an_id(found: Any, tmp_path: Path) -> None:
    register_sink(NAME)(lambda config, folder, first_step, run_id: found)
    with pytest.raises(UserError, match=rf"metrics.sinks={NAME} returns \(write, end, run_id\)"):
        Sink(NAME, jaxpar.load_config("tiny"), tmp_path, 0, print)
