"""Runs commands of `jaxpar` one after another in this process, for the tests of the pages.

Each line of standard input is a command, a JSON list of its words without `jaxpar`; the answer is a
line too: a JSON list of the exit code, and of what the command wrote to standard output and to
standard error. Nine in ten commands of a page so start neither Python nor JAX, and find compiled
what an earlier one compiled.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import traceback

from jaxpar.base.layout.mesh import MeshSpec
from jaxpar.base.process.runtime import start
from jaxpar.cli.main import main

DEVICES = 8
"""Simulated devices: JAX cannot have more of them once it has started."""


def run(words: list[str]) -> tuple[int, str, str]:
    """Run a command; return its exit code, and all that it, its threads and its children wrote."""
    own = os.dup(1), os.dup(2)
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        os.dup2(out.fileno(), 1)
        os.dup2(err.fileno(), 2)
        try:
            code = exit_code(words)
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            for descriptor, kept in zip((1, 2), own, strict=True):
                os.dup2(kept, descriptor)
                os.close(kept)
        out.seek(0)
        err.seek(0)
        return code, out.read(), err.read()


def exit_code(words: list[str]) -> int:
    """Give the exit code that the command would have as a process; an exception that leaves it is
    printed.
    """
    try:
        return main(words)
    except SystemExit as exit:
        if isinstance(exit.code, int):
            return exit.code
        return int(exit.code is not None)
    except Exception:
        traceback.print_exc()
        return 1


if __name__ == "__main__":
    start(MeshSpec(data=DEVICES, platform="cpu"))
    for line in sys.stdin:
        print(json.dumps(run(json.loads(line))), flush=True)
