"""Documents in an order that a checkpoint finds again: read as a stream, packed into rows, and
tokenized by all processes of a run together.
"""

from __future__ import annotations

import hashlib
import json
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import grain
import grain.experimental
import jax
import numpy as np

from jaxpar.base.console import console
from jaxpar.base.errors import UserError
from jaxpar.data.documents.blocks import BLOCK, Blocks
from jaxpar.data.documents.data_set_files import unread_file


@contextmanager
def reading_source(path: str, source: str) -> Iterator[None]:
    """Turn whatever kept documents from being read into a UserError of one line."""
    try:
        yield
    except ImportError as error:
        raise UserError(
            f"data.source={source} needs the {error.name} package: pip install 'jaxpar[data]'"
        ) from error
    except (UserError, StopIteration):
        raise
    except Exception as error:
        error = _cause(error)
        if isinstance(error, UserError):
            raise error from None
        said = (str(error).strip() or type(error).__name__).splitlines()[0]
        place = unread_file.take() or path
        raise UserError(f"cannot read {place} as data.source={source}: {said}") from error


def _cause(error: BaseException) -> BaseException:
    """Find what kept `datasets` from making a data set; it says only that something did."""
    while type(error).__name__ == "DatasetGenerationError" and error.__cause__ is not None:
        error = error.__cause__
    return error


class DocumentStream(grain.IterDataset):
    """A stream of a Hugging Face data set, once or in endless epochs, which keeps its position
    itself.
    """

    def __init__(
        self,
        opened: Callable[[], Any],
        origin: str,
        kind: str,
        endless: bool,
    ):
        super().__init__()
        self.opened = opened
        self.origin = origin
        self.kind = kind
        self.endless = endless

    def __iter__(self) -> grain.DatasetIterator:
        return _DocumentIterator(self)


class _DocumentIterator(grain.DatasetIterator):
    def __init__(self, stream: DocumentStream):
        super().__init__()
        self._stream = stream
        self._begin(0)

    def _begin(self, epoch: int) -> None:
        self._epoch, self._source, self._running = epoch, self._stream.opened(), None

    def __next__(self) -> Any:
        stream = self._stream
        with reading_source(stream.origin, stream.kind):
            while True:
                try:
                    self._running = self._running or iter(self._source)
                    return next(self._running)
                except StopIteration:
                    if not stream.endless:
                        raise
                    self._begin(self._epoch + 1)
                    if jax.process_index() == 0:
                        console().print(
                            f"{stream.origin} is read to its end: epoch {self._epoch + 1} begins"
                        )

    def get_state(self) -> dict[str, Any]:
        return {"epoch": self._epoch, "source": self._source.state_dict()}

    def set_state(self, state: dict[str, Any]) -> None:
        self._begin(state["epoch"])
        self._source.load_state_dict(state["source"])


class Packed(grain.experimental.ConcatThenSplitIterDataset):
    """Grain's packing, with a state that survives JSON: grain compares tuples, and JSON gives lists
    (seen in 0.2.18).
    """

    def __iter__(self) -> grain.DatasetIterator:
        made = super().__iter__()
        restore = made.set_state

        def set_state(state: dict[str, Any]) -> None:
            slices = {name: tuple(place) for name, place in state["remainder_slices"].items()}
            restore(state | {"remainder_slices": slices})

        made.set_state = set_state
        return made


Count = Callable[[str], None]


def together(ordered: grain.MapDataset, blocks: Blocks, name: str, count: Count) -> Any:
    """Tokenize documents in random access together with the other processes.

    Args:
      ordered: the documents in their order.
      blocks: the blocks that the processes share.
      name: a name of this order.
      count: is told of each document in turn why it is no text, or nothing.

    Returns:
      A `grain.MapDataset` of the documents, each as `{"tokens": addresses}`; this process reads
      only those of its own blocks.
    """
    total = len(ordered)

    def documents(number: int) -> list[Any]:
        first = number * BLOCK
        return [ordered[place] for place in range(first, min(first + BLOCK, total))]

    blocks.begin(name, documents, -(-total // BLOCK))

    def addresses(index: int) -> dict[str, np.ndarray]:
        number, place = divmod(index, BLOCK)
        block = blocks.block(number)
        count(block.reasons[place])
        return {"tokens": block.addresses(number, place)}

    return grain.MapDataset.range(total).map(addresses)


class StreamTogether(grain.IterDataset):
    """A stream that every process reads, and that all tokenize together; its state is the
    stream's.
    """

    def __init__(self, stream: grain.IterDataset, blocks: Blocks, name: str, count: Count):
        super().__init__(stream)
        self.blocks = blocks
        self.name = name
        self.count = count

    def __iter__(self) -> grain.DatasetIterator:
        return _TogetherIterator(iter(self._parent), self)


class _Read(NamedTuple):
    """A document that was read ahead."""

    number: int
    place: int
    """The place of the document in its block, whose number is `number`."""
    state: dict[str, Any]
    """The state of the stream after the document."""


class _TogetherIterator(grain.DatasetIterator):
    def __init__(self, parent: grain.DatasetIterator, stream: StreamTogether):
        super().__init__(parent)
        self._stream = stream
        self._begun = False

    def _begin(self) -> None:
        """Begin blocks where the stream is now."""
        self._begun = True
        self._state = self._parent.get_state()
        self._queue = deque[_Read]()
        self._ending: Exception | None = None
        self._documents = dict[int, Sequence[Any]]()
        self._next_block = 0
        where = json.dumps(self._state, sort_keys=True, default=str)
        place = hashlib.blake2b(where.encode(), digest_size=8).hexdigest()
        documents = self._documents
        self._stream.blocks.begin(f"{self._stream.name}/{place}", documents.__getitem__, 0)

    def _read_block(self) -> None:
        """Read the documents of one more block ahead."""
        number = self._next_block
        found = []
        while len(found) < BLOCK and self._ending is None:
            try:
                found.append(next(self._parent))
                read = _Read(number, len(found) - 1, self._parent.get_state())
                self._queue.append(read)
            except Exception as error:  # raised when it is come to, as without reading ahead
                self._ending = error
        if found:
            self._documents[number] = found
            self._next_block += 1
            if self._ending is None or isinstance(self._ending, StopIteration):
                self._stream.blocks.offer(number)
            else:
                self._stream.blocks.make_here(number)

    def __next__(self) -> dict[str, np.ndarray]:
        if not self._begun:
            self._begin()
        blocks = self._stream.blocks
        at = self._queue[0].number if self._queue else self._next_block
        while self._ending is None and self._next_block < at + blocks.ahead:
            self._read_block()
        if not self._queue:
            assert self._ending is not None
            raise self._ending
        read = self._queue.popleft()
        block = blocks.block(read.number)
        self._stream.count(block.reasons[read.place])
        self._state = read.state
        for old in [known for known in self._documents if known < blocks.released]:
            del self._documents[old]
        return {"tokens": block.addresses(read.number, read.place)}

    def get_state(self) -> dict[str, Any]:
        return self._state if self._begun else self._parent.get_state()

    def set_state(self, state: dict[str, Any]) -> None:
        self._parent.set_state(state)
        self._begun = False
