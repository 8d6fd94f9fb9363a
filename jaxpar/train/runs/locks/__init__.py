"""Locks and marks by which processes share a run, as files that all see who see the run folder.
Read the modules in this order: which checkpoints are being read, so that a training does not remove
them (`in_use`), and which process trains, one at a time (`run_lock`).
"""
