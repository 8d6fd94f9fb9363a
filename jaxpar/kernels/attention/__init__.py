"""Attention by the fastest implementation that serves a device, each held against
`call.reference`.

Its rooms, in the order in which they are read: `call` has the options of a call, and the reference;
`visits` lists the tiles that a mask shows; `kernel` says what an implementation is, and registers
it; `dispatch` chooses one, and joins its forward and its backward. `implementations` registers
ours: `chunked`, which is plain JAX, `tpu` (with `tpu_grid` and `tpu_kernels`), `triton` (with
`triton_tiles` and `triton_kernels`) and the `libraries` of others.
"""
