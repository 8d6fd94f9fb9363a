"""A run on a disk or in a bucket. To be read in this order: the run folder and its config
(`run_folder`); which steps it has, and what damage is (`steps`, `manifest`); a run in a bucket
(`bucket_runs`, `bucket_layout`, `bucket_copy`, `bucket_sender`); its checkpoints, as they are read
(`checkpoints`, `val_losses`) and as a training writes them (`training_checkpoints`,
`orbax_options`, `newest_whole`, `disk_space`, `in_use`); one training at a time (`run_lock`); and
what lies beside the checkpoints (`run_identity`, `own_tokenizer`, `template_date`,
`list_checkpoints`).
"""
