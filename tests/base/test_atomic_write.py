"""Files that are written whole, and reach the disk before they take their name."""

from __future__ import annotations

import errno
import logging
import os
from pathlib import Path

import pytest

from jaxpar.base import atomic_write
from jaxpar.base.atomic_write import make_folder, write_whole
from jaxpar.base.errors import UserError


def test_a_file_is_synced_before_it_has_its_name_and_its_folder_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "file"
    seen = list[tuple[bool, bool]]()

    def note(opened: int) -> None:
        seen.append((os.path.isdir(opened), file.exists()))

    monkeypatch.setattr(os, "fsync", note)
    write_whole(file, "content")
    assert seen == [(False, False), (True, True)]


def test_the_names_of_new_folders_are_synced_each_in_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = list[int]()
    monkeypatch.setattr(os, "fsync", lambda opened: seen.append(os.fstat(opened).st_ino))
    make_folder(tmp_path / "a" / "b")
    assert seen == [(tmp_path / "a").stat().st_ino, tmp_path.stat().st_ino]
    make_folder(tmp_path / "a" / "b")
    assert len(seen) == 2


def test_a_file_system_that_does_not_sync_is_said_once_and_a_disk_that_fails_is_raised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(code: int) -> None:
        def fail(_: int) -> None:
            raise OSError(code, os.strerror(code))

        monkeypatch.setattr(os, "fsync", fail)

    atomic_write._say_unsynced.cache_clear()
    refuse(errno.EINVAL)
    with caplog.at_level(logging.WARNING):
        write_whole(tmp_path / "file", "content")
    assert len(caplog.records) == 1 and "does not sync" in caplog.text
    refuse(errno.EIO)
    with pytest.raises(UserError, match=r"cannot write .*other"):
        write_whole(tmp_path / "other", "content")
    assert (tmp_path / "file").read_text() == "content" and not (tmp_path / "other").exists()
