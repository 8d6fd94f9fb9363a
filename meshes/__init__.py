"""Mesh and hardware presets, TOML data: `jaxpar meshes` lists them. What one chip can do is in
`chips`.
"""
