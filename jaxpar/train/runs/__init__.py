"""A run on a disk or in a bucket. Two folders are read first: `folder`, what lies in a run folder,
and `bucket`, the copy of a run in a bucket. Then, in this order: the checkpoints as they are read
(`checkpoints`), and in a table (`list_checkpoints`); as a training writes them, by Orbax's options
(`orbax_options`), with room on the disk (`disk_space`), past those that are being read (`in_use`),
after the newest that is whole (`newest_whole`), all of it together (`training_checkpoints`); one
training at a time (`run_lock`), when each of them started (`starts`), and checkpoints in a second
tier, on the disks of the machines (`local_tier`).
"""
