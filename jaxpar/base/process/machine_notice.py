"""The notice of Google Compute Engine that this machine is about to be taken away, which comes 30
seconds before: its metadata server is asked in a thread.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from http.client import HTTPException
from pathlib import Path
from urllib.request import OpenerDirector, ProxyHandler, Request, build_opener

_PRODUCT = Path("/sys/class/dmi/id/product_name")
_SERVER = "metadata.google.internal"
_LONGEST_WAIT = 60
"""Seconds after which the server answers also where nothing has changed."""
_PATIENCE = 5.0
"""Seconds to wait where the server does not answer."""
_FAILURES = 3
"""How often it may fail before a line says so."""


def metadata_server() -> str:
    """The host of Google's metadata server where this is one of its machines; empty = it is none.

    As in Google's own libraries, `GCE_METADATA_HOST` names another, and `NO_GCE_CHECK=true` says
    that this is no machine of theirs.
    """
    if os.environ.get("NO_GCE_CHECK", "").lower() == "true":
        return ""
    if named := os.environ.get("GCE_METADATA_HOST"):
        return named
    try:
        product = _PRODUCT.read_text(encoding="ascii", errors="replace")
    except OSError:
        return ""
    return _SERVER if product.startswith("Google") else ""


class MachineNotice:
    """Asks whether this machine is about to be taken away, in a thread of its own.

    On a machine that is none of Google's it does nothing.
    """

    def __init__(self, ask: Callable[[str], None]):
        """Begin to ask.

        Args:
          ask: is called once, in the thread, with what asks for a stop.
        """
        self._ask = ask
        self._closed = threading.Event()
        self._server = metadata_server()
        if self._server:
            threading.Thread(target=self._watch, daemon=True, name="machine notice").start()

    def close(self) -> None:
        """Ask no more; a question that is under way has no effect."""
        self._closed.set()

    def _watch(self) -> None:
        # a proxy for the internet knows nothing of the machine's own server
        opener = build_opener(ProxyHandler({}))
        failures = 0
        seen = ""
        while not self._closed.is_set():
            try:
                preempted, seen = self._look(opener, seen)
            except (OSError, HTTPException) as error:
                failures += 1
                if failures == _FAILURES:
                    logging.getLogger(__name__).warning(
                        "the metadata server %s does not answer (%s): only a signal says when this "
                        "machine is taken away",
                        self._server,
                        error,
                    )
                self._closed.wait(_PATIENCE)
                continue
            failures = 0
            if preempted and not self._closed.is_set():
                self._ask("the machine's notice that it is taken away")
                return

    def _look(self, opener: OpenerDirector, seen: str) -> tuple[bool, str]:
        """Ask once; after the first time the server waits for a change before it answers.

        Args:
          opener: what opens the address.
          seen: the mark of the last answer; empty = there was none.

        Returns:
          Whether the machine is about to be taken away, and the mark of this answer.
        """
        address = f"http://{self._server}/computeMetadata/v1/instance/preempted"
        if seen:
            address += f"?wait_for_change=true&timeout_sec={_LONGEST_WAIT}&last_etag={seen}"
        request = Request(address, headers={"Metadata-Flavor": "Google"})
        with opener.open(request, timeout=2 * _LONGEST_WAIT) as answer:
            said = answer.read(64).decode("ascii", errors="replace")
            mark = answer.headers.get("ETag", "")
        if not mark:
            self._closed.wait(_PATIENCE)  # it cannot wait for a change
        return said.strip().upper() == "TRUE", mark
