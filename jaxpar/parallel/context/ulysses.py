"""Ulysses: each device attends with a share of the heads over the whole sequence (Jacobs et al.
2023, arXiv:2309.14509).

All-to-alls trade the split of the sequence for a split of the heads, and back. If the sequence is
whole, a device's share is all heads, and nothing is sent.

Where there are too few heads to share out over all devices, groups of neighbours share them out,
each for its own part of the sequence, and the keys and values of a share are gathered from all
groups: a device has the queries of its group's part alone, and the keys of all.

Shapes: B batch, S sequence of one device, P part of a group, T whole sequence, H heads, K kv heads,
h head_dim. With one group P is T.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxpar.kernels.attention.call import Call
from jaxpar.kernels.masks import And, Mask, Segments, in_documents, places_in_documents
from jaxpar.parallel.context.task import ContextTask


class _Groups(NamedTuple):
    """How the devices of a task share out heads and queries."""

    work: ContextTask
    sharing: int
    """So many neighbours are a group, and share out the heads."""
    parts: int
    """The number of groups, each of which has a part of the queries."""

    @property
    def neighbours(self) -> list[list[int]] | None:
        """The devices of each group; None = all devices are one."""
        if self.parts == 1:
            return None
        return [
            [group * self.sharing + share for share in range(self.sharing)]
            for group in range(self.parts)
        ]

    @property
    def alike(self) -> list[list[int]]:
        """The devices that have the same heads, one of each group."""
        return [
            [group * self.sharing + share for group in range(self.parts)]
            for share in range(self.sharing)
        ]

    def trade(self, x: Array, split_dim: int, whole_dim: int) -> Array:
        """Split an array over a group by another of its dims, which is whole now."""
        if self.sharing == 1:
            return x
        return jax.lax.all_to_all(
            x,
            self.work.axes,
            split_axis=split_dim,
            concat_axis=whole_dim,
            axis_index_groups=self.neighbours,
            tiled=True,
        )

    def gather(self, x_BPKh: Array) -> Array:
        """Return the keys or values of a share of the heads for the whole sequence."""
        if self.parts == 1:
            return x_BPKh
        return jax.lax.all_gather(
            x_BPKh, self.work.axes, axis=1, axis_index_groups=self.alike, tiled=True
        )

    def scatter_sum(self, dx_BTKh: Array) -> Array:
        """The transpose of `gather`."""
        if self.parts == 1:
            return dx_BTKh
        return jax.lax.psum_scatter(
            dx_BTKh,
            self.work.axes,
            scatter_dimension=1,
            axis_index_groups=self.alike,
            tiled=True,
        )

    def seen(self, length: int) -> tuple[Mask, Call]:
        """Find what the queries of this device's part see of the keys of the whole sequence.

        Args:
          length: how many queries they are.

        Returns:
          The mask, and how the kernel is called, with the place of the first query.
        """
        work = self.work
        if self.parts == 1:
            return work.seen, work.call
        start = jax.lax.axis_index(work.axes) // self.sharing * length
        call = work.call._replace(q_start=start, multiple=length)
        if work.segments_BT is None:
            return work.mask, call
        places_BT = places_in_documents(work.segments_BT)
        q_places_BP, q_ids_BP = (
            jax.lax.dynamic_slice_in_dim(x_BT, start, length, axis=1)
            for x_BT in (places_BT, work.segments_BT)
        )
        of_documents = in_documents(work.mask, q_places_BP, places_BT)
        return And(of_documents, Segments(q_ids_BP, work.segments_BT)), call


def devices_sharing(heads: int, devices: int) -> int:
    """Return the most devices that can share out heads evenly, of those that divide `devices`.

    Args:
      heads: the number of query heads that a device has before they are shared out.
      devices: the number of devices that split the sequence.

    Returns:
      The number of devices of a group; all of them where there are heads enough.
    """
    return math.gcd(heads, devices)


def _groups(work: ContextTask, heads: int) -> _Groups:
    """Return the groups that share out so many heads."""
    sharing = devices_sharing(heads, work.size)
    return _Groups(work, sharing, work.size // sharing)


def ulysses_forward(
    q_BSHh: Float[Array, "B S H h"],
    k_BSKh: Float[Array, "B keys K h"],
    v_BSKh: Float[Array, "B keys K h"],
    work: ContextTask,
) -> tuple[Array, Array]:
    """Compute attention inside `manual`.

    Args:
      q_BSHh: one device's queries.
      k_BSKh: its keys.
      v_BSKh: its values.
      work: the task.

    Returns:
      The output [B, S, H, h] in the dtype of v, and the float32 log-sum-exp [B, H / sharing, P] of
        the device's share of the heads, of which so many devices have a share.
    """
    groups = _groups(work, q_BSHh.shape[2])
    k_BTKh = _kv_to_heads(k_BSKh, groups)
    v_BTKh = _kv_to_heads(v_BSKh, groups)
    q_BPHh = _to_heads(q_BSHh, groups)
    mask, call = groups.seen(q_BPHh.shape[1])
    call = call._replace(out_dtype=v_BSKh.dtype)
    out_BPHh, lse_BHP = work.kernel.forward(q_BPHh, k_BTKh, v_BTKh, mask, call)
    return _to_sequence(out_BPHh, groups), lse_BHP


def ulysses_backward(
    q_BSHh: Float[Array, "B S H h"],
    k_BSKh: Float[Array, "B keys K h"],
    v_BSKh: Float[Array, "B keys K h"],
    dout_BSHh: Float[Array, "B S H h"],
    lse_BHP: Array,
    delta_BHS: Float[Array, "B H S"],
    work: ContextTask,
) -> tuple[Array, Array, Array]:
    """Compute the gradients of attention inside `manual`.

    Args:
      q_BSHh: as for `ulysses_forward`, and so are the keys and values.
      k_BSKh: see there.
      v_BSKh: see there.
      dout_BSHh: the output's gradient.
      lse_BHP: the log-sum-exp as the forward returned it.
      delta_BHS: as in `jaxpar.kernels.attention.call`.
      work: the task.

    Returns:
      The gradients of q, k and v, in the forward's shapes.
    """
    groups = _groups(work, q_BSHh.shape[2])
    q_BPHh = _to_heads(q_BSHh, groups)
    k_BTKh = _kv_to_heads(k_BSKh, groups)
    v_BTKh = _kv_to_heads(v_BSKh, groups)
    dout_BPHh = _to_heads(dout_BSHh, groups)
    delta_BHP = groups.trade(delta_BHS, 1, 2)
    mask, call = groups.seen(q_BPHh.shape[1])
    if groups.parts == 1:
        call = call._replace(out_dtype=None)  # else gradients of keys are parts of a sum
    dq_BPHh, dk_BTKh, dv_BTKh = work.backward(
        q_BPHh, k_BTKh, v_BTKh, dout_BPHh, lse_BHP, delta_BHP, mask, call
    )
    dq_BSHh = _to_sequence(dq_BPHh.astype(q_BSHh.dtype), groups)
    dk_BSKh = _kv_to_sequence(dk_BTKh, k_BSKh, groups)
    dv_BSKh = _kv_to_sequence(dv_BTKh, v_BSKh, groups)
    return dq_BSHh, dk_BSKh, dv_BSKh


def _to_heads(x_BSHh: Array, groups: _Groups) -> Array:
    """Return a share of the heads for the part of the device's group."""
    return groups.trade(x_BSHh, 2, 1)


def _to_sequence(x_BPHh: Array, groups: _Groups) -> Array:
    """The inverse of `_to_heads`."""
    return groups.trade(x_BPHh, 1, 2)


def _kv_to_heads(x_BSKh: Array, groups: _Groups) -> Array:
    """Return a share of the kv heads for the whole sequence, each copied as often as needed to
    share them out evenly.
    """
    kv_heads = x_BSKh.shape[2]
    copies = math.lcm(kv_heads, groups.sharing) // kv_heads
    if copies > 1:
        x_BSKh = jnp.repeat(x_BSKh, copies, axis=2)
    return groups.gather(_to_heads(x_BSKh, groups))


def _kv_to_sequence(dx_BTKh: Array, x_BSKh: Array, groups: _Groups) -> Array:
    """The transpose of `_kv_to_heads`: it sums the gradients of groups and of copies in
    float32.
    """
    B, S, K, h = x_BSKh.shape
    dx_BSKh = _to_sequence(groups.scatter_sum(dx_BTKh), groups)
    if dx_BSKh.shape[2] == K:
        return dx_BSKh
    copies_BSKCh = dx_BSKh.reshape(B, S, K, -1, h)
    return jnp.sum(copies_BSKCh, axis=3, dtype=jnp.float32)
