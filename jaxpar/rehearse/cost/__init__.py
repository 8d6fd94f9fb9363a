"""Seconds and bytes of each instruction of a compiled program."""
