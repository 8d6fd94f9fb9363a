"""Two or more ways to do one thing, timed in turns in one run: `measure` does so, with a training
step for them (PyTorch's is `torch_step`), and `generate` with both parts of generation
(`torch_generate`).

`presets` times nothing: it rehearses every preset with the compilers at hand, beside those of
another version.

The measurements of the project itself on a GPU stand with the tests (`tests/on_gpu`).
"""
