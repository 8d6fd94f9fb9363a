"""What everything stands on: errors, the console, configs, meshes, sharding rules, hardware,
private JAX.

`sharding` and `mesh` are the core: logical axes, the rules that map them to mesh axes, and
`Layout`. `plan` adds how a model of ours runs. `config` is the schema of an experiment and `toml`
its file. `runtime` starts JAX. `hardware` has the figures of chips. `jax_compat` is the only place
for names of JAX that are not public. This wing imports jax, numpy, rich and the standard library
only.
"""
