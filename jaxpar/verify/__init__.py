"""Is it the same answer? Loss and every gradient of a plan against one device.

`of_config` verifies the plan of a config on a small model of the same kind; `reference_ops` are what is taken for true.
"""
