"""Models of the Hub by name, from a stand-in of the Hub on this machine and from its cache."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import jax
import pytest

from jaxpar.base.config import ModelConfig
from jaxpar.base.errors import UserError
from jaxpar.base.storage.hub import hub_folder
from jaxpar.cli.main import main
from jaxpar.data.streams.urls import tokenizer_here
from jaxpar.data.vocabulary.tokenizer import make_tokenizer
from jaxpar.models import Model
from jaxpar.models.hf.export import export_hf
from jaxpar.train.runs.folder.run_folder import read_run_config

hub = pytest.importorskip("huggingface_hub")
constants = pytest.importorskip("huggingface_hub.constants")
COMMIT = "0123456789abcdef0123456789abcdef01234567"
MODEL = ModelConfig(
    family="llama", vocab_size=256, layers=1, embed=32, heads=2, kv_heads=1, mlp=48, max_seq_len=32
)


class _Hub(ThreadingHTTPServer):
    """Has one model, `org/name`, whose files are those of a folder."""

    daemon_threads = True

    def __init__(self, folder: Path):
        super().__init__(("127.0.0.1", 0), _Answer)
        self.folder = folder
        self.sent: list[str] = []


class _Answer(BaseHTTPRequestHandler):
    server: _Hub

    def do_HEAD(self) -> None:
        self.answer(body=False)

    def do_GET(self) -> None:
        self.answer(body=True)

    def answer(self, body: bool) -> None:
        path = self.path.partition("?")[0]
        files = sorted(file.name for file in self.server.folder.iterdir())
        if path.startswith("/api/models/org/gated"):
            self.send({}, b"{}", 403, body, {"X-Error-Code": "GatedRepo"})
        elif path.startswith("/api/models/org/name/tree/"):
            listed = [
                {"type": "file", "path": name, "size": self.size(name), "oid": "0" * 40}
                for name in files
            ]
            self.send(listed, b"", 200, body)
        elif path.startswith("/api/models/org/name/revision/none"):
            self.send({}, b"{}", 404, body, {"X-Error-Code": "RevisionNotFound"})
        elif path.startswith("/api/models/org/name"):
            siblings = [{"rfilename": name} for name in files]
            about = {"id": "org/name", "modelId": "org/name", "sha": COMMIT, "siblings": siblings}
            self.send(about | {"private": False, "tags": [], "downloads": 0}, b"", 200, body)
        elif path.startswith("/org/name/resolve/"):
            content = (self.server.folder / path.rpartition("/")[2]).read_bytes()
            if body:
                self.server.sent.append(path.rpartition("/")[2])
            mark = hashlib.sha1(content).hexdigest()
            self.send(None, content, 200, body, {"ETag": f'"{mark}"', "X-Repo-Commit": COMMIT})
        else:
            self.send({}, b"{}", 404, body, {"X-Error-Code": "RepoNotFound"})

    def size(self, name: str) -> int:
        return (self.server.folder / name).stat().st_size

    def send(
        self,
        about: object,
        content: bytes,
        code: int,
        body: bool,
        headers: dict[str, str] | None = None,
    ) -> None:
        if about is not None:
            content = json.dumps(about).encode()
        self.send_response(code)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if body:
            self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def cache_of_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path / "hub"


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model as the Hub has it, with a file besides that is not read."""
    folder = tmp_path_factory.mktemp("hub") / "model"
    model = Model(MODEL)
    export_hf(jax.jit(model.init)(jax.random.key(0)), model, folder)
    (folder / "pytorch_model.bin").write_bytes(b"is not fetched")
    return folder


@pytest.fixture
def served(exported: Path, cache_of_hub: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[_Hub]:
    with _Hub(exported) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}"
        monkeypatch.setattr(constants, "ENDPOINT", url)
        monkeypatch.setattr(
            constants,
            "HUGGINGFACE_CO_URL_TEMPLATE",
            url + "/{repo_id}/resolve/{revision}/{filename}",
        )
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(
            "huggingface_hub._snapshot_download.HfApi",
            lambda **more: hub.HfApi(**(more | {"endpoint": url})),
        )
        yield server
        server.shutdown()


@pytest.mark.slow
def test_a_model_is_fetched_converted_and_then_taken_from_the_cache(
    served: _Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["--mesh.platform", "cpu", "--data.source", "stdlib", "--data.tokenizer", "bytes"]
    assert main(["convert", "hf://org/name", str(tmp_path / "run"), *words]) == 0
    assert read_run_config(tmp_path / "run").model.embed == 32
    assert "pytorch_model.bin" not in served.sent and "config.json" in served.sent
    served.sent.clear()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert (hub_folder("hf://org/name") / "model.safetensors").exists()
    assert served.sent == []


def test_a_tokenizer_is_fetched_without_the_weights(served: _Hub, tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    served.folder = tmp_path
    words = {"<|endoftext|>": 0, "a": 1, "b": 2}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="a"))
    made.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<|endoftext|>"}')
    (tmp_path / "model.safetensors").write_bytes(b"is not fetched")
    found = tokenizer_here("hf://org/name")
    assert make_tokenizer(found).end_of_text == 0
    (tmp_path / "text.txt").write_text("a b a")
    words = [str(tmp_path / "text.txt"), str(tmp_path / "out.bin"), "--tokenizer", "hf://org/name"]
    assert main(["tokenize", *words]) == 0
    assert "model.safetensors" not in served.sent


def test_a_folder_is_taken_for_its_tokenizer(tmp_path: Path) -> None:
    assert tokenizer_here(str(tmp_path)) == str(tmp_path / "tokenizer.json")
    assert tokenizer_here("bytes") == "bytes"


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("hf://org/missing", "not on the Hub"),
        ("hf://org/gated", "is gated: accept"),
        ("hf://org/name@none", "has no such revision"),
        ("hf://org/name/more", "try hf://org/name"),
    ],
)
def test_what_the_hub_does_not_give_is_one_line(served: _Hub, name: str, said: str) -> None:
    with pytest.raises(UserError, match=said) as raised:
        hub_folder(name)
    assert "\n" not in str(raised.value)


def test_without_a_network_and_a_copy_it_is_refused(
    cache_of_hub: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(UserError, match="not in the cache"):
        hub_folder("hf://org/name")
