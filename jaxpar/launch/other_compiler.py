"""Rehearsals with a compiler of another version, in an environment that is made for it.

    rehearse_with({"libtpu": "0.0.41"}, config, "tiny", target, print)

The environment is a venv under the cache folder, named by the versions, in which pip installs these
packages alone: whatever else a rehearsal needs, this library's source among it, is that of the
Python that runs now. A `jaxpar rehearse` in a process of its own does the rest.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from filelock import FileLock

from jaxpar.base.config import Config
from jaxpar.base.errors import Say, UserError, short
from jaxpar.base.machine import cache_folder, versions
from jaxpar.base.toml import to_toml
from jaxpar.rehearse.report.comparison import read_report
from jaxpar.rehearse.report.memory import DoesNotFit
from jaxpar.rehearse.report.schema import Rehearsal
from jaxpar.rehearse.targets import Target

Packages = Mapping[str, str]
"""Versions by package."""
PACKAGES = ("jax", "libtpu")
"""The packages whose versions may be asked for."""
_WORD = re.compile(r"([A-Za-z][\w.\-]*)\s*==\s*([\w.!+]+)")
_READY = "installed.json"
"""The file that stands in an environment once it is whole."""
_TOLD = ("Collecting ", "Downloading ", "Installing ", "Successfully ")
"""The beginnings of the lines of pip that are shown."""
_NO_NETWORK = re.compile(
    r"NewConnectionError|NameResolutionError|ProxyError|ConnectTimeout|Connection refused"
    r"|Network is unreachable|name resolution|Max retries"
)


def read_packages(flag: str, text: str) -> dict[str, str]:
    """Read the versions of a compiler, `libtpu==0.0.41` or `jax==0.10.1,libtpu==0.0.41`.

    Args:
      flag: the flag that has them, for messages.
      text: the words, with commas between them.

    Raises:
      UserError: a word has another form, or names another package or one twice.
    """
    found: dict[str, str] = {}
    for word in filter(None, map(str.strip, text.split(","))):
        match = _WORD.fullmatch(word)
        if match is None or match[1] not in PACKAGES:
            raise UserError(
                f"{flag} {word}: write {'==VERSION or '.join(PACKAGES)}==VERSION, "
                f"with a comma between two"
            )
        if match[1] in found:
            raise UserError(f"{flag} names {match[1]} twice")
        found[match[1]] = match[2]
    if not found:
        raise UserError(f"{flag} names no version: try {flag} libtpu==0.0.41")
    return found


def packages_text(packages: Packages) -> str:
    """Write versions as a person reads them: `jax 0.10.1, libtpu 0.0.41`."""
    return ", ".join(f"{name} {version}" for name, version in packages.items())


def requirements(packages: Packages, platform: str) -> list[str]:
    """List what pip is to install for a platform.

    Args:
      platform: the platform of the target, `tpu` or `cuda`.

    Raises:
      UserError: a version of libtpu is asked for, which compiles for no GPU.
    """
    if platform == "cpu":
        raise UserError(
            "another compiler has no effect on target here, which runs what is installed"
        )
    jax = packages.get("jax", "")
    libtpu = packages.get("libtpu", "")
    if platform != "tpu" and libtpu:
        raise UserError(
            f"libtpu=={libtpu} has no effect on a GPU target, whose compiler comes with jax: "
            "try jax==VERSION"
        )
    if platform == "tpu":
        if not jax:
            return [f"libtpu=={libtpu}"]
        return [f"jax=={jax}", f"libtpu=={libtpu}"] if libtpu else [f"jax[tpu]=={jax}"]
    if "jax-cuda13-plugin" in versions():
        cuda = "cuda13"
    else:
        cuda = "cuda12"
    return [f"jax=={jax}", f"jax-{cuda}-plugin=={jax}", f"jax-{cuda}-pjrt=={jax}"]


def rehearse_with(
    packages: Packages,
    config: Config,
    name: str,
    target: Target,
    say: Say = lambda line: None,
) -> Rehearsal:
    """Rehearse a config with a compiler of another version.

    Args:
      packages: the versions, as `read_packages` reads them.
      name: the name of the config in the report.
      say: is called with the lines of an installation, and with one before the rehearsal.

    Returns:
      The report, as the process wrote it.

    Raises:
      DoesNotFit: the compiler refuses the step there because a device has too little memory.
      UserError: pip cannot install the versions, they cannot run this library, or the rehearsal is
        refused there.
    """
    python = environment(requirements(packages, target.platform), say)
    said = packages_text(packages)
    say(f"rehearsing with {said}, in a process of its own")
    surroundings = os.environ | {"JAX_PLATFORMS": "cpu"}
    if "libtpu" in packages or "jax" in packages:
        surroundings.pop("TPU_LIBRARY_PATH", None)  # it would take another's place
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / f"{Path(name).stem or 'config'}.toml"
        file.write_text(to_toml(config), encoding="utf-8")
        out = Path(folder) / "report.json"
        words = ["-P", "-m", "jaxpar.cli.main", "rehearse", str(file), "--target", target.name]
        words += ["--json", str(out)]
        done = subprocess.run(
            [str(python), *words],
            check=False,
            env=surroundings,
            capture_output=True,
            text=True,
            errors="replace",
        )
        if done.returncode or not out.exists():
            why = f"with {said}: {_last_word(done.stderr or done.stdout)}"
            raise DoesNotFit(why) if f"does not fit {target.name}" in why else UserError(why)
        return read_report(out)


def environment(wanted: Sequence[str], say: Say = lambda line: None) -> Path:
    """Make an environment in which pip has installed some packages, beside all that is installed
    here; one that is there already is taken.

    Args:
      wanted: the packages with their versions, `libtpu==0.0.41`.
      say: is called with pip's own lines.

    Returns:
      The Python of the environment.

    Raises:
      UserError: the environment cannot be made, or pip cannot install the packages.
    """
    beside = [path for path in sys.path if Path(path).name in ("site-packages", "dist-packages")]
    tag = f"python{sys.version_info.major}.{sys.version_info.minor}"
    here = hashlib.sha256("\n".join([sys.executable, *beside]).encode()).hexdigest()[:8]
    words = [re.sub(r"[^\w.]+", "-", word) for word in wanted]
    folder = cache_folder() / "compilers" / "_".join([tag, *words, here])
    python = folder / "bin" / "python"
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{folder}.lock"):
            if not (folder / _READY).exists():
                say(f"installing {', '.join(wanted)} into {folder}")
                _make(folder, beside)
                _install(python, wanted, say)
                (folder / _READY).write_text(json.dumps({"packages": list(wanted)}) + "\n")
    except OSError as error:
        raise UserError(f"cannot make {folder}: {error.strerror or error}") from error
    return python


def _make(folder: Path, beside: Sequence[str]) -> None:
    """Make an empty venv that finds the packages of other folders behind its own."""
    words = [sys.executable, "-m", "venv", "--clear", str(folder)]
    done = subprocess.run(words, check=False, capture_output=True, text=True, errors="replace")
    if done.returncode:
        raise UserError(f"python -m venv fails: {_last_word(done.stdout + done.stderr)}")
    scheme = {"base": str(folder), "platbase": str(folder)}
    own = Path(sysconfig.get_path("purelib", "venv", scheme))
    lines = [f"import site; site.addsitedir({path!r})" for path in beside]
    (own / "packages_beside.pth").write_text("\n".join(lines) + "\n")


def _install(python: Path, wanted: Sequence[str], say: Say) -> None:
    words = [str(python), "-m", "pip", "install", "--no-input", "--progress-bar", "off"]
    words += ["--retries", "1", "--disable-pip-version-check", *wanted]
    lines: list[str] = []
    with subprocess.Popen(
        words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    ) as process:
        assert process.stdout
        for line in process.stdout:
            lines.append(line.strip())
            if lines[-1].startswith(_TOLD):
                say(f"pip: {lines[-1]}")
    if process.returncode:
        raise UserError(f"pip cannot install {', '.join(wanted)}: {_pips_reason(lines)}")


def _pips_reason(lines: Sequence[str]) -> str:
    """Say in a line why pip has failed."""
    whole = "\n".join(lines)
    if _NO_NETWORK.search(whole):
        return "it reaches no index of packages: is there a network, and does pip know its proxy?"
    for line in lines:
        if match := re.search(r"requirement (\S+) \(from versions: (.*)\)", line):
            known = match[2].split(", ")
            if known == ["none"]:
                return f"no index of packages that it reaches has {match[1]}"
            python = ".".join(map(str, sys.version_info[:2]))
            newest = ", ".join(known[-5:])
            return f"no {match[1]} for Python {python}, the newest are {newest}"
    said = [line.removeprefix("ERROR:").strip() for line in lines if line.startswith("ERROR:")]
    return short("; ".join(said[:2])) if said else _last_word(whole)


def _last_word(text: str) -> str:
    """Return what a process said last of why it ended: its own error line, or else the last
    line.
    """
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    told = [line for line in lines if line.startswith("jaxpar: error: ")]
    if told:
        return told[-1].removeprefix("jaxpar: error: ")
    return lines[-1] if lines else "it ended without a word"
