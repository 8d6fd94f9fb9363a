"""What a training step costs on hardware that is not here, by the compiler of that hardware.

`of_config` compiles the step of a config; `cost` prices what the compiler made of it, `timeline` plays it out, `report`
says what was found. `targets` are the machines.
"""
