"""Attention that stands in for cuDNN's, because that is not on this machine, is found in the
program it becomes.
"""

from __future__ import annotations

import jax
import pytest

from jaxpar.base.prices import AttentionShare, Prices
from jaxpar.kernels.attention import dispatch, libraries
from jaxpar.kernels.masks import Causal, Mask, Window
from jaxpar.rehearse.program_report import stand_ins
from jaxpar.rehearse.report.lint import LintedStep, find


def names_of(mask: Mask, dtype: str) -> str:
    """The named scopes of attention, traced for a GPU."""
    q = jax.ShapeDtypeStruct((1, 256, 2, 64), dtype)

    def attend(q: jax.Array) -> jax.Array:
        return dispatch.attention(q, q, q, mask, platform="gpu", with_lse=False)[0]

    return " ".join(str(eqn.source_info.name_stack) for eqn in jax.make_jaxpr(attend)(q).jaxpr.eqns)


@pytest.mark.parametrize("installed", [False, True], ids=["without cuDNN", "with cuDNN"])
def test_a_kernel_that_is_there_for_want_of_cudnn_says_so(
    monkeypatch: pytest.MonkeyPatch, installed: bool
) -> None:
    monkeypatch.setattr(libraries, "has_cudnn", lambda: installed)
    # jax's own needs the library to be traced
    monkeypatch.setattr(libraries, "cudnn", lambda q, *_: q)
    found = libraries.stand_ins_in(names_of(Causal(), "bfloat16"))
    assert found == ([] if installed else ["pallas_gpu"])


def test_what_cudnn_cannot_serve_is_no_stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """The target runs the same kernel there."""
    monkeypatch.setattr(libraries, "has_cudnn", lambda: False)
    assert not libraries.stand_ins_in(names_of(Causal(), "float32"))
    assert libraries.stand_ins_in(names_of(Causal() & Window(16), "bfloat16")), "cuDNN has windows"


def test_the_report_names_what_was_priced_what_runs_and_how_to_get_it() -> None:
    text = 'op_name="jit(f)/jvp(core)/for_cudnn=pallas_gpu/pallas_call" for_cudnn=pallas_gpu/x'
    (row,) = stand_ins(text, Prices())
    assert row.get("time") == "pallas_gpu"
    (priced,) = stand_ins(text, Prices(attention=(AttentionShare("cudnn", 64, 1024),)))
    assert priced.get("time") == "cuDNN"
    (finding,) = find("other-kernel", LintedStep(kernels=[priced]))
    assert "the time of cuDNN's" in finding["message"]
    assert (row["op"], row["priced"], row["runs"]) == ("attention", "pallas_gpu", "cuDNN")
    assert row["install"].startswith("pip install nvidia-cudnn-cu1")
    (finding,) = find("other-kernel", LintedStep(kernels=[row]))
    assert finding["rule"] == "other-kernel" and row["install"] in finding["message"]
    assert not stand_ins("HloModule m", Prices())
