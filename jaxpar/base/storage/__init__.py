"""Access to paths that are URLs: `s3://`, `gs://` and whatever else fsspec reaches.

Everything else in the library reads and writes folders of this machine. Files in a bucket are
copied here first, and files that are made here are sent there:

- `local_path(path)` turns a path that a user gave, local or a URL, into one of this machine. Of a
  URL it is a copy, in a cache that is bounded and shared, and is refreshed by each call: for data,
  tokenizers and Hugging Face folders (`copies`).
- `Bucket` reads, lists, writes and removes the objects below a URL (`bucket`). What fails for a
  while is tried again (`outages`).
- `hub` fetches models and tokenizers of the Hugging Face Hub by their names.
- A `UserError` and the console name such copies by their URLs (`errors.with_urls`).

`jaxpar.train.runs.bucket` keeps run folders in buckets, and `jaxpar.data.range_cache` reads
token files by range. A path that is only ever local is refused by `errors.require_local`.
"""

from jaxpar.base.storage.bucket import Bucket, Found, as_url
from jaxpar.base.storage.copies import local_path
from jaxpar.base.storage.outages import say

__all__ = ["Bucket", "Found", "as_url", "local_path", "say"]
