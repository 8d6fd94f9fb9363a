"""Opens paths that are URLs: `s3://`, `gs://` and whatever else fsspec reaches.

Everything else in the library reads and writes folders of this machine. What lies in a bucket is
copied here first, and what is made here is sent there:

- `local_path(path)` turns a path that a user gave, local or a URL, into one of this machine. Of a
  URL it is a copy, in a cache that is bounded and shared, and is refreshed by each call: for data,
  tokenizers and Hugging Face folders.
- `Bucket` reads, lists, writes and removes the objects below a URL. What fails for a while (a 503,
  a timeout) is tried again, with one line that says so, up to `LIMIT_SECONDS`.
- A `UserError` and the console name such copies by their URLs (`errors.with_urls`).

`jaxpar.train.runs.bucket_runs` keeps run folders in buckets, and `jaxpar.data.ranged` reads token
files by range. A path that is only ever local is refused by `errors.require_local`.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import logging
import os
import random
import shutil
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple, TypeVar

from filelock import FileLock

from jaxpar.base.console import PlainConsole, bytes_text
from jaxpar.base.errors import UserError, is_url, name_by_url, read_json
from jaxpar.base.machine import cache_folder
from jaxpar.base.whole_files import replacing, write_whole

T = TypeVar("T")

LIMIT_SECONDS = 300.0
"""How long a request that fails for a while is tried again."""
_LONGEST_PAUSE = 30.0
_THREADS = 8
"""Objects that are sent or fetched at once."""
COPIES_BYTES = 64 * 2**30
"""What the copies of this machine may take before old ones are removed."""
_IN_USE_SECONDS = 24 * 3600
"""A copy that was asked for within this time may still be open, and stays."""
_PACKAGES = {"s3": "s3fs", "s3a": "s3fs", "gs": "gcsfs", "gcs": "gcsfs"}
_IDENTITY = ("ETag", "etag", "generation", "md5Hash", "mtime", "LastModified", "created")
"""What a file system may say of an object that is another once the object is; the first counts."""
_FINAL = (
    FileNotFoundError,
    FileExistsError,
    PermissionError,
    IsADirectoryError,
    NotADirectoryError,
    NotImplementedError,
    TypeError,
    ValueError,
)
"""Errors that the same request would get again."""
_FOR_A_WHILE = (408, 429)
"""Codes of HTTP below 500 after which the same request may succeed: too slow, too many."""
_FINAL_NAMES = {"NoCredentialsError", "PartialCredentialsError", "ProfileNotFound", "NoSuchBucket"}


class Found(NamedTuple):
    """What a bucket says of an object.

    Attributes:
      size: its bytes.
      identity: a text that is another once the object is another.
      modified: when it was written, in seconds since 1970; 0 = not known.
    """

    size: int
    identity: str
    modified: float


def as_url(path: str | Path) -> str:
    """Write a URL with its two slashes, of which `Path` leaves one, and none at its end.

    Args:
      path: the URL.

    Returns:
      `scheme://rest`.
    """
    scheme, _, rest = str(path).partition(":/")
    if scheme.lower() == "file":
        return f"file:///{rest.strip('/')}"
    return f"{scheme.lower()}://{rest.strip('/')}"


class Bucket:
    """The objects below one URL, by their names relative to it."""

    def __init__(self, url: str | Path):
        """Open a URL. Nothing is asked of the bucket yet.

        Args:
          url: `s3://bucket/folder`, or another that fsspec reaches.

        Raises:
          UserError: no package that reads such URLs is installed, or there is none.
        """
        self.url = as_url(url)
        self._fs, self._root = _file_system(self.url)
        self._root = self._root.rstrip("/")
        self._outage = _outage_of("/".join(self.url.split("/")[:3]))

    def files(self, below: str = "") -> dict[str, Found]:
        """List the objects, at any depth.

        Args:
          below: only those in this folder.

        Returns:
          What is known of each, by its name; empty where there is none.

        Raises:
          UserError: the bucket cannot be listed.
        """

        def find() -> dict[str, dict[str, Any]]:
            try:
                return self._fs.find(self._path(below), detail=True)
            except FileNotFoundError:
                return {}

        found = {}
        for path, info in sorted(self._try("listed", below, find).items()):
            name = self._fs._strip_protocol(path)[len(self._root) :].lstrip("/")
            if info.get("type") == "file" and name and not path.endswith("/"):
                found[_checked(name, self.url)] = _found(info)
        return found

    def find(self, name: str = "") -> Found | None:
        """Ask for one object.

        Args:
          name: its name; empty = the URL itself is that of the object.

        Returns:
          What is known of it; None = there is no such object.

        Raises:
          UserError: the bucket cannot be asked.
        """

        def look() -> Found | None:
            try:
                info = self._fs.info(self._path(name))
            except FileNotFoundError:
                return None
            return _found(info) if info.get("type") == "file" else None

        return self._try("read", name, look)

    def read(self, name: str = "", start: int | None = None, stop: int | None = None) -> bytes:
        """Read an object, or its bytes from `start` up to `stop`.

        Raises:
          UserError: it is not there, or cannot be read.
        """
        return self._try(
            "read", name, lambda: self._fs.cat_file(self._path(name), start=start, end=stop)
        )

    def write(self, name: str, content: bytes, seconds: float | None = None) -> None:
        """Write an object: it is there whole, or as it was before.

        Args:
          name: its name.
          content: its bytes.
          seconds: how long a write that fails for a while is tried again; None = `LIMIT_SECONDS`.

        Raises:
          UserError: it cannot be written.
        """
        self._try("written", name, lambda: self._fs.pipe_file(self._path(name), content), seconds)

    def read_if_there(self, name: str) -> bytes | None:
        """Read an object; None = there is none.

        Raises:
          UserError: the bucket cannot be asked.
        """

        def read() -> bytes | None:
            try:
                return self._fs.cat_file(self._path(name))
            except FileNotFoundError:
                return None

        return self._try("read", name, read)

    def create(self, name: str, content: bytes) -> bool:
        """Write an object if there is none of its name.

        Args:
          name: its name.
          content: its bytes.

        Returns:
          Whether there was none.

        Raises:
          UserError: it cannot be written.
        """

        def create() -> bool:
            try:
                self._fs.pipe_file(self._path(name), content, mode="create")
            except FileExistsError:
                return False
            return True

        return self._try("written", name, create)

    def fetch(self, name: str, file: Path) -> None:
        """Copy an object into a file of this machine, which is there whole or not at all.

        Raises:
          UserError: the object cannot be read, or the file cannot be written.
        """

        def get() -> None:
            with replacing(file) as unfinished:
                self._fs.get_file(self._path(name), unfinished.name)

        self._try("read", name, get)

    def send(self, file: Path, name: str) -> None:
        """Copy a file of this machine into an object, which is there whole or as it was before.

        Raises:
          UserError: it cannot be written.
        """
        self._try("written", name, lambda: self._fs.put_file(str(file), self._path(name)))

    def fetch_all(self, files: Iterable[tuple[str, Path]]) -> None:
        """`fetch` pairs of an object and a file, several at once."""
        _at_once(lambda pair: self.fetch(*pair), files)

    def send_all(self, files: Iterable[tuple[Path, str]]) -> None:
        """`send` pairs of a file and an object, several at once."""
        _at_once(lambda pair: self.send(*pair), files)

    def remove(self, names: Iterable[str]) -> None:
        """Remove objects, one after another; those that are not there are none.

        Raises:
          UserError: one cannot be removed.
        """

        def remove(name: str) -> None:
            with contextlib.suppress(FileNotFoundError):
                self._fs.rm_file(self._path(name))

        for name in names:
            self._try("removed", name, functools.partial(remove, name))

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}".rstrip("/") if name else self._root

    def _try(self, what: str, name: str, do: Callable[[], T], seconds: float | None = None) -> T:
        """Do something, again and again while it fails as it may for a while."""
        where = f"{self.url}/{name}" if name else self.url
        limit = LIMIT_SECONDS if seconds is None else seconds
        until = time.monotonic() + limit
        pause = 0.5
        waiting = False
        answered = False
        try:
            while True:
                try:
                    result = do()
                # of a network library, or of one above it
                except Exception as error:
                    why = _require_passing(error, what, where, until, limit)
                else:
                    answered = True
                    return result
                if not waiting:
                    waiting = True
                    self._outage.enter(
                        f"warning: {where} cannot be {what} ({why}): it is tried again for up to "
                        f"{limit:.0f} s"
                    )
                left = until - time.monotonic()
                time.sleep(min(pause * random.uniform(0.8, 1.2), max(left, 0.01)))
                pause = min(2 * pause, _LONGEST_PAUSE)
        finally:
            if waiting:
                self._outage.leave(answered)


def _require_passing(error: Exception, what: str, where: str, until: float, limit: float) -> str:
    """Return what an error says that may pass; raise one that the same request would get again, or
    that has not passed in time.
    """
    if isinstance(error, UserError):
        raise error
    why = _reason(error)
    if what == "written" and isinstance(error, FileNotFoundError):
        why = "there is no such bucket"
    if _is_final(error):
        raise UserError(f"{where} cannot be {what}: {why}") from error
    if time.monotonic() >= until:
        raise UserError(
            f"{where} cannot be {what} ({why}), and was tried for {limit:.0f} s: look at "
            "the bucket and at the network, and give the command again"
        ) from error
    return why


def local_path(
    path: str | Path,
    belongs: Callable[[str], bool] = lambda name: True,
    part: str = "",
) -> Path:
    """Find a file or a folder on this machine; what a URL names is copied here first.

    Objects that have not changed since an earlier copy are not fetched again.

    Args:
      path: a path of this machine, which is returned as it is, or a URL.
      belongs: whether an object of a folder is copied, by its name below the folder.
      part: what tells this choice of objects from others; empty = all of them.

    Returns:
      The file or the folder. A URL under which nothing is gives a path under which nothing is.

    Raises:
      UserError: the bucket cannot be read.
    """
    if not is_url(path):
        return Path(path)
    bucket = Bucket(path)
    folder = _copies() / hashlib.sha256(f"{bucket.url} {part}".encode()).hexdigest()[:16]
    target = folder / PurePosixPath(bucket.url.partition("://")[2]).name
    name_by_url(target, bucket.url)
    folder.mkdir(parents=True, exist_ok=True)
    with FileLock(folder / "lock"):
        single = bucket.find()
        if single is not None:
            wanted = {"": single}
        else:
            wanted = {name: one for name, one in bucket.files().items() if belongs(name)}
        _refresh(bucket, target, folder / "index.json", wanted)
        os.utime(folder)
    _remove_old_copies(folder)
    return target


def _refresh(bucket: Bucket, target: Path, index: Path, wanted: dict[str, Found]) -> None:
    """Make a copy equal to what the bucket has; `index` says what the copy has until now."""
    there = read_json(index) if index.exists() else {}
    new = [
        name
        for name, found in wanted.items()
        if there.get(name) != found.identity or not (target / name).is_file()
    ]
    for name in there.keys() - wanted.keys():
        (target / name).unlink(missing_ok=True)
    if "" not in wanted and target.is_file():  # what was one object is a folder now
        target.unlink()
    if "" in wanted and target.is_dir():
        shutil.rmtree(target)
    size = sum(wanted[name].size for name in new)
    if size > 2**30:
        say(f"fetching {bytes_text(size)} of {bucket.url}")
    write_whole(index, json.dumps({name: there[name] for name in there if name not in new}))
    bucket.fetch_all((name, target / name) for name in new)
    for name in new:
        if (target / name).stat().st_size != wanted[name].size:
            raise UserError(
                f"{target / name} is no longer the object that was listed: something writes there, "
                "so give the command again"
            )
    write_whole(index, json.dumps({name: found.identity for name, found in wanted.items()}))


def _copies() -> Path:
    """The folder of the copies of this machine."""
    return cache_folder() / "buckets" / "copies"


def _remove_old_copies(but: Path) -> None:
    """Remove copies that were not asked for lately, the oldest first, until the others fit."""
    sizes = {}
    for folder in _copies().iterdir():
        index = folder / "index.json"
        if index.exists():
            files = (file for file in folder.rglob("*") if file.is_file())
            sizes[folder] = sum(file.stat().st_size for file in files)
    too_much = sum(sizes.values()) - COPIES_BYTES
    for folder in sorted(sizes, key=lambda folder: folder.stat().st_mtime):
        is_old = time.time() - folder.stat().st_mtime > _IN_USE_SECONDS
        if too_much > 0 and is_old and folder != but:
            shutil.rmtree(folder, ignore_errors=True)
            too_much -= sizes[folder]


class _Outage:
    """A time in which a bucket does not answer: one line says that it begins, and one that it has
    ended, however many requests wait for it.
    """

    def __init__(self, name: str):
        self._name = name
        self._lock = threading.Lock()
        self._waiting = 0
        self._began: float | None = None

    def enter(self, line: str) -> None:
        """Wait for the bucket; the first that does says the line."""
        with self._lock:
            self._waiting += 1
            if self._began is not None:
                return
            self._began = time.monotonic()
        say(line)

    def leave(self, answered: bool) -> None:
        """Wait no longer; the last that does, and got an answer, says so."""
        with self._lock:
            self._waiting -= 1
            if self._waiting or self._began is None:
                return
            took = time.monotonic() - self._began
            self._began = None
        if answered:
            say(f"{self._name} answers again, after {took:.0f} s")


_OUTAGES: dict[str, _Outage] = {}


def _outage_of(name: str) -> _Outage:
    """The outage of a bucket, which all of this process share."""
    return _OUTAGES.setdefault(name, _Outage(name))


def _file_system(url: str) -> tuple[Any, str]:
    """The file system that fsspec has for a URL, and the path on it."""
    from fsspec.core import url_to_fs

    scheme = url.partition("://")[0]
    # gcsfs logs what it raises
    logging.getLogger("gcsfs").addHandler(logging.NullHandler())
    # a listing that is kept would hide what other machines write
    options: dict[str, Any] = {"use_listings_cache": False}
    if scheme == "file":
        options["auto_mkdir"] = True
    try:
        file_system, root = url_to_fs(url, **options)
    except ImportError as error:
        package = _PACKAGES.get(scheme)
        extra = "jaxpar[cloud]" if package else "what it names"
        raise UserError(
            f"{url} needs {package or 'a package'} ({error}): pip install '{extra}'"
        ) from error
    except ValueError as error:
        raise UserError(
            f"{url}: {_reason(error)}: s3:// and gs:// are read and written, and what else "
            "fsspec knows"
        ) from error
    if _PACKAGES.get(scheme) == "s3fs":
        # It would try five times what the client below it has tried five times: a request that is
        # never answered would be waited for without a word for longer than `LIMIT_SECONDS`.
        file_system.retries = 1
    return file_system, root


def _found(info: dict[str, Any]) -> Found:
    size = int(info.get("size") or 0)
    known = [str(info[key]) for key in _IDENTITY if info.get(key) is not None]
    modified: Any = info.get("LastModified") or info.get("mtime") or info.get("created") or 0
    if hasattr(modified, "timestamp"):
        modified = modified.timestamp()
    return Found(
        size,
        f"{size}:{known[0] if known else ''}",
        float(modified) if isinstance(modified, int | float) else 0.0,
    )


def _checked(name: str, url: str) -> str:
    """Refuse a name that would leave the folder that its object is copied to."""
    if ".." in name.split("/"):
        raise UserError(f"{url} has an object named {name!r}, which is no path below it")
    return name


def _is_final(error: Exception) -> bool:
    if isinstance(error, _FINAL) or type(error).__name__ in _FINAL_NAMES:
        return True
    code = getattr(error, "code", None)  # of gcsfs
    if isinstance(code, int) and 400 <= code < 500:
        return code not in _FOR_A_WHILE
    return isinstance(error, OSError) and str(error).startswith("Forbidden")


def _reason(error: Exception) -> str:
    """The first line of what an error says, after its name where that says more."""
    text = (str(error).strip() or type(error).__name__).splitlines()[0][:200]
    if isinstance(error, FileNotFoundError):
        return "there is no such object"
    if isinstance(error, TimeoutError):
        return "no answer in time"
    return text


def _at_once(do: Callable[[T], None], items: Iterable[T]) -> None:
    with ThreadPoolExecutor(_THREADS) as pool:
        list(pool.map(do, items))


_SAYING = threading.Lock()


def say(line: str) -> None:
    """Print a line about a bucket on standard error, from any thread."""
    with _SAYING:
        PlainConsole(stderr=True, soft_wrap=True).print(line)
