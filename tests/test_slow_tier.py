"""The slow tier's deadline and order (`slow_tier.py`)."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import slow_tier

# What pytester imports first is forgotten after a test, and JAX refuses to register it again.
import jaxpar.kernels.attention
import jaxpar.models
import jaxpar.parallel
import jaxpar.verify  # noqa: F401

pytest_plugins = ("pytester",)


def test_after_the_deadline_no_test_is_begun_and_each_is_named(pytester: pytest.Pytester) -> None:
    pytester.makepyfile("def test_a(): pass\ndef test_b(): pass")
    result = pytester.runpytest_inprocess("-p", "slow_tier", "--deadline", "0")
    result.assert_outcomes(skipped=2)
    result.stdout.fnmatch_lines(
        ["*2 tests were not begun before the deadline*", "*::test_a", "*::test_b"]
    )


def test_before_the_deadline_all_are_run(pytester: pytest.Pytester) -> None:
    pytester.makepyfile("def test_a(): pass")
    result = pytester.runpytest_inprocess("-p", "slow_tier", "--deadline", "5")
    result.assert_outcomes(passed=1)
    result.stdout.no_fnmatch_line("*before the deadline*")


IMPORTS = {
    "jaxpar/base/errors.py": "import jaxpar.base.errors",
    "models/masks.py": "from jaxpar.models import masks",
    "models/model.py": "from jaxpar.models import Model",
    "jaxpar/verify/_gradients.py": "from jaxpar import verify",
    "jaxpar/parallel/linear/column.py": "from jaxpar.parallel import Ops",
    "jaxpar/kernels/attention/tpu.py": "import jaxpar.kernels.attention",
}


@pytest.mark.parametrize("changed", [*IMPORTS, "tests/base/test_x.py"])
def test_what_changed_comes_first(
    changed: str, pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a wing or a package re-exports comes from any file of its folder."""
    test = IMPORTS.get(changed, "") + "\ndef test_of_it(): pass"
    others = {f"test_{letter}": "def test_other(): pass" for letter in "abcdefgh"}
    path = pytester.makepyfile(test_x=test, **others)
    monkeypatch.setattr(
        slow_tier,
        "changed_files",
        lambda: frozenset([path if "test_x" in changed else file(changed)]),
    )
    result = pytester.runpytest_inprocess(
        "-p", "slow_tier", "--deadline", "5", "--collect-only", "-q"
    )
    assert result.outlines[0] == "test_x.py::test_of_it"
    assert sorted(result.outlines[1:9]) != result.outlines[1:9], (
        "the others are in an order that is drawn"
    )


def file(name: str) -> Path:
    return slow_tier.ROOT / name


def test_tests_of_one_page_cover_that_page(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytester.makepyfile("""
        import pathlib, pytest
        @pytest.mark.parametrize("page", [pathlib.Path("/a.md"), pathlib.Path("/b.md")], ids=str)
        def test_page(page): pass
    """)
    for page in ("/a.md", "/b.md"):
        monkeypatch.setattr(slow_tier, "changed_files", lambda page=page: frozenset([Path(page)]))
        result = pytester.runpytest_inprocess(
            "-p", "slow_tier", "--deadline", "5", "--collect-only", "-q"
        )
        assert page in result.outlines[0]


@pytest.mark.slow
def test_what_shares_a_fixture_of_its_file_stays_in_one_process(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent), prepend=os.pathsep)
    pytester.makeconftest("""
        import pytest
        @pytest.fixture(scope="module", autouse=True)
        def everywhere(): pass
    """)
    pytester.makepyfile(
        test_shared="""
            import pytest
            @pytest.fixture(scope="module")
            def made(): pass
            def test_a(made): pass
            def test_b(made): pass
        """,
        test_other="def test_c(): pass",
    )
    words = ["-n", "2", "--dist", "loadgroup", "--no-loadscope-reorder", "--deadline", "5", "-v"]
    result = pytester.runpytest_subprocess("-p", "slow_tier", *words)
    passed = {line.split()[-1]: line[:5] for line in result.outlines if "PASSED" in line}
    assert sorted(passed) == [
        "test_other.py::test_c",
        "test_shared.py::test_a@test_shared",
        "test_shared.py::test_b@test_shared",
    ]
    assert (
        passed["test_shared.py::test_a@test_shared"] == passed["test_shared.py::test_b@test_shared"]
    )


def test_a_drawn_part_is_the_same_for_a_word_and_another_for_the_next(
    pytester: pytest.Pytester,
) -> None:
    many = "".join(f"def test_{number}(): pass\n" for number in range(60))
    pytester.makepyfile(f"import pytest\n{many}@pytest.mark.matrix\ndef test_always(): pass")
    pytester.makeini("[pytest]\nmarkers =\n  matrix: a chip")

    def drawn(word: str) -> set[str]:
        result = pytester.runpytest_inprocess(
            "-p", "slow_tier", "-v", "--drawn", "0.5", "--draw", word
        )
        result.stdout.fnmatch_lines([f"drawn: 0.5 of the tests*--draw {word}"])
        return {line.split()[0] for line in result.outlines if line.endswith("%]")}

    first = drawn("a")
    assert first == drawn("a") != drawn("b")
    assert 15 < len(first) < 45
    assert any(name.endswith("test_always") for name in first & drawn("b"))
