"""The files of a run folder. Read the modules in this order: the names of Orbax's files
(`orbax_names`); the manifest of a checkpoint (`manifest`), by which a damaged one is told from a
whole one; which steps there are (`steps`), and the validation loss of each (`val_losses`); the
config, and which of its changes a run may be resumed with (`run_folder`); and what a run has to
find again, its data and tokenizer (`run_identity`, `own_tokenizer`).
"""
