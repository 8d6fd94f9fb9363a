"""What everything stands on, from the ground up. This wing imports jax, numpy, rich and the
standard library only, and in `storage` alone filelock, fsspec and huggingface_hub too.

Plain things come first: `errors` and `console` speak to the user; `field_marks` is what a schema
says of its settings; `number_checks`, `ranges`, `durations` and `key_aliases` judge what a user
gives; `toml` reads and writes files of settings, `old_keys` those of earlier versions; `registry`
has what is chosen by a name. `atomic_write` writes files, `checksum_line` gives a text a checksum,
`storage` opens URLs, `machine` says what this machine has, and `version` which jaxpar this is.

`prices` says what programs reach of a chip, `hardware` has the figures of chips, `machine_types`
those of the machines that GPUs come in, `compiler` and `compiled_for` what XLA is told, and
`default_options` asks the compiler at hand what it takes of that. `jax_compat` is the only place
for names of JAX that are not public, `jax_settings` refuses settings of JAX that no step runs with,
`tested_versions` says which versions CI has seen, and `batch_arrays` names the arrays in which a
batch has a teacher's answers. `kernel_work` says what a kernel computes that a program only
calls, and `taken_share` how often a branch of a program is taken.

The folders are read after these: `layout` (logical axes, the rules that map them to mesh axes, and
`Layout`), `config` (the schema of an experiment) and `process` (how JAX starts, and how processes
stop together).
"""
