"""Documents that the processes of a run tokenize together: each block of them by one process.

All processes take the same documents in the same order. A block is so many of them that follow one
another, and block k belongs to process k mod N, which tokenizes it ahead of time and gives it to
the others. They all learn how long its documents are, as the places of later rows depend on that,
and fetch its ids where they hold rows of it.

A block that is not to be had in time is tokenized by the process that needs it: what comes of it
is the same. So a peer that is late, or that has left, costs work and never a batch.

Shapes: n documents of a block, N tokens of a block, T tokens of a row.
"""

from __future__ import annotations

import hashlib
import json
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxpar.base.errors import UserError
from jaxpar.base.process.kv_store import Exchange

BLOCK = 32
"""The number of documents of a block."""
_AHEAD = 2
"""The number of blocks that each process makes ahead of those that are read."""
_PLACES = 2**28
"""A number above the tokens of any block: the address of a token is its block times this, plus its
place.
"""
_POLL_SECONDS = 1.0
_PATIENCE_SECONDS = 10.0
_LONG_PATIENCE_SECONDS = 600.0
"""The seconds that a process waits for a block that its process has not begun
(`_PATIENCE_SECONDS`), and for one that it has begun.
"""


@dataclass
class Block:
    """A block of documents, each known by its length."""

    counts: np.ndarray
    """The tokens of each document: int64 [n]."""
    reasons: Sequence[str]
    """The reason why each document is no text [n]; empty = it is text."""
    dtype: str
    """The dtype in which its ids are sent."""
    ids: np.ndarray | None = None
    """The ids, int32 [N]; None = another process has them."""

    def addresses(self, number: int, place: int) -> np.ndarray:
        """Return the addresses of a document's tokens: int64 [its tokens].

        Args:
          number: the number of this block.
          place: the place of the document in it.
        """
        begin = number * _PLACES + int(self.counts[:place].sum())
        return np.arange(begin, begin + int(self.counts[place]), dtype=np.int64)


class Blocks:
    """The blocks of one order of documents. Threads that read ahead share it."""

    def __init__(
        self,
        exchange: Exchange,
        encode: Callable[[Any], tuple[np.ndarray, str]],
        threads: int,
    ):
        """Make blocks of nothing; `begin` gives them their documents.

        Args:
          exchange: the processes that share the work.
          encode: makes ids [n] of a document, and says why it is no text, if it is none.
          threads: how many blocks this process makes at once.
        """
        self.ahead = _AHEAD * exchange.count
        """How many blocks must be under way for every process to have work."""
        self._exchange = exchange
        self._encode = encode
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="documents")
        self._lock = threading.Lock()
        self.begin("", lambda number: (), 0)

    def begin(self, name: str, documents: Callable[[int], Sequence[Any]], total: int) -> None:
        """Begin an order of documents.

        Args:
          name: a name of the order that all processes have, and no other order.
          documents: gives the documents of a block by its number, as long as it is not released.
          total: the number of blocks that may be made before they are asked for; 0 = those offered.
        """
        with self._lock:
            self._name = f"jaxpar/documents/{name}"
            self._documents = documents
            self._total = total
            self._known = dict[int, Future[Block]]()
            self._given = set[int]()
            self._released: int | None = None
            self._told = 0

    def offer(self, number: int) -> None:
        """Begin to make a block, if this process has to make it."""
        if number % self._exchange.count != self._exchange.index:
            return
        with self._lock:
            if number not in self._known:
                self._given.add(number)
                made = self._pool.submit(self._give, self._name, number, self._documents)
                self._known[number] = made

    def make_here(self, number: int) -> None:
        """Make a block in this process alone, after an error in the middle of reading it."""
        with self._lock:
            self._known[number] = self._pool.submit(self._make, self._documents(number))

    @property
    def released(self) -> int:
        """The number of the first block that this process still needs."""
        return self._released or 0

    def block(self, number: int) -> Block:
        """Return a block, at first without its ids where another process makes it.

        Raises:
          UserError: another process has read other documents.
        """
        self._arrive(number)
        for later in range(number, min(number + self.ahead, self._total)):
            self.offer(later)
        with self._lock:
            found = self._known.get(number)
            here = found is None
            if found is None:
                found = self._known[number] = Future()
        if here:
            try:
                found.set_result(self._receive(number))
            except Exception as error:  # told to every thread that waits
                found.set_exception(error)
        return found.result()

    def read(self, addresses_T: np.ndarray) -> np.ndarray:
        """Read the ids of tokens, int32 [T], by their addresses, int64 [T]."""
        numbers_T, places_T = np.divmod(addresses_T, _PLACES)
        ids_T = np.zeros(len(addresses_T), np.int32)
        for number in np.unique(numbers_T):
            those = numbers_T == number
            ids_T[those] = self._ids(int(number))[places_T[those]]
        return ids_T

    def release(self, address: int) -> None:
        """Say that this process needs no token before this address any more."""
        number = address // _PLACES
        with self._lock:
            self._released = number
            for old in [known for known in self._known if known < number]:
                del self._known[old]
        if number >= self._told + self._exchange.count:
            self._tell(number)
            self._remove_passed()

    def _arrive(self, number: int) -> None:
        """Tell the other processes where this process reads, if it reads elsewhere than before."""
        with self._lock:
            elsewhere = self._released is None or number < self._released
            if elsewhere:
                self._released = number
        if elsewhere:
            self._tell(number)
            self._say_gone(number)

    def _tell(self, number: int) -> None:
        self._told = number
        self._exchange.put(f"{self._name}/at/{self._exchange.index}", str(number).encode())

    def _say_gone(self, number: int) -> None:
        """Tell the other processes before which number this process gives no block any more."""
        self._exchange.put(f"{self._name}/gone/{self._exchange.index}", str(number).encode())

    def _remove_passed(self) -> None:
        """Remove the blocks that every process has passed, so that the first one keeps few."""
        places = self._exchange.below(f"{self._name}/at/")
        if len(places) < self._exchange.count:
            return
        lowest = min(int(place) for place in places.values())
        with self._lock:
            passed = [number for number in self._given if number < lowest]
            self._given.difference_update(passed)
        if passed:
            self._say_gone(lowest)
        for number in passed:
            self._exchange.remove(f"{self._name}/{number}/")

    def _ids(self, number: int) -> np.ndarray:
        """Return the ids [N] of a block."""
        block = self.block(number)
        if block.ids is None:
            sent = self._exchange.get(f"{self._name}/{number}/ids")
            if sent is None:
                block.ids = self._make(self._documents(number)).ids
            else:
                block.ids = np.frombuffer(sent, block.dtype).astype(np.int32)
        assert block.ids is not None
        return block.ids

    def _make(self, documents: Sequence[Any]) -> Block:
        """Tokenize the documents of a block."""
        found = [self._encode(document) for document in documents]
        counts = np.array([len(ids) for ids, _ in found], np.int64)
        ids = np.concatenate([np.zeros(0, np.int32), *(ids for ids, _ in found)])
        if len(ids) >= _PLACES:
            raise UserError(
                f"{len(documents)} documents that follow one another have {len(ids):,} tokens: "
                f"split those that are longer than {_PLACES // BLOCK:,}"
            )
        dtype = "<u2" if ids.max(initial=0) < 2**16 else "<i4"
        return Block(counts, [reason for _, reason in found], dtype, ids)

    def _give(self, name: str, number: int, documents: Callable[[int], Sequence[Any]]) -> Block:
        """Make a block in a thread of its own, and give it to the other processes."""
        at = f"{name}/{number}"
        self._exchange.put(f"{at}/begun", b"1")
        found = documents(number)
        try:
            block = self._make(found)
        except Exception:
            # each of the others meets the same error, and need not wait for it
            self._exchange.put(f"{at}/head", b"null")
            raise
        assert block.ids is not None
        head = {
            "counts": block.counts.tolist(),
            "reasons": {place: said for place, said in enumerate(block.reasons) if said},
            "dtype": block.dtype,
            "documents": _fingerprint(found),
        }
        self._exchange.put(f"{at}/ids", block.ids.astype(block.dtype).tobytes())
        self._exchange.put(f"{at}/head", json.dumps(head).encode())
        return block

    def _receive(self, number: int) -> Block:
        """Get the lengths of another process's block, or make the block here where it is late."""
        sent = self._wait_for(number)
        head = None if sent is None else json.loads(sent)
        if head is None:
            return self._make(self._documents(number))
        if self._total == 0 and head["documents"] != _fingerprint(self._documents(number)):
            raise UserError(
                f"process {number % self._exchange.count} reads other documents than this one: "
                "all machines must see the same files at data.path and data.val_path"
            )
        counts = np.array(head["counts"], np.int64)
        reasons = [head["reasons"].get(str(place), "") for place in range(len(counts))]
        return Block(counts, reasons, head["dtype"])

    def _wait_for(self, number: int) -> bytes | None:
        """Wait for what another process says of its block; None = it is late, or has no such
        block.
        """
        at = f"{self._name}/{number}"
        gone = f"{self._name}/gone/{number % self._exchange.count}"
        began = time.monotonic()
        patience = _PATIENCE_SECONDS
        while time.monotonic() - began < patience:
            asked = time.monotonic()
            sent = self._exchange.get(f"{at}/head", _POLL_SECONDS)
            if sent is not None:
                return sent
            if int(self._exchange.get(gone) or 0) > number:
                return None
            if self._exchange.get(f"{at}/begun") is not None:
                patience = _LONG_PATIENCE_SECONDS
            # a service that is gone answers at once
            time.sleep(max(0.0, _POLL_SECONDS / 2 - (time.monotonic() - asked)))
        return None


def _fingerprint(documents: Sequence[Any]) -> str:
    """Hash documents as they were read."""
    return hashlib.blake2b(repr(documents).encode(errors="replace"), digest_size=16).hexdigest()


class UnreadRow:
    """A row whose tokens are addresses, until the process that holds it reads it."""

    def __init__(
        self,
        blocks: Blocks,
        packed: dict[str, np.ndarray],
        finish: Callable[[dict[str, np.ndarray]], dict[str, np.ndarray]],
    ):
        """Keep a row.

        Args:
          blocks: the blocks that its tokens are in.
          packed: its addresses `tokens` [T], and `tokens_segment_ids` [T], which are 0 where it is
            filled up, with whatever else `finish` takes.
          finish: makes the finished row, once ids stand in place of addresses.
        """
        self._blocks = blocks
        self._packed = packed
        self._finish = finish

    def read(self) -> dict[str, np.ndarray]:
        """Read the ids of the row, and return it with arrays [S]."""
        filled_T = self._packed["tokens_segment_ids"] != 0
        ids_T = np.zeros(len(filled_T), np.int32)
        ids_T[filled_T] = self._blocks.read(self._packed["tokens"][filled_T])
        return self._finish(self._packed | {"tokens": ids_T})

    def release(self) -> None:
        """Say that this row and all before it are not needed any more."""
        filled_T = self._packed["tokens_segment_ids"] != 0
        self._blocks.release(int(self._packed["tokens"][filled_T][-1]))


UNREAD = "unread"
"""The name of `UnreadRow`s in what stands for a row or a batch of them."""
