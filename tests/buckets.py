"""Servers of buckets on this machine, for the tests that need a real one."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

BUCKET = "my-bucket"


@contextmanager
def s3_server() -> Iterator[dict[str, str]]:
    """Run moto's server of S3 with an empty bucket `my-bucket`.

    Yields:
      The environment in which a process finds it.
    """
    pytest.importorskip("s3fs", reason="needs the cloud extra")
    moto = pytest.importorskip("moto.server", reason="needs moto[server]")
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = moto.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    found = {
        "AWS_ENDPOINT_URL": f"http://{host}:{port}",
        "AWS_ACCESS_KEY_ID": "someone",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_DEFAULT_REGION": "us-east-1",
    }
    try:
        make_bucket(found)
        yield found
    finally:
        server.stop()


def make_bucket(environment: dict[str, str]) -> None:
    """Make `my-bucket` on a server of S3 that has none."""
    import botocore.session

    session = botocore.session.get_session()
    client = session.create_client(
        "s3",
        region_name=environment["AWS_DEFAULT_REGION"],
        endpoint_url=environment["AWS_ENDPOINT_URL"],
        aws_access_key_id=environment["AWS_ACCESS_KEY_ID"],
        aws_secret_access_key=environment["AWS_SECRET_ACCESS_KEY"],
    )
    client.create_bucket(Bucket=BUCKET)


def environment_with(server: dict[str, str]) -> dict[str, str]:
    """The environment of this process with that of a server, on CPUs."""
    return os.environ | server | {"JAX_PLATFORMS": "cpu"}
