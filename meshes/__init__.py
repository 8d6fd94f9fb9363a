"""Mesh and hardware presets, TOML data: `jaxpar meshes` lists them."""
