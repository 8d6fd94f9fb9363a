"""Types of GPU machines that clouds and makers sell: their networks and hosts, TOML data; a target
names one, as in `h100x64@a3-highgpu-8g`.
"""
