"""A process that reads documents of a config: run by test_documents_together.py.

    documents_worker.py JSON

The JSON says the config of the data, how many batches to read, where the states are kept, whose
rows of a batch each process reads, and whether the validation data are read.
"""

import json
import sys
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np

from jaxpar.base.config import DataConfig
from jaxpar.base.process.kv_store import open_kv_store
from jaxpar.data.corpus import load_corpus, train_batches, val_batches
from jaxpar.data.documents import tokenized
from jaxpar.data.mixture import skipped_records

BATCH = 8
VOCABULARY = 256


def main() -> None:
    asked = json.loads(sys.argv[1])
    jax.config.update("jax_platforms", "cpu")
    count = asked["processes"]
    index = asked["index"]
    if count > 1:
        jax.distributed.initialize(asked["address"], count, index)
    data = DataConfig(
        **{k: tuple(v) if isinstance(v, list) else v for k, v in asked["data"].items()}
    )
    corpus = load_corpus(data, VOCABULARY)
    ids_made = [0]
    encode = tokenized.encode_document

    def counted(text: str, tokenizer: object) -> np.ndarray:
        ids = encode(text, tokenizer)
        ids_made[0] += len(ids)
        return ids

    tokenized.encode_document = counted
    rows = list(np.array_split(np.arange(BATCH), count)[index])
    found = list[dict[str, np.ndarray]]()
    states = []
    data = replace(data, prefetch=asked["prefetch"])
    if asked["validation"]:
        found += val_batches(corpus.val, data, BATCH, rows, VOCABULARY)
    else:
        batches = train_batches(corpus.train, data, BATCH, rows, VOCABULARY)
        if asked["state"]:
            batches.set_state(asked["state"])
        for _ in range(asked["batches"]):
            states.append(batches.get_state())
            found.append(next(batches))
        states.append(batches.get_state())
    store = open_kv_store()
    kept = {} if store is None else store.below("jaxpar/documents/")
    told = {
        "kept": sum(name.endswith("/head") for name in kept),
        "tokenized": ids_made[0],
        "skipped": [count.count for count in skipped_records(corpus.train)],
        "states": states,
    }
    out = Path(asked["out"])
    np.savez(
        out / f"{index}.npz",
        **{f"{i}/{name}": array for i, one in enumerate(found) for name, array in one.items()},
    )
    (out / f"{index}.json").write_text(json.dumps(told))


main()
