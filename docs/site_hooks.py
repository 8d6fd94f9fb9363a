"""What mkdocs does besides: pages of the changelog and of colab/, links to the repository, the API
as one tree.
"""

import json
import re
import shutil
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.plugins import event_priority
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

DOCS = Path(__file__).parent.resolve()
ROOT = DOCS.parent
REPOSITORY = "https://github.com/jaxpar/jaxpar/blob/main/"
COLAB = "https://colab.research.google.com/github/jaxpar/jaxpar/blob/main/"
INSIDE = ("models", "meshes", "configs")  # they install as jaxpar.models and so on: pyproject.toml


@event_priority(100)  # before mkdocstrings, which drops a path that is not there yet
def on_config(config: MkDocsConfig) -> None:
    """Lay the package out as it installs: mkdocstrings reads the docstrings there, and imports
    nothing.
    """
    tree = ROOT / "build" / "api"
    shutil.rmtree(tree, ignore_errors=True)
    shutil.copytree(ROOT / "jaxpar", tree / "jaxpar", ignore=shutil.ignore_patterns("__pycache__"))
    for name in INSIDE:
        shutil.copytree(
            ROOT / name, tree / "jaxpar" / name, ignore=shutil.ignore_patterns("__pycache__")
        )


def on_files(files: Files, config: MkDocsConfig) -> None:
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8").replace("](docs/", "](")
    files.append(File.generated(config, "changelog.md", content=text))
    files.append(File.generated(config, "notebooks.md", content=notebooks()))


def notebooks() -> str:
    """The list of colab/: of each notebook its title, its first sentences, and where it runs."""
    found = [
        "# Notebooks",
        "Each runs as it stands on a free Colab runtime or a laptop. "
        "With fewer than eight chips the CPU plays eight devices.",
    ]
    for path in sorted((ROOT / "colab").glob("*.ipynb")):
        first = "".join(json.loads(path.read_text(encoding="utf-8"))["cells"][0]["source"])
        title, *texts = [part for part in first.split("\n\n") if not part.startswith("[![")]
        where = f"colab/{path.name}"
        links = f"[Open in Colab]({COLAB}{where}) · [on GitHub]({REPOSITORY}{where})"
        found += [f"## {title.lstrip('# ')}", *texts[:1], links]
    return re.sub(r"\]\((\w+\.ipynb)\)", rf"]({REPOSITORY}colab/\1)", "\n\n".join(found))


def on_page_markdown(markdown: str, page: Page, **_: object) -> str:
    """A link to what is no part of docs/, or to a folder, leads to the repository."""

    def in_repository(link: re.Match[str]) -> str:
        target = (DOCS / page.file.src_uri).parent.joinpath(link[1]).resolve()
        if target.is_file() and target.is_relative_to(DOCS):
            return link[0]
        if not target.exists():
            raise PluginError(f"{page.file.src_uri}: the repository has no {link[1]}")
        return f"]({REPOSITORY}{target.relative_to(ROOT).as_posix()})"

    return re.sub(r"\]\((\.\.?/[^)\s#]+)\)", in_repository, markdown)
