"""Rows of invented measurements, as a CSV file has them."""

from __future__ import annotations

import csv
import io
from typing import Any

from jaxpar.bench.foresight.rows import PublishedRow, parse_rows

LLAMA = {
    "name": "llama3.1-8b-v6e-8",
    "chip": "v6e",
    "chips": 8,
    "slices": 1,
    "model": "llama3.1-8b",
    "layers": 32,
    "embed": 4096,
    "heads": 32,
    "kv_heads": 8,
    "head_dim": 128,
    "mlp": 14336,
    "vocab": 128256,
    "seq_len": 8192,
    "per_device_batch_size": 3,
    "global_batch_seqs": 24,
    "remat_policy": "custom",
    "attention": "flash",
    "quantization": "none",
    "measured_step_seconds": 3.4,
    "maxtext_keys": "ici_fsdp_parallelism=-1 decoder_layer_input=offload query_proj=device",
}


def text_of(*rows: dict[str, Any]) -> str:
    """A CSV file of rows of the form of `LLAMA`."""
    file = io.StringIO()
    columns = list(dict.fromkeys(key for row in rows for key in row))
    writer = csv.DictWriter(file, columns)
    writer.writeheader()
    writer.writerows(rows)
    return file.getvalue()


def row_of(**changes: Any) -> PublishedRow:
    """`LLAMA` with some cells changed, as it is read."""
    (row,) = parse_rows(text_of(LLAMA | changes), "FILE.csv")
    return row
