"""docs/ as a site: it builds without a warning, no link of it is dead, and it needs no other
host.
"""

import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

ROOT = Path(__file__).parent.parent
OURS = re.compile(
    r"https://(?:github|colab\.research\.google)\.com/(?:github/)?jaxpar/jaxpar/(?:blob|edit|tree)/main/(.*)"
)


class Page(HTMLParser):
    """The ids of a page, and what it links to and loads."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.ids: set[str] = set()
        self.links: list[str] = []
        self.loads: list[str] = []
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(
        self,
        tag: str,
        attrs: list[tuple[str, str | None]],
    ) -> None:
        found = {key: value or "" for key, value in attrs}
        self.ids |= {found[key] for key in ("id", "name") if key in found}
        if tag == "a" and "href" in found:
            self.links.append(found["href"])
        elif tag == "link":
            self.loads.append(found["href"])
        elif "src" in found:
            self.loads.append(found["src"])


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("material", reason="the extra `docs` is not installed")
    pytest.importorskip("mkdocstrings_handlers.python", reason="the extra `docs` is not installed")
    folder = tmp_path_factory.mktemp("site").resolve()
    # --quiet hides warnings
    build = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(
        build, cwd=ROOT, env=environment, check=False, capture_output=True, text=True
    )
    said = [
        line for line in (done.stdout + done.stderr).splitlines() if not line.startswith("INFO")
    ]
    assert (done.returncode, said) == (0, [])
    return folder


def dead(link: str, page: Path, pages: dict[Path, Page]) -> str:
    """Why a link of a page leads nowhere, or nothing."""
    parts = urlsplit(link)
    if ours := OURS.fullmatch(link):
        if (ROOT / ours[1].partition("#")[0]).exists():
            return ""
        return "is not in the repository"
    if parts.scheme or parts.netloc:
        if parts.scheme == "https" and re.fullmatch(r"[\w.-]+\.\w+", parts.netloc):
            return ""
        return "is no https address"
    if parts.path:
        file = (page.parent / unquote(parts.path)).resolve()
    else:
        file = page
    if not file.is_file():
        return "is no file"
    if not parts.fragment or unquote(parts.fragment) in pages[file].ids:
        return ""
    return "has no such anchor"


@pytest.mark.slow
def test_no_link_is_dead(site: Path) -> None:
    pages = {path: Page(path) for path in site.rglob("*.html") if path.name != "404.html"}
    links = [(page, link) for page, found in pages.items() for link in (*found.links, *found.loads)]
    wrong = [
        f"{page.name}: {link} {why}" for page, link in links if (why := dead(link, page, pages))
    ]
    assert not wrong
    readme = re.findall(r"\]\(([^)\s]+)\)", (ROOT / "README.md").read_text(encoding="utf-8"))
    for link in readme:
        parts = urlsplit(link)
        assert parts.scheme or (ROOT / parts.path).exists(), link
        if parts.fragment and not parts.scheme:
            assert parts.fragment in pages[site / f"{Path(parts.path).stem}.html"].ids, link
    assert len(links) > 1000


@pytest.mark.slow
def test_nothing_is_loaded_from_another_host(site: Path) -> None:
    for path in site.rglob("*.html"):
        loads = [load for load in Page(path).loads if urlsplit(load).netloc]
        assert not loads, path.name
