"""Sources of data are registered, a program's like ours, and a config is checked by what they say
of themselves.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import grain
import numpy as np
import pytest

from jaxpar.base.config import Config, DataConfig, override
from jaxpar.base.config.checks import check
from jaxpar.base.config.unused_settings import idle_keys
from jaxpar.base.errors import UserError
from jaxpar.base.registry import SOURCES
from jaxpar.data.corpus import load_corpus, train_batches, val_batches
from jaxpar.data.identity import identify
from jaxpar.data.part import PartDefaults
from jaxpar.data.sources import register_source
from jaxpar.data.streams.tokens import Tokens


@dataclass(frozen=True)
class Counting(PartDefaults):
    """A part of a class of one's own: row i counts up from i."""

    origin: str

    @property
    def size(self) -> int:
        return 8

    @property
    def sample(self) -> np.ndarray:
        return np.arange(8)

    @property
    def amount(self) -> str:
        return "8 rows"

    def rows(self, data: DataConfig, seed: int, endless: bool) -> Any:
        order = grain.MapDataset.range(8)
        if endless:
            order = order.seed(seed).shuffle().repeat()

        def row(i: int) -> dict[str, np.ndarray]:
            tokens = i + np.arange(data.seq_len, dtype=np.int32)
            return {"tokens": tokens, "labels": tokens + 1}

        return order.map(row).to_iter_dataset()


@pytest.fixture
def own() -> Iterator[None]:
    """Two sources of one's own: ids of a function, and rows of a class."""

    @register_source("squares", reads={"path", "stride"}, holds_out=True, has_tokenizer=True)
    def squares(paths: Sequence[str], data: DataConfig, vocab_size: int) -> Any:
        ids = (np.arange(100) ** 2 % vocab_size).astype(np.uint16)
        return [Tokens(ids, None, path) for path in paths], None

    @register_source("counting", reads=())
    def counting(paths: Sequence[str], data: DataConfig, vocab_size: int) -> Any:
        return [Counting("counting") for _ in paths], None

    yield
    SOURCES.remove("squares")
    SOURCES.remove("counting")


def test_a_source_of_ones_own_is_read_and_held_out_like_ours(own: None) -> None:
    data = DataConfig(source="squares", path="here", seq_len=8, val_fraction=0.2, prefetch=0)
    corpus = load_corpus(data, 50)
    assert corpus.val is not None and corpus.val.size == 20
    batch = next(train_batches(corpus.train, data, 2, [0, 1], 50))
    np.testing.assert_array_equal(batch["labels"][:, :-1], batch["tokens"][:, 1:])
    with pytest.raises(UserError, match=r"data.source=squares needs data.path"):
        load_corpus(DataConfig(source="squares", seq_len=8), 50)


def test_a_part_of_a_class_of_ones_own_makes_batches(own: None) -> None:
    data = DataConfig(source="counting", seq_len=4, prefetch=0)
    corpus = load_corpus(data, 50)
    batches = train_batches(corpus.train, data, 8, range(8), 50)
    assert sorted(next(batches)["tokens"][:, 0]) == list(range(8))
    (found,) = val_batches(corpus.train, data, 8, range(8), 50)  # pyright: ignore[reportArgumentType]
    np.testing.assert_array_equal(found["labels"][3], [4, 5, 6, 7])
    assert [piece.length for piece in identify(corpus)] == [8]
    with pytest.raises(UserError, match=r"counting has 8 training tokens, .*try data.seq_len=7"):
        load_corpus(DataConfig(source="counting", seq_len=8), 50)


def test_a_mixture_of_tokens_and_of_rows_is_refused() -> None:
    @register_source("both")
    def both(paths: Sequence[str], data: DataConfig, vocab_size: int) -> Any:
        return [Tokens(np.arange(100, dtype=np.uint16), None, paths[0]), Counting(paths[1])], None

    data = DataConfig(source="both", mixture=("ids 0.5", "talks 0.5"), seq_len=4)
    try:
        with pytest.raises(UserError, match="Tokens, talks as Counting"):
            load_corpus(data, 100)
    finally:
        SOURCES.remove("both")


def test_a_config_is_checked_by_what_is_registered(own: None) -> None:
    check(override(Config(), {"data.source": "squares", "data.path": "here"}))
    with pytest.raises(
        UserError, match=r"data.source is one of stdlib, .*, squares, counting, fou"
    ):
        check(override(Config(), {"data.source": "square"}))
    changes = {"data.source": "counting", "data.stride": 3, "data.column": "body"}
    idle = dict(idle_keys(override(Config(), changes)))
    assert re.search(r": it is for data.source stdlib, text, .*squares$", idle["data.stride"])
    assert re.search(r": it is for data.source hf, parquet(, |$)", idle["data.column"])
    changes = {"data.source": "squares", "data.stride": 3}
    assert "data.stride" not in dict(idle_keys(override(Config(), changes)))


@pytest.mark.slow
def test_a_config_is_checked_without_what_reads_data() -> None:
    """A command that reads none starts without grain."""
    code = (
        "import sys; from jaxpar import Config, check; check(Config()); "
        "assert 'jaxpar.data.sources' in sys.modules and 'grain' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
