"""Who has a run, said by files that all see who see the run folder. To be read in this order: which
checkpoints are being read, so that a training does not remove them (`in_use`), and which process
trains, one at a time (`run_lock`).
"""
