"""A run on a disk or in a bucket. Three folders are read first: `folder`, what lies in a run
folder, `bucket`, the copy of a run in a bucket, and `locks`, who trains it and who reads it. On
them stand the stores, which keep the steps of a run (`stores`). Then, in this order: what Orbax is
given (`orbax_options`); the checkpoints as they are read, and the newest that is whole
(`checkpoints`); those of a run in a table (`list_checkpoints`); and as a training writes them
(`training_checkpoints`). Last of all the folder `local_tier`: checkpoints in a second tier, on the
disks of the machines.
"""
