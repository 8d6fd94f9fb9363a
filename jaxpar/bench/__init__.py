"""Timings of two or more ways to do one thing, in turns in one run: of a training step by `measure`
(PyTorch's is `torch_step`), and of both parts of generation by `generate` (`torch_generate`).

`presets` times nothing: it rehearses every preset with the compilers at hand, beside those of
another version. Nor does `foresight`, which rehearses published training steps and says how far
each prediction is off, nor `plans`, which holds the closed forms of `jaxpar.plan` against measured
plans; `csv_rows` reads the tables of both. `here` times and rehearses: it runs small training steps
on this machine beside their rehearsals.

The measurements of the project itself on a GPU stand with the tests (`tests/on_gpu`).
"""
