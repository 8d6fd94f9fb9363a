"""Servers of buckets on this machine, for the tests that need a real one, with faults on request."""

from __future__ import annotations

import logging
import os
import random
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from http import HTTPStatus
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

BUCKET = "my-bucket"
WSGI = Callable[[dict[str, Any], Callable[..., Any]], Iterable[bytes]]


@dataclass
class Server:
    """A server of S3 that runs in this process, and how it fails at the moment.

    Attributes:
      environment: that in which a process finds it.
      busy: whether every request is answered with 503.
      share: the share of the requests that is answered with 503 otherwise.
      latency: seconds that each request takes longer.
      refuses: whether a request is answered with 503, by its method and path.
      ignores: whether a request is never answered, by its method and path.
      seen: the method and path of each request.
      failed: how many were answered with 503, or not at all.
      ended: whether nobody waits for an answer any more.
    """

    environment: dict[str, str] = field(default_factory=dict)
    busy: bool = False
    share: float = 0.0
    latency: float = 0.0
    refuses: Callable[[str, str], bool] = lambda method, path: False
    ignores: Callable[[str, str], bool] = lambda method, path: False
    seen: list[tuple[str, str]] = field(default_factory=list)
    failed: int = 0
    ended: threading.Event = field(default_factory=threading.Event)
    _draw: random.Random = field(default_factory=partial(random.Random, 0))

    def around(self, inner: WSGI) -> WSGI:
        """Put the faults before an application."""

        def answer(environ: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
            request = environ["REQUEST_METHOD"], environ["PATH_INFO"]
            self.seen.append(request)
            time.sleep(self.latency)
            if self.ignores(*request):
                self.failed += 1
                self.ended.wait()
            if self.busy or self._draw.random() < self.share or self.refuses(*request):
                self.failed += 1
                environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
                said = b"<Error><Code>SlowDown</Code><Message>Reduce your rate</Message></Error>"
                headers = [("Content-Type", "application/xml"), ("Content-Length", str(len(said)))]
                start("503 Slow Down", headers)
                return [said]
            return inner(environ, start)

        return answer


@contextmanager
def s3_server() -> Iterator[Server]:
    """Run moto's server of S3, with an empty bucket `my-bucket`.

    Yields:
      The server.
    """
    pytest.importorskip("s3fs", reason="needs the cloud extra")
    moto = pytest.importorskip("moto.server", reason="needs moto[server]")
    from werkzeug.serving import make_server

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = Server()
    inner = moto.DomainDispatcherApplication(moto.create_backend_app)
    served = make_server("127.0.0.1", 0, server.around(inner), threaded=True)
    thread = threading.Thread(target=served.serve_forever, daemon=True)
    thread.start()
    server.environment = {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{served.server_port}",
        "AWS_ACCESS_KEY_ID": "someone",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_DEFAULT_REGION": "us-east-1",
    }
    try:
        client(server).create_bucket(Bucket=BUCKET)
        with new_clients("s3"):
            yield server
    finally:
        server.ended.set()
        served.shutdown()
        thread.join()
        served.server_close()


@contextmanager
def new_clients(scheme: str) -> Iterator[None]:
    """Inside, and afterwards, no client of an earlier server of this process is taken: fsspec keeps
    them, and does not look at the environment, which has the address.
    """
    from fsspec import get_filesystem_class

    clients = get_filesystem_class(scheme)
    clients.clear_instance_cache()
    try:
        yield
    finally:
        clients.clear_instance_cache()


def one_at_a_time(answer: Callable[..., None]) -> Callable[..., None]:
    """Have threads call a function one after another; who has left meanwhile is no error."""
    lock = threading.Lock()

    def call(*args: Any) -> None:
        with lock, suppress(BrokenPipeError):
            answer(*args)

    return call


def keeps_what_is_there(
    upload: Callable[..., None], absent: type[Exception]
) -> Callable[..., None]:
    """Have an upload that is asked to (`ifGenerationMatch=0`) refuse to write over an object, as
    Google's own service does.

    Args:
      upload: writes an object of a request.
      absent: what the store raises where there is none.
    """

    def call(request: Any, response: Any, storage: Any) -> None:
        if request.query.get("ifGenerationMatch") == ["0"]:
            with suppress(absent):
                storage.get_file_obj(request.params["bucket_name"], request.data["meta"]["name"])
                response.status = HTTPStatus.PRECONDITION_FAILED
                said = "At least one of the pre-conditions you specified did not hold."
                response.json({"error": {"code": 412, "message": said}})
                return
        upload(request, response, storage)

    return call


def ends_content_with_two_bytes(decode: Callable[..., Any]) -> Callable[..., Any]:
    """Have an upload of several parts end its content by CR and LF, both of which the parser takes
    away. gcsfs ends it by LF alone, and the parser, which is one of mail, takes a CR that is the
    content's own last byte along with that. Google's own service keeps it.

    Args:
      decode: returns what a request holds, from what was sent.
    """

    def call(sent: bytes | None, handler: Any) -> Any:
        content = decode(sent, handler)
        if handler.headers.get_content_type() != "multipart/related":
            return content
        last_line = f"--{handler.headers.get_boundary()}--".encode()
        assert content.endswith(b"\n" + last_line), "gcsfs ends an upload otherwise now"
        return content.removesuffix(b"\n" + last_line) + b"\r\n" + last_line

    return call


@contextmanager
def gcs_server() -> Iterator[Server]:
    """Run a stand-in for Google Cloud Storage, with an empty bucket `my-bucket`.

    Yields:
      The server, without faults.
    """
    pytest.importorskip("gcsfs", reason="needs the cloud extra")
    emulator = pytest.importorskip("gcp_storage_emulator.server", reason="needs that package")
    uploads = emulator.objects
    # its own server answers one connection at a time, and gcsfs keeps several; its store takes one
    # request at a time
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(emulator.server, "HTTPServer", ThreadingHTTPServer)
        patch.setattr(emulator.Router, "handle", one_at_a_time(emulator.Router.handle))
        upload = keeps_what_is_there(uploads._multipart_upload, uploads.NotFound)
        patch.setattr(uploads, "_multipart_upload", upload)
        decode = ends_content_with_two_bytes(emulator._decode_raw_data)
        patch.setattr(emulator, "_decode_raw_data", decode)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        served = emulator.create_server("127.0.0.1", port, in_memory=True, default_bucket=BUCKET)
        served.start()
        found = {
            "STORAGE_EMULATOR_HOST": f"http://127.0.0.1:{port}",
            # a kind of bucket that it would ask for, and has no credentials to
            "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false",
        }
        try:
            with new_clients("gs"):
                yield Server(found)
        finally:
            served.stop()


def client(server: Server) -> Any:
    """Return botocore's client of a server, which knows nothing of jaxpar."""
    import botocore.session

    found = server.environment
    return botocore.session.get_session().create_client(
        "s3",
        region_name=found["AWS_DEFAULT_REGION"],
        endpoint_url=found["AWS_ENDPOINT_URL"],
        aws_access_key_id=found["AWS_ACCESS_KEY_ID"],
        aws_secret_access_key=found["AWS_SECRET_ACCESS_KEY"],
    )


def names(server: Server, below: str = "") -> list[str]:
    """The objects in `my-bucket`, by name."""
    pages = client(server).get_paginator("list_objects_v2").paginate(Bucket=BUCKET, Prefix=below)
    return [one["Key"] for page in pages for one in page.get("Contents", [])]


def environment_with(server: Server, cache: str) -> dict[str, str]:
    """The environment of a process that finds a server, and this module, and has a cache of its
    own.
    """
    own = {"XDG_CACHE_HOME": cache, "PYTHONPATH": str(Path(__file__).parent)}
    return os.environ | server.environment | own
