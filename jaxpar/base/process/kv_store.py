"""Bytes that the processes of a run give each other by name, at any time and from any thread.

They pass through JAX's coordination service, which every process has joined. A collective would
need all processes to come to it in one order, which threads that read ahead do not.
"""

from __future__ import annotations

from typing import Any

import jax

from jaxpar.base import jax_compat


class Exchange:
    """Names with bytes, the same for all processes of a run.

    What fails here fails quietly: a process that others do not hear from does its work alone.
    """

    def __init__(self, client: Any, index: int, count: int):
        self._client = client
        self.index = index
        """The number of this process."""
        self.count = count
        """How many processes there are."""

    def put(self, name: str, value: bytes) -> None:
        """Give bytes a name, in place of those that had it.

        Args:
          name: the name, with `/` between its parts.
          value: the bytes; a few MiB at most, as they are kept by the first process.
        """
        try:
            self._client.key_value_set_bytes(name, value, allow_overwrite=True)
        except jax.errors.JaxRuntimeError:
            return

    def get(self, name: str, seconds: float = 0.0) -> bytes | None:
        """Return the bytes of a name.

        Args:
          seconds: how long to wait for another process to give it; 0 = not at all.

        Returns:
          The bytes; None where no process has given them in time.
        """
        try:
            if seconds:
                milliseconds = max(int(seconds * 1000), 1)
                return self._client.blocking_key_value_get_bytes(name, milliseconds)
            return self._client.key_value_try_get_bytes(name)
        except jax.errors.JaxRuntimeError:
            return None

    def below(self, folder: str) -> dict[str, bytes]:
        """Return what has a name below `folder`, which ends with `/`: by the rest of its name."""
        try:
            found = self._client.key_value_dir_get_bytes(folder)
        except jax.errors.JaxRuntimeError:
            return {}
        return {name.rpartition(folder)[2]: value for name, value in found}

    def remove(self, folder: str) -> None:
        """Remove every name below `folder`, which ends with `/`."""
        try:
            self._client.key_value_delete(folder)
        except jax.errors.JaxRuntimeError:
            return


def open_exchange() -> Exchange | None:
    """Open the exchange of this run.

    Returns:
      It; None where this process is alone, or jax has no such service any more.
    """
    if jax.process_count() == 1:
        return None
    client = jax_compat.coordination_client()
    if client is None:
        return None
    return Exchange(client, jax.process_index(), jax.process_count())
