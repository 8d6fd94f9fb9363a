"""One long stream of token ids, and what it lies in. To be read in this order: files of ids that
are mapped into memory (`mapped`), and what such a file says of itself (`id_files`); the stream, and
the windows that are cut from it (`tokens`); texts (`texts`) and files of tokens (`token_files`)
that become one; and the copies of what lies in buckets (`urls`).
"""
