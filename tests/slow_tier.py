"""The order and the deadline of the slow tier, and a part of the quick one that is drawn, for a
machine that cannot run all of it in the time there is.

With `--drawn SHARE` a part of the tests is run that another commit draws anew; the summary says how
to draw the same again. Those with the marker `matrix` are always among them.

With `--deadline MINUTES` the tests of what the last commits changed come first, the others after
them in an order drawn from the commit's hash, so that each has its turn over some commits. No test
is begun after the deadline, and the names of those that were not run are printed. What shares a
fixture of a module stays in one process; all else is dealt out test by test, so that the processes
end together (`--dist loadgroup --no-loadscope-reorder`).
"""

from __future__ import annotations

import ast
import hashlib
import subprocess
import time
from functools import cache
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
COMMITS = 30
PACKAGES = {"models": "models", "meshes": "meshes", "configs": "configs"}
"""The packages of `jaxpar` that lie at the top of the repository, and their folders there."""
NOT_BEGUN = "not begun: the deadline has passed"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--deadline",
        type=float,
        metavar="MINUTES",
        help="begin no test after this many minutes, and name the others",
    )
    parser.addoption(
        "--drawn",
        type=float,
        metavar="SHARE",
        help="run this share of the tests, drawn by the commit, or by --draw",
    )
    parser.addoption("--draw", metavar="WORD", help="what --drawn draws by, in place of the commit")


def pytest_configure(config: pytest.Config) -> None:
    minutes = config.getoption("--deadline")
    if minutes is not None and not hasattr(config, "workerinput"):
        config.stash[_END] = time.time() + 60 * minutes


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Hand the deadline to a process of xdist, whose own start is later."""
    if _END in node.config.stash:
        node.workerinput["deadline"] = node.config.stash[_END]


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Put the items into the order of a tier with a deadline, and say which of them stay
    together.
    """
    if config.getoption("--drawn") is not None:
        _draw(config, items)
    if config.getoption("--deadline") is None:
        return
    commit = _git("rev-parse", "HEAD").strip()
    changed = changed_files()
    shared = {item.path for item in items if _shares_a_fixture(item)}

    def place(item: pytest.Item) -> tuple[bool, bool, str]:
        if item.path in shared:
            group = str(item.path)
        else:
            group = item.nodeid
        drawn = hashlib.sha256(f"{commit} {group}".encode()).hexdigest()
        return not _is_of_matrix(item), not covers(item, changed), drawn

    items.sort(key=place)
    for item in items:
        if item.path in shared:
            item.add_marker(pytest.mark.xdist_group(item.path.stem))


def _draw(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave in the list what is drawn. All processes of xdist draw the same."""
    share = config.getoption("--drawn")
    word = config.getoption("--draw") or _git("rev-parse", "--short", "HEAD").strip()

    def is_drawn(item: pytest.Item) -> bool:
        number = hashlib.sha256(f"{word} {item.nodeid}".encode()).digest()[:4]
        return _is_of_matrix(item) or int.from_bytes(number) < share * 2**32

    left = [item for item in items if not is_drawn(item)]
    config.hook.pytest_deselected(items=left)
    items[:] = [item for item in items if is_drawn(item)]


def _is_of_matrix(item: pytest.Item) -> bool:
    return item.get_closest_marker("matrix") is not None


def pytest_report_header(config: pytest.Config) -> str:
    """Say how to draw the same tests again."""
    share = config.getoption("--drawn")
    if share is None:
        return ""
    word = config.getoption("--draw") or _git("rev-parse", "--short", "HEAD").strip()
    return f"drawn: {share:g} of the tests; the same again with --drawn {share:g} --draw {word}"


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    given = getattr(item.config, "workerinput", {})
    end = given.get("deadline") or item.config.stash.get(_END, None)
    if end is not None and time.time() > end:
        pytest.skip(NOT_BEGUN)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    skipped = terminalreporter.getreports("skipped")
    names = [
        report.nodeid.partition("@")[0] for report in skipped if NOT_BEGUN in str(report.longrepr)
    ]
    if names:
        terminalreporter.section(f"{len(names)} tests were not begun before the deadline")
        for name in sorted(names):
            terminalreporter.line(name)


_END = pytest.StashKey[float]()
"""The time after which no test is begun."""


def changed_files() -> frozenset[Path]:
    """Find the files that the last commits changed; none where there is no git."""
    names = _git("log", f"-{COMMITS}", "--name-only", "--format=").split("\n")
    return frozenset(ROOT / name for name in names if name)


def covers(item: pytest.Item, changed: frozenset[Path]) -> bool:
    """Whether a test is of a changed file: it stands in one, imports one, or has one as its
    parameter.
    """
    callspec = getattr(item, "callspec", None)
    if callspec:
        paths = [value for value in callspec.params.values() if isinstance(value, Path)]
    else:
        paths = []
    if paths:
        return not changed.isdisjoint(paths)
    return not changed.isdisjoint({item.path} | _imported(item.path))


@cache
def _imported(test: Path) -> frozenset[Path]:
    """Find the files of the library that a test imports itself."""
    found = set[Path]()
    for node in ast.walk(ast.parse(test.read_text("utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module:
            modules = [node.module, *(f"{node.module}.{name.name}" for name in node.names)]
        elif isinstance(node, ast.Import):
            modules = [name.name for name in node.names]
        else:
            continue
        for module in modules:
            found |= _files_of(module)
    return frozenset(found)


def _files_of(module: str) -> frozenset[Path]:
    """Give the files of a module: all in a package's folder and in those inside it, since what it
    re-exports comes from any of them. A name inside a module has none."""
    top, *inner = module.split(".")
    if top != "jaxpar" or not inner:
        return frozenset()
    wing, *rest = inner
    if wing in PACKAGES:
        folder = ROOT / PACKAGES[wing]
    else:
        folder = ROOT / "jaxpar" / wing
    path = folder.joinpath(*rest)
    if path.is_dir():
        return frozenset(path.rglob("*.py"))
    file = path.with_suffix(".py")
    return frozenset({file} if file.exists() else ())


def _shares_a_fixture(item: pytest.Item) -> bool:
    """Whether a fixture of the item's own file is made once for it. One of a conftest.py is cheap,
    and made for many files.
    """
    info = getattr(item, "_fixtureinfo", None)
    definitions = info.name2fixturedefs.values() if info else ()
    return any(
        fixture[-1].scope == "module" and ".py" in fixture[-1].baseid for fixture in definitions
    )


def _git(*words: str) -> str:
    done = subprocess.run(
        ["git", *words],
        cwd=ROOT,
        check=False,
        capture_output=True,
        text=True,
    )
    return done.stdout if done.returncode == 0 else ""
