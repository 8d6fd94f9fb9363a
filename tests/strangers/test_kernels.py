"""A stranger's attention kernel goes in where ours do: in a config, in messages, in `verify`, in
what `auto` tries.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import jaxpar
from jaxpar import parallel, verify
from jaxpar.base.config import Config, override
from jaxpar.base.errors import UserError
from jaxpar.base.registry import KERNELS
from jaxpar.kernels import register_kernel
from jaxpar.kernels.attention import dispatch
from jaxpar.kernels.attention.call import Call
from jaxpar.kernels.attention.kernel import AttentionRequest
from jaxpar.kernels.masks import Causal

NAME = "of-a-test"
SIZES: dict[str, Any] = {
    "model.family": "llama",
    "model.layers": 2,
    "model.embed": 16,
    "model.heads": 4,
    "model.kv_heads": 2,
    "model.mlp": 24,
    "model.vocab_size": 50,
    "model.max_seq_len": 16,
    "data.seq_len": 16,
    "train.batch": 8,
    "mesh.platform": "cpu",
}


@pytest.fixture(scope="module", autouse=True)
def own_kernel() -> Iterator[ModuleType]:
    """The stranger's program, whose kernels are there as long as it is."""
    module = importlib.import_module("strangers.own_kernel")
    yield importlib.reload(module)  # in a test run it may have been imported before
    for name in ("whole_rows", "both_ways"):
        KERNELS.remove(name)


@pytest.fixture(autouse=True)
def _take_out() -> Iterator[None]:
    yield
    if NAME in KERNELS:
        KERNELS.remove(NAME)


def found_by_verify(kernel: str, **changes: Any) -> Any:
    given = {key.replace("__", "."): value for key, value in changes.items()}
    config = override(Config(), SIZES | given | {"kernels.attention": kernel})
    return verify.config(jaxpar.make_experiment(config))


@pytest.mark.parametrize(
    ("kernel", "mesh"),
    [
        pytest.param(
            "whole_rows",
            {"mesh__fsdp": 2, "mesh__tensor": 2, "data__pack": True},
            marks=pytest.mark.slow,
        ),
        ("both_ways", {"mesh__fsdp": 2, "mesh__context": 2}),
    ],
)
def test_a_config_names_it_and_verify_holds_it_against_the_reference(
    kernel: str, mesh: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    dispatch.say_once.cache_clear()
    found = found_by_verify(kernel, **mesh)
    assert found.equal, found
    assert any(f"attention by {kernel}" in line for line in caplog.messages)


def test_verify_finds_one_that_is_wrong(own_kernel: ModuleType) -> None:
    register_kernel(NAME)(
        lambda q, k, v, mask, call: own_kernel.whole_rows(q, k, 1.1 * v, mask, call)
    )
    found = found_by_verify(NAME, mesh__fsdp=2)
    assert not found.equal


def test_messages_list_it_and_say_what_it_cannot_serve() -> None:
    q = jnp.ones((1, 4, 2, 8))
    with pytest.raises(UserError, match=r"kernels.attention is one of cudnn, .*both_ways.*, auto"):
        found_by_verify("both_wasy")
    with pytest.raises(UserError, match=r"whole_rows .*: a soft cap"):
        parallel.attention(q, q, q, softcap=2.0, implementation="whole_rows")
    with pytest.raises(UserError, match=r"what serves: chunked, both_ways$"):
        layout = jaxpar.Layout(jaxpar.make_mesh(data=4, context=2))
        parallel.attention(
            *[jnp.ones((4, 8, 2, 8))] * 3, Causal(), layout, implementation="whole_rows"
        )


def test_auto_tries_it_on_its_platforms(
    own_kernel: ModuleType, caplog: pytest.LogCaptureFixture
) -> None:
    register_kernel(NAME, refusal=own_kernel.no_softcap, platforms=("cpu",))(own_kernel.whole_rows)
    caplog.set_level(logging.INFO)
    dispatch.say_once.cache_clear()
    q = jax.random.normal(jax.random.key(0), (1, 4, 2, 8))
    found = jax.jit(lambda q: parallel.attention(q, q, q))(q)
    want = jax.jit(lambda q: parallel.attention(q, q, q, implementation="reference"))(q)
    jax.jit(lambda q: parallel.attention(q, q, q, softcap=2.0))(q)
    assert jnp.max(jnp.abs(found - want)) < 1e-6
    assert f"attention by {NAME}" in caplog.messages
    assert f"attention by chunked ({NAME}: a soft cap)" in caplog.messages
    asked = AttentionRequest(q, q, Causal(), Call(), with_lse=False)
    assert dispatch.refusal(NAME, asked, "tpu") == "on tpu"


@pytest.mark.parametrize("found", [None, jnp.ones((2, 2))])
def test_what_is_no_output_is_refused(found: Any) -> None:
    register_kernel(NAME)(lambda q, k, v, mask, call: found)
    q = jnp.ones((1, 4, 2, 8))
    with pytest.raises(
        UserError, match=rf"'{NAME}' returned .* for queries of shape \(1, 4, 2, 8\)"
    ):
        parallel.attention(q, q, q, implementation=NAME)


def test_what_does_not_fit_is_refused_where_it_is_registered(own_kernel: ModuleType) -> None:
    with pytest.raises(UserError, match=r"platforms .*found 'gpu'"):
        register_kernel(NAME, platforms="gpu")  # pyright: ignore[reportArgumentType]
    with pytest.raises(
        UserError, match=f"the backward of kernels.attention '{NAME}' is called with"
    ):
        register_kernel(NAME, backward=lambda q: q)
    with pytest.raises(UserError, match="and its function takes"):
        register_kernel(NAME)(lambda q: q)
    with pytest.raises(UserError, match="is registered already"):
        register_kernel("chunked")(own_kernel.whole_rows)
