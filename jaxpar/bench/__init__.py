"""Comparisons: two or more ways of doing one thing, in turns, in one run."""
