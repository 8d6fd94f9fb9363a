"""This package finds how many seconds each instruction of a compiled program takes."""
