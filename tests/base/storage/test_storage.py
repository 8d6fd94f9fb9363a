"""The room that opens URLs, on fsspec's file system in memory."""

import threading
import uuid
from pathlib import Path

import pytest
from fsspec.implementations.memory import MemoryFileSystem

from jaxpar.base.errors import UserError, is_url, with_urls
from jaxpar.base.storage import Bucket, as_url, copies, local_path, outages


@pytest.fixture
def bucket(tmp_path, monkeypatch) -> Bucket:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return Bucket(f"memory://{uuid.uuid4().hex}/run")


@pytest.fixture
def quick(monkeypatch) -> list[float]:
    """The pauses that are asked for, none of which is made: the clock goes on by each."""
    clock = [0.0]
    pauses = list[float]()

    def pause(seconds: float) -> None:
        pauses.append(seconds)
        clock[0] += seconds

    monkeypatch.setattr(outages.time, "sleep", pause)
    monkeypatch.setattr(outages.time, "monotonic", lambda: clock[0])
    return pauses


def test_a_url_is_told_from_a_path_also_where_it_has_become_one():
    assert is_url("s3://bucket/run") and is_url("s3:/bucket/run")
    assert not any(map(is_url, ["", "runs/a", "/tmp/s3:/x", "C:/texts", "data:train"]))
    assert as_url("S3:/bucket/run/") == "s3://bucket/run"


def test_objects_are_written_found_read_by_range_and_removed(bucket, tmp_path):
    assert bucket.files() == {} and bucket.find("a") is None
    bucket.write("a/b", b"0123456789")
    (tmp_path / "file").write_bytes(b"more")
    bucket.send(tmp_path / "file", "a/c")
    found = bucket.files()
    assert {name: one.size for name, one in found.items()} == {"a/b": 10, "a/c": 4}
    assert found["a/b"].modified > 1.7e9
    assert bucket.read("a/b", 2, 5) == b"234"
    bucket.remove(["a/b", "never there"])
    assert list(bucket.files()) == ["a/c"]


def test_a_copy_has_what_the_bucket_has_and_fetches_only_what_changed(bucket, monkeypatch):
    bucket.write("a/x", b"one")
    bucket.write("y", b"two")
    copy = local_path(bucket.url)
    assert (copy / "a/x").read_bytes() == b"one" and (copy / "y").read_bytes() == b"two"
    bucket.write("a/x", b"1")
    bucket.remove(["y"])
    fetched = list[str]()
    fetch = Bucket.fetch
    monkeypatch.setattr(
        Bucket, "fetch", lambda self, name, file: (fetched.append(name), fetch(self, name, file))
    )
    bucket.write("z", b"new")
    assert local_path(bucket.url) == copy
    assert sorted(fetched) == ["a/x", "z"]
    assert (copy / "a/x").read_bytes() == b"1" and not (copy / "y").exists()
    # a message names the object
    assert with_urls(f"cannot read {copy / 'a/x'}") == f"cannot read {bucket.url}/a/x"
    assert str(UserError(f"{copy}: damaged")) == f"{bucket.url}: damaged"


def test_one_object_is_copied_as_a_file_and_nothing_as_nothing(bucket):
    bucket.write("a/tokens.bin", b"ids")
    assert local_path(f"{bucket.url}/a/tokens.bin").read_bytes() == b"ids"
    assert local_path(f"{bucket.url}/a/tokens.bin").name == "tokens.bin"
    assert not local_path(f"{bucket.url}/nothing").exists()


def test_an_object_whose_name_leaves_its_folder_is_refused(bucket, monkeypatch):
    found = {"/up/../../x": {"type": "file", "size": 1}}
    monkeypatch.setattr(MemoryFileSystem, "find", lambda *_, **__: found)
    with pytest.raises(UserError, match="no path below it"):
        local_path("memory://up")


def test_what_fails_for_a_while_is_tried_again_and_said_once(bucket, monkeypatch, capsys, quick):
    bucket.write("x", b"there")
    cat = MemoryFileSystem.cat_file
    left = [OSError(16, "503 Slow Down")] * 6

    def busy(*args, **options):
        if left:
            raise left.pop()
        return cat(*args, **options)

    monkeypatch.setattr(MemoryFileSystem, "cat_file", busy)
    assert bucket.read("x") == b"there"
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 2 and "503 Slow Down" in said[0] and "is tried again" in said[0]
    assert "answers again, after" in said[1]
    assert len(quick) == 6 and quick == sorted(quick)  # each pause is longer: x2 beats +-20 %


def test_requests_that_wait_together_are_said_once(bucket, tmp_path, monkeypatch, capsys):
    put = MemoryFileSystem.put_file
    away = threading.Event()
    waiting = list[int]()

    def busy(*args, **options):
        if away.is_set():
            return put(*args, **options)
        waiting.append(1)
        raise OSError(16, "503 Slow Down")

    monkeypatch.setattr(MemoryFileSystem, "put_file", busy)
    files = [tmp_path / str(number) for number in range(6)]
    for file in files:
        file.write_bytes(b"x")
    bucket.write("x", b"")
    threading.Timer(0.3, away.set).start()
    bucket.send_all((file, file.name) for file in files)
    assert len(bucket.files()) == 7 and len(waiting) >= 6
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 2 and "is tried again" in said[0] and "answers again" in said[1]


def test_what_fails_for_too_long_ends_in_one_line(bucket, monkeypatch, capsys, quick):
    def busy(*args, **options):
        raise TimeoutError

    bucket.write("x", b"")
    monkeypatch.setattr(MemoryFileSystem, "cat_file", busy)
    with pytest.raises(UserError) as error:
        bucket.read("x")
    text = str(error.value)
    assert f"{bucket.url}/x cannot be read (no answer in time)" in text
    assert "tried for 300 s" in text and "\n" not in text
    assert len(capsys.readouterr().err.splitlines()) == 1
    assert sum(quick) == pytest.approx(300, abs=0.1)  # the last pause is cut at the limit


class HttpError(Exception):
    """As gcsfs raises it."""

    def __init__(self, code: int):
        super().__init__(f"HTTP {code}")
        self.code = code


def test_a_bucket_that_has_not_answered_yet_is_not_waited_for(bucket, monkeypatch, capsys, quick):
    """It may have no such name, and a run has nothing to lose before it begins."""

    def no_host(*args, **options):
        error = ConnectionError("no such host")
        error.response = None  # as that of requests, by which google.auth asks
        raise error

    monkeypatch.setattr(MemoryFileSystem, "cat_file", no_host)
    with pytest.raises(UserError, match=r"\(no such host\), .* 20 s"):
        bucket.read("x")
    assert capsys.readouterr().err == ""
    assert sum(quick) == pytest.approx(20, abs=0.1)


def test_a_bucket_that_is_busy_at_the_first_request_is_waited_for(bucket, monkeypatch, quick):
    def busy(*args, **options):
        raise HttpError(503)

    monkeypatch.setattr(MemoryFileSystem, "cat_file", busy)
    with pytest.raises(UserError, match="was tried for 300 s"):
        bucket.read("x")


def test_a_password_is_not_said(capsys):
    url = "sftp://me:secret@host/run"
    assert str(UserError(f"{url} cannot be read")) == "sftp://me:***@host/run cannot be read"
    outages.say(f"warning: {url} cannot be read")
    assert "secret" not in capsys.readouterr().err


def test_a_first_request_that_hangs_is_left_behind(bucket, monkeypatch):
    asked = threading.Event()
    monkeypatch.setattr(outages, "FIRST_SECONDS", 0.2)
    monkeypatch.setattr(MemoryFileSystem, "cat_file", lambda *_, **__: asked.wait(60))
    with pytest.raises(UserError, match=r"\(no answer in time\)"):
        bucket.read("x")
    asked.set()


def test_what_would_fail_again_is_tried_once(bucket, quick):
    with pytest.raises(UserError, match=r"/x cannot be read: .*no such object$"):
        bucket.read("x")
    assert quick == []


@pytest.mark.parametrize(
    ("error", "tries"),
    [
        (PermissionError("Access Denied"), 1),
        (OSError("Forbidden: b/x"), 1),
        (HttpError(401), 1),
        (HttpError(429), 2),
        (HttpError(503), 2),
        (ConnectionError("reset"), 2),
        (OSError(5, "SlowDown"), 2),
    ],
    ids=str,
)
def test_only_what_may_pass_is_tried_again(bucket, monkeypatch, quick, error, tries):
    asked = []

    def fail(*args, **options):
        asked.append(1)
        raise error

    monkeypatch.setattr(outages, "LIMIT_SECONDS", 0.3)
    monkeypatch.setattr(MemoryFileSystem, "cat_file", fail)
    with pytest.raises(UserError):
        bucket.read("x")
    assert len(asked) == tries


def test_a_bucket_that_is_not_there_is_named(bucket, monkeypatch):
    def absent(*args, **options):
        raise FileNotFoundError("The specified bucket does not exist")

    monkeypatch.setattr(MemoryFileSystem, "pipe_file", absent)
    with pytest.raises(UserError, match=r"x cannot be written: .*no such bucket"):
        bucket.write("x", b"")


def test_a_package_that_is_missing_is_named(monkeypatch):
    def absent(*args, **options):
        raise ImportError("Install s3fs to access S3")

    monkeypatch.setattr("fsspec.core.url_to_fs", absent)
    with pytest.raises(UserError, match=r"s3://b needs s3fs .*pip install 'jaxpar\[cloud\]'"):
        Bucket("s3://b")


def test_a_copy_that_another_process_removes_meanwhile_is_none(bucket, monkeypatch):
    bucket.write("a/x", bytes(1000))
    bucket.write("b/x", bytes(1000))
    there = local_path(f"{bucket.url}/a").parent
    listed = Path.rglob

    def removed_meanwhile(folder, pattern):
        if folder == there:
            raise FileNotFoundError(folder)
        return listed(folder, pattern)

    monkeypatch.setattr(Path, "rglob", removed_meanwhile)
    assert local_path(f"{bucket.url}/b").exists()


def test_a_copy_for_which_there_is_no_place_is_refused_in_a_line(bucket, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("a file where a folder was to be")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    bucket.write("a", b"one")
    with pytest.raises(UserError, match=r"cannot write .*: Not a directory"):
        local_path(f"{bucket.url}/a")


def test_copies_that_were_not_asked_for_lately_go_first(bucket, monkeypatch):
    bucket.write("a/x", bytes(1000))
    bucket.write("b/x", bytes(1000))
    monkeypatch.setattr(copies, "COPIES_BYTES", 1500)
    old = local_path(f"{bucket.url}/a")
    assert local_path(f"{bucket.url}/b").exists() and old.exists()  # both may be in use
    monkeypatch.setattr(copies, "_IN_USE_SECONDS", -1)
    assert local_path(f"{bucket.url}/b").exists() and not old.exists()


@pytest.mark.parametrize(
    "name", ["", ".", "folder", "../outside", "/absolute", "folder/../../outside"]
)
def test_an_index_that_is_damaged_removes_nothing_but_files_of_its_copy(tmp_path, name):
    target = tmp_path / "copy"
    (target / "folder").mkdir(parents=True)
    (target / "file").write_text("x")
    (tmp_path / "outside").write_text("kept")
    copies._remove_inside(target, name.replace("/absolute", str(tmp_path / "outside")))
    copies._remove_inside(target, "file")
    assert (tmp_path / "outside").exists() and (target / "folder").is_dir()
    assert not (target / "file").exists()
