"""What one chip can do and how it is wired, TOML data; mesh presets and targets name these
files.
"""
