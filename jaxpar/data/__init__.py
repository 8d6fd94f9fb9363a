"""Data: text, token files, data sets and conversations as batches that are the same on any number
of processes.

    corpus = data.load_corpus(config.data, config.model.vocab_size)
    batches = data.train_batches(corpus.train, config.data, batch, rows, config.model.vocab_size)

The iterator's state is a small dict, from which a resumed run reads on exactly where it was.
"""

from jaxpar.data.corpus import Corpus, load_corpus, train_batches, val_batches
from jaxpar.data.tokenizer import load_tokenizer

__all__ = ["Corpus", "load_corpus", "load_tokenizer", "train_batches", "val_batches"]
