"""A run on a disk or in a bucket. To be read in this order: the run folder and its config
(`run_folder`); which steps it has, and what damage is (`steps`, `manifest`); checkpoints
(`val_losses`, `disk_space`, `in_use`); one training at a time (`run_lock`); runs in buckets
(`bucket_runs`); and what lies beside the checkpoints (`run_identity`, `own_tokenizer`,
`template_date`, `list_checkpoints`).
"""
