"""The needs of a run on other machines: the library in one version, the files that its config
names, and the environment.
"""

from __future__ import annotations

import json
import re
import shlex
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from jaxpar.base.config import Config, override
from jaxpar.base.errors import UserError, is_url
from jaxpar.base.toml import flatten
from jaxpar.base.version import UNKNOWN, jaxpar_version

REPOSITORY = "https://github.com/jaxpar/jaxpar"
FILES = "/tmp/jaxpar_files"
"""The folder on a host where staged files lie."""
_KEYS = ("data.path", "data.val_path", "data.tokenizer", "train.init", "distill.teacher")
_SECRET = re.compile(r"TOKEN|SECRET|PASSWORD|KEY|CREDENTIAL", re.IGNORECASE)
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


@dataclass(frozen=True)
class StagedFile:
    """A file or folder of this machine that goes to the hosts.

    Attributes:
      here: its path here.
      there: its path on every host.
    """

    here: str
    there: str


def local_inputs(config: Config) -> dict[str, str]:
    """List the settings that name files or folders on this machine, each dotted key with its path
    as given.

    Raises:
      UserError: a part of a mixture is one, which cannot be staged.
    """
    for part in config.data.mixture:
        path = part.rpartition(" ")[0].strip() or part
        if path and Path(path).exists() and not Path(path).is_absolute():
            raise UserError(
                f"data.mixture names {path}, which lies on this machine: give each part by its "
                "absolute path on storage that the hosts have"
            )
    found = named_inputs(config)
    return {key: path for key, path in found.items() if not is_url(path) and Path(path).exists()}


def named_inputs(config: Config) -> dict[str, str]:
    """List the settings that name files or folders, with their paths or URLs."""
    values = flatten(config)
    return {key: str(values[key]) for key in _KEYS if values.get(key)}


def stage_inputs(config: Config) -> tuple[Config, list[StagedFile]]:
    """Stage a config's files of this machine for the hosts.

    Returns:
      The config with their paths on the hosts, and the files that must be sent there.
    """
    staged: dict[str, StagedFile] = {}
    changes: dict[str, str] = {}
    for key, path in local_inputs(config).items():
        name = Path(path).resolve().name
        file = staged.setdefault(path, StagedFile(path, f"{FILES}/{len(staged)}_{name}"))
        changes[key] = file.there
    return override(config, changes), list(staged.values())


def require_seen(config: Config, storage: Path | None) -> None:
    """Refuse files of this machine where the hosts see one storage only.

    Args:
      storage: the folder that the storage is mounted at on every host; None = there is none.

    Raises:
      UserError: a setting names a file that lies here and not below that folder.
    """
    for key, path in local_inputs(config).items():
        if storage is None:
            raise UserError(
                f"{key}={path} lies on this machine, and a pod does not see it: copy it to a "
                f"bucket, and give {key}=gs://bucket/{Path(path).name}"
            )
        if not Path(path).is_absolute() or storage not in Path(path).parents:
            raise UserError(
                f"{key}={path} lies on this machine, and a pod sees only the claim, at {storage}: "
                f"copy it there, and give {key}={storage / Path(path).name}, or the URL of a bucket"
            )


@dataclass(frozen=True)
class Package:
    """The package that pip installs on the hosts.

    Attributes:
      requirement: the requirement for pip; a wheel has its path on the hosts.
      wheel: the wheel that must be sent there; None = pip fetches it.
      note: what a user should know of it; empty = nothing.
    """

    requirement: str
    wheel: StagedFile | None = None
    note: str = ""


def package_for(given: str, extra: str) -> Package:
    """Choose the version of the library that the hosts install: the one that is here unless another
    is given.

    Args:
      given: a wheel's path or URL, a requirement of pip with its version, or empty.
      extra: `cuda` or `tpu`.

    Raises:
      UserError: what is given does not say which version it is.
    """
    if not given:
        return _package_here(extra)
    if given.endswith(".whl"):
        name = Path(given).name
        if "://" in given:
            return Package(f"jaxpar[{extra}] @ {given}")
        if not Path(given).exists():
            raise UserError(f"--package={given} is no file here: build it with `make release`")
        there = f"{FILES}/{name}"
        return Package(f"jaxpar[{extra}] @ file://{there}", StagedFile(given, there))
    commit = re.search(r"@[0-9a-f]{7,40}$|@v\d[\w.]*$", given)
    if "==" not in given and not ("git+" in given and commit):
        raise UserError(
            f"--package={given} does not say which version: give a wheel, jaxpar[{extra}]==0.1.0, "
            f"or git+{REPOSITORY}@COMMIT"
        )
    if given.startswith("git+"):
        given = f"jaxpar[{extra}] @ {given}"
    return Package(given)


def _package_here(extra: str) -> Package:
    """Name the version that runs here: the commit of a clone, or of what pip installed from one."""
    clone = Path(__file__).parents[2]
    commit = ""
    note = ""
    if (clone / ".git").exists():
        commit = _git(clone, "rev-parse", "HEAD")
        if _git(clone, "status", "--porcelain", "--untracked-files=no"):
            note = "the clone that printed this has changes that the commit does not have"
    else:
        commit = _installed_commit()
    if commit:
        return Package(f"jaxpar[{extra}] @ git+{REPOSITORY}@{commit}", note=note)
    here = jaxpar_version()
    if here == UNKNOWN:
        raise UserError(
            "nothing installed the jaxpar that runs here, so its version is not known: say which "
            f"one the machines are to install, as --package=jaxpar[{extra}]==0.1.0, a wheel, or "
            f"git+{REPOSITORY}@COMMIT"
        )
    return Package(f"jaxpar[{extra}]=={here}")


def _git(folder: Path, *words: str) -> str:
    """Run git, and return what it says; empty where there is no git."""
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *words], capture_output=True, text=True, check=False
        )
    except OSError:
        return ""
    return "" if done.returncode else done.stdout.strip()


def _installed_commit() -> str:
    """Read the commit that pip installed (PEP 610); empty where it was none."""
    try:
        text = distribution("jaxpar").read_text("direct_url.json")
    except PackageNotFoundError:
        return ""
    if text is None:
        return ""
    return json.loads(text).get("vcs_info", {}).get("commit_id", "")


def require_environment(env: Sequence[str], secrets: Sequence[str]) -> None:
    """Check the variables that a script sets or hands on.

    Args:
      env: `NAME=value` pairs, which stand in the script.
      secrets: names, whose values never do.

    Raises:
      UserError: a pair is none, a value looks like a secret, or a name is none.
    """
    for pair in env:
        name, equals, _ = pair.partition("=")
        if not equals or not _NAME.fullmatch(name):
            raise UserError(f"--env {pair} is no NAME=value: try --env HF_HOME=/mnt/cache")
        if _SECRET.search(name):
            raise UserError(
                f"--env {name}=... would print its value in the script: try --secrets {name}, "
                "which hands it on by its name"
            )
    for name in secrets:
        if not _NAME.fullmatch(name):
            raise UserError(f"--secrets {name} is no name of a variable: try --secrets HF_TOKEN")


def exports(pairs: Sequence[str]) -> list[str]:
    """Write the lines of a shell that set variables, given as `NAME=value`."""
    split = [pair.partition("=") for pair in pairs]
    return [f"export {name}={shlex.quote(value)}" for name, _, value in split]
