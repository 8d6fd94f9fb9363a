"""A run on a disk or in a bucket. Read three folders first: `folder`, the files of a run folder,
`bucket`, the copy of a run in a bucket, and `locks`, which say who trains it and who reads it. On
them stand the stores, which keep the steps of a run (`stores`). Then, in this order: the options of
Orbax (`orbax_options`); the checkpoints as they are read, and the newest that is whole
(`checkpoints`); the table of a run's checkpoints (`list_checkpoints`); and the checkpoints as a
training writes them (`training_checkpoints`). Last of all checkpoints in a second tier, on the
disks of the machines (`local_tier`).
"""
