"""Mesh and hardware presets, TOML data: `jaxpar meshes` lists them. What one chip can do is in
`chips`, and what the machines of clouds add to it in `machines`.
"""
