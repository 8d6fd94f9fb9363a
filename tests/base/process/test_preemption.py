"""What asks a run to stop, without a run: signals before the first step, and a machine's notice."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from heard_signals import children_hear

from jaxpar.base.process import machine_notice
from jaxpar.base.process.machine_notice import MachineNotice, metadata_server
from jaxpar.base.process.preemption import Stop

BUSY = """
import ctypes, signal
from jaxpar.base.process.early_signals import leave_on_signals
leave_on_signals()
print("ready", flush=True)
ctypes.CDLL(None).sleep(20)  # as a compiler does: Python calls no handler meanwhile
"""


@pytest.mark.parametrize(
    ("number", "code", "said"),
    [
        (signal.SIGINT, 130, "jaxpar: interrupted\n"),
        (signal.SIGTERM, 143, "jaxpar: stopped by SIGTERM, with nothing to save\n"),
        (signal.SIGUSR1, 143, "jaxpar: stopped by SIGUSR1, with nothing to save\n"),
        (signal.SIGHUP, 143, "jaxpar: stopped by SIGHUP, with nothing to save\n"),
    ],
)
def test_a_signal_before_the_first_step_ends_a_process_that_compiles_at_once(
    number: signal.Signals, code: int, said: str
) -> None:
    with children_hear():
        process = subprocess.Popen(
            [sys.executable, "-c", BUSY], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
    with process:
        assert process.stdout and process.stderr
        process.stdout.readline()
        process.send_signal(number)
        assert process.wait(timeout=10) == code
        assert process.stderr.read() == said


FIRST = """
import signal, time
from jaxpar.base.process.early_signals import leave_on_signals
leave_on_signals()
from jaxpar.base.process.preemption import Stop
stop = Stop()
stop.listen()
signal.raise_signal(signal.SIGINT)
time.sleep(0.3)  # in which the thread hears of it
print(stop.reached(), flush=True)
signal.raise_signal(signal.SIGINT)
print("lives on")
"""


def test_the_first_ctrl_c_asks_also_where_the_thread_hears_of_it_later() -> None:
    with children_hear():
        done = subprocess.run(
            [sys.executable, "-c", FIRST], capture_output=True, text=True, check=False
        )
    assert (done.returncode, done.stdout, done.stderr) == (130, "True\n", "jaxpar: interrupted\n")


LATE = """
import os, signal
from jaxpar.base.process.early_signals import end_quietly, leave_on_signals
leave_on_signals()
end_quietly()
class Late:
    def __del__(self, kill=os.kill, me=os.getpid(), number=signal.SIGUSR1):
        kill(me, number)  # Python has given its handlers back
import sys
sys.late = Late()
"""


def test_a_notice_while_python_ends_does_not_spoil_a_success() -> None:
    assert subprocess.run([sys.executable, "-c", LATE], check=False).returncode == 0


def test_a_second_ctrl_c_does_what_the_first_would_have_done_and_a_second_sigterm_nothing() -> None:
    stop = Stop()
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        stop.listen()
        assert not stop.reached()
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGUSR1)
        assert stop.reached() and stop.why == "SIGTERM"
        signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        stop.close()
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    finally:
        stop.close()
        signal.signal(signal.SIGINT, before)


class _Metadata(ThreadingHTTPServer):
    """A metadata server, as far as it says whether its machine is taken away."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Answer)
        self.asked: list[str] = []
        self.taken = threading.Event()


class _Answer(BaseHTTPRequestHandler):
    server: _Metadata

    def do_GET(self) -> None:
        self.server.asked.append(self.path)
        if self.headers["Metadata-Flavor"] != "Google":
            self.send_error(403)
            return
        if "wait_for_change=true" in self.path:
            self.server.taken.wait(10)
        said = b"TRUE" if self.server.taken.is_set() else b"FALSE"
        self.send_response(200)
        self.send_header("ETag", f"mark-{said.decode()}")
        self.send_header("Content-Length", str(len(said)))
        self.end_headers()
        self.wfile.write(said)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def metadata(monkeypatch: pytest.MonkeyPatch) -> Iterator[_Metadata]:
    with _Metadata() as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setenv("GCE_METADATA_HOST", f"127.0.0.1:{server.server_port}")
        monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")  # which it does not take
        yield server
        server.taken.set()
        server.shutdown()


def test_a_machine_that_is_taken_away_asks_for_a_stop(metadata: _Metadata) -> None:
    stop = Stop()
    asked = threading.Event()

    def ask(why: str) -> None:
        stop.ask(why)
        asked.set()

    notice = MachineNotice(ask)
    until = time.monotonic() + 10
    while len(metadata.asked) < 2 and time.monotonic() < until:  # the second waits for a change
        assert not asked.wait(0.01)
    assert not stop.reached()
    metadata.taken.set()
    assert asked.wait(10) and stop.reached()
    assert stop.why == "the machine's notice that it is taken away"
    assert "wait_for_change=true" in metadata.asked[-1] and "last_etag=mark-" in metadata.asked[-1]
    notice.close()


def test_only_a_machine_of_google_is_asked(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    for name in ("GCE_METADATA_HOST", "NO_GCE_CHECK"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(machine_notice, "_PRODUCT", tmp_path / "product_name")
    assert metadata_server() == ""
    (tmp_path / "product_name").write_text("Google Compute Engine\n")
    assert metadata_server() == "metadata.google.internal"
    monkeypatch.setenv("NO_GCE_CHECK", "True")
    assert metadata_server() == ""


def test_a_server_that_does_not_answer_is_told_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(machine_notice, "_PATIENCE", 0.01)
    monkeypatch.setenv("GCE_METADATA_HOST", "127.0.0.1:9")
    notice = MachineNotice(lambda why: None)
    until = time.monotonic() + 10
    while not caplog.records and time.monotonic() < until:
        time.sleep(0.01)
    time.sleep(0.1)  # some more failures
    notice.close()
    (record,) = caplog.records
    assert "127.0.0.1:9 does not answer" in record.getMessage()
