"""Timings of two or more ways to do one thing, in turns in one run: of a training step by `measure`
(PyTorch's is `torch_step`), and of both parts of generation by `generate` (`torch_generate`).

`presets` times nothing: it rehearses every preset with the compilers at hand, beside those of
another version. `plans` holds the closed forms of `jaxpar.plan` against measured plans.

The measurements of the project itself on a GPU stand with the tests (`tests/on_gpu`).
"""
