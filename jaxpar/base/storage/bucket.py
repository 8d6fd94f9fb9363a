"""The objects below a URL, which are read, listed, written and removed."""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from jaxpar.base.atomic_write import replacing
from jaxpar.base.errors import UserError
from jaxpar.base.storage.outages import keep_trying, outage_of, reason

T = TypeVar("T")

_THREADS = 8
"""The number of objects that are sent or fetched at once."""
_PACKAGES = {"s3": "s3fs", "s3a": "s3fs", "gs": "gcsfs", "gcs": "gcsfs"}
_LIBRARIES = ("aiobotocore", "botocore", "fsspec", "gcsfs", "google", "s3fs", "urllib3")
"""The libraries that log, in words of their own, errors that they raise or that they try again."""
_IDENTITY = ("ETag", "etag", "generation", "md5Hash", "mtime", "LastModified", "created")
"""The attributes by which file systems tell an object from its later versions; the first that is
there counts.
"""


class Found(NamedTuple):
    """The attributes of an object that a bucket reports.

    Attributes:
      size: the number of its bytes.
      identity: a text that changes when the object does.
      modified: the time when it was written, in seconds since 1970; 0 = not known.
    """

    size: int
    identity: str
    modified: float


def as_url(path: str | Path) -> str:
    """Write a URL with its two slashes, of which `Path` leaves one, and without slashes at its
    end.
    """
    scheme, _, rest = str(path).partition(":/")
    if scheme.lower() == "file":
        return f"file:///{rest.strip('/')}"
    return f"{scheme.lower()}://{rest.strip('/')}"


class Bucket:
    """The objects below one URL, by their names relative to it."""

    def __init__(self, url: str | Path):
        """Open a URL, without a request to the bucket yet.

        Args:
          url: `s3://bucket/folder`, or another that fsspec reaches.

        Raises:
          UserError: the package that reads such URLs is not installed, or there is none.
        """
        self.url = as_url(url)
        self._fs, self._root = _file_system(self.url)
        self._root = self._root.rstrip("/")
        self._outage = outage_of("/".join(self.url.split("/")[:3]))

    def files(self, below: str = "") -> dict[str, Found]:
        """List the objects below the URL, at any depth.

        Args:
          below: the folder to list; empty = everything.

        Returns:
          The attributes of each object, by its name; empty where there is none.

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
        """Look up one object.

        Args:
          name: the object's name; empty = the URL itself names the object.

        Returns:
          The attributes of the object; None = there is no such object.

        Raises:
          UserError: the bucket cannot be asked.
        """

        def look() -> Found | None:
            try:
                info = self._fs.info(self._path(name))
            except FileNotFoundError:
                return None
            if info.get("type") != "file":
                return None
            return _found(info)

        return self._try("read", name, look)

    def read(self, name: str = "", start: int | None = None, stop: int | None = None) -> bytes:
        """Read an object, or its bytes from `start` up to `stop`.

        Raises:
          UserError: the object is not there, or cannot be read.
        """
        return self._try(
            "read", name, lambda: self._fs.cat_file(self._path(name), start=start, end=stop)
        )

    def write(self, name: str, content: bytes, seconds: float | None = None) -> None:
        """Write an object, which is then there whole, or as it was before.

        Args:
          seconds: the time for which a write that fails for a while is tried again; None =
            `LIMIT_SECONDS`.

        Raises:
          UserError: the object cannot be written.
        """
        self._try("written", name, lambda: self._fs.pipe_file(self._path(name), content), seconds)

    def read_if_there(self, name: str) -> bytes | None:
        """Read an object, or return None where there is none.

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

        Returns:
          Whether there was none.

        Raises:
          UserError: the object cannot be written.
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
          UserError: the object cannot be written.
        """
        self._try("written", name, lambda: self._fs.put_file(str(file), self._path(name)))

    def fetch_all(self, files: Iterable[tuple[str, Path]]) -> None:
        """Copy objects into files of this machine, several at once."""
        _at_once(lambda pair: self.fetch(*pair), files)

    def send_all(self, files: Iterable[tuple[Path, str]]) -> None:
        """Copy files of this machine into objects, several at once."""
        _at_once(lambda pair: self.send(*pair), files)

    def remove(self, names: Iterable[str]) -> None:
        """Remove objects, one after another; names without an object are passed over.

        Raises:
          UserError: an object cannot be removed.
        """

        def remove(name: str) -> None:
            with contextlib.suppress(FileNotFoundError):
                self._fs.rm_file(self._path(name))

        for name in names:
            self._try("removed", name, functools.partial(remove, name))

    def _path(self, name: str) -> str:
        if not name:
            return self._root
        return f"{self._root}/{name}".rstrip("/")

    def _try(self, what: str, name: str, do: Callable[[], T], seconds: float | None = None) -> T:
        """Make a request about an object, again while it fails with an error that may pass."""
        if name:
            where = f"{self.url}/{name}"
        else:
            where = self.url
        return keep_trying(do, what, where, self._outage, seconds)


def _file_system(url: str) -> tuple[Any, str]:
    """Return the file system that fsspec has for a URL, and the path on it."""
    from fsspec.core import url_to_fs

    scheme = url.partition("://")[0]
    for library in _LIBRARIES:
        logger = logging.getLogger(library)
        if logger.level == logging.NOTSET:  # else a program wants to hear it
            logger.setLevel(logging.CRITICAL)
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
            f"{url}: {reason(error)}: s3:// and gs:// are read and written, and what else "
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
    if not isinstance(modified, int | float):
        modified = 0.0
    identity = known[0] if known else ""
    return Found(size=size, identity=f"{size}:{identity}", modified=float(modified))


def _checked(name: str, url: str) -> str:
    """Refuse a name that would leave the folder that its object is copied to."""
    if ".." in name.split("/"):
        raise UserError(f"{url} has an object named {name!r}, which is no path below it")
    return name


def _at_once(do: Callable[[T], None], items: Iterable[T]) -> None:
    with ThreadPoolExecutor(_THREADS) as pool:
        list(pool.map(do, items))
