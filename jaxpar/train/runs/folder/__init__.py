"""What lies in a run folder, a file or a folder at a time. To be read in this order: what Orbax
calls its files (`orbax_names`); the manifest of a checkpoint (`manifest`), by which a damaged one
is told from a whole one; which steps there are (`steps`), and the validation loss of each
(`val_losses`); the config, and which of its changes a run may go on with (`run_folder`); and what a
run has to find again, its data and tokenizer (`run_identity`, `own_tokenizer`) and the date that it
calls today's (`template_date`).
"""
