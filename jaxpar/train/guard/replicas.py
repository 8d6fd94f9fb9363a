"""Whether devices that hold copies of the same array hold the same bits.

A device that computes or remembers wrongly, and says nothing, makes its copies differ from those of
its peers: silent corruption. A sum of the bits of every piece is made where it lies, so that one
number an array and device travels, and sums of copies are compared.
"""

from __future__ import annotations

from collections import Counter
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxpar.base.compiler import once_options
from jaxpar.base.layout.sharding import PyTree, path_name
from jaxpar.parallel.host_memory import HOST


class Mismatch(NamedTuple):
    """An array of which not all copies are alike.

    Attributes:
      name: that of the array, such as `blocks.up`; one of the optimizer's begins with `opt_state`.
      devices: the devices whose copies differ from those of the most; all that hold a copy of the
        piece where no copy is that of the most.
      copies: how many devices hold a copy of the piece.
    """

    name: str
    devices: tuple[jax.Device, ...]
    copies: int

    @property
    def known(self) -> bool:
        """Whether it is known which copies are wrong, and not only that some are."""
        return len(self.devices) < self.copies


class ReplicaCheck:
    """Compares the copies of arrays that lie on one mesh. The program is compiled at the first
    comparison.

    Arrays in host memory, and those of which every device has another piece, are left out.
    """

    def __init__(self, shapes: PyTree, mesh: Mesh):
        """Take what describes the arrays, with their shardings, and the mesh on which they lie."""
        leaves = jax.tree_util.tree_leaves_with_path(shapes)
        self._mesh = mesh
        self._of: list[tuple[int, str, NamedSharding]] = []
        for index, (path, leaf) in enumerate(leaves):
            if _is_copied(leaf.sharding, mesh):
                name = path_name(path).removeprefix("params.")
                self._of.append((index, name, leaf.sharding))
        self._program: Any = None
        self.arrays = len(leaves)
        """How many arrays there are."""

    @property
    def compared(self) -> int:
        """How many of the arrays have copies that are compared."""
        return len(self._of)

    def mismatches(self, arrays: PyTree) -> list[Mismatch]:
        """Compare the copies of all arrays.

        Args:
          arrays: global arrays, in a tree like that of the shapes.

        Returns:
          One for each piece of an array whose copies are not all alike; all processes, which must
          call this together, get the same.
        """
        if not self._of:
            return []
        if self._program is None:
            self._program = self._make_program()
        leaves = jax.tree.leaves(arrays)
        sums = np.asarray(self._program([leaves[index] for index, _, _ in self._of]))
        found = []
        for (_, name, sharding), of_devices in zip(self._of, sums, strict=True):
            found += _differing(name, of_devices, sharding, self._mesh)
        return found

    def _make_program(self) -> Any:
        """The jitted function from the arrays to their sums [arrays, *mesh], on every process."""
        mesh = self._mesh
        axes = tuple(mesh.axis_names)

        def local(pieces: list[jax.Array]) -> jax.Array:
            sums = jnp.stack([sum_of_array(piece) for piece in pieces])
            return sums.reshape(len(pieces), *[1] * len(axes))

        of_devices = jax.shard_map(
            local,
            mesh=mesh,
            in_specs=([sharding.spec for _, _, sharding in self._of],),
            out_specs=P(None, *axes),
            check_vma=False,
        )
        everywhere = NamedSharding(mesh, P())
        return jax.jit(of_devices, out_shardings=everywhere, compiler_options=once_options(mesh))


def replicas_note(check: ReplicaCheck) -> str:
    """Return what to say of a comparison before it begins: how much it can see."""
    if not check.compared:
        return (
            "warning: train.check_replicas finds nothing on this mesh: no device holds a copy of "
            "what another holds"
        )
    if check.compared < check.arrays:
        return (
            f"train.check_replicas compares {check.compared} of {check.arrays} arrays of the "
            "state: of the others there are no copies on devices"
        )
    return f"train.check_replicas compares all {check.arrays} arrays of the state"


def mismatch_message(found: list[Mismatch], every: int, step: int) -> str:
    """Return what to say of copies that differ, in one sentence.

    Args:
      found: the mismatches, at least one.
      every: `train.check_replicas`.
      step: the step after which they were found.
    """
    first = found[0]
    names = ", ".join(
        f"{device.platform}:{device.id} of process {device.process_index}"
        for device in first.devices
    )
    arrays = len({one.name for one in found})
    others = f", and {arrays - 1} other arrays likewise" if arrays > 1 else ""
    if first.known:
        what = (
            f"device {names} has other bits in {first.name} than the rest of the {first.copies} "
            f"that hold a copy{others}: its memory or its arithmetic fails, take it out"
        )
    else:
        what = (
            f"the copies of {first.name} on the devices {names} differ{others}: at least one of "
            "them fails, and two copies do not say which"
        )
    return f"train.check_replicas={every} found after step {step} that {what}"


def _is_copied(sharding: NamedSharding, mesh: Mesh) -> bool:
    if sharding.memory_kind == HOST:
        return False
    return any(mesh.shape[axis] > 1 for axis in _copied_over(sharding, mesh))


def _copied_over(sharding: NamedSharding, mesh: Mesh) -> list[str]:
    """The mesh axes along which devices hold copies."""
    split = set[str]()
    for entry in sharding.spec:
        if entry is not None:
            split |= {entry} if isinstance(entry, str) else set(entry)
    return [axis for axis in mesh.axis_names if axis not in split]


def _differing(name: str, sums: np.ndarray, sharding: NamedSharding, mesh: Mesh) -> list[Mismatch]:
    """Compare the sums [*mesh] of one array over the devices that hold the same piece."""
    copied = _copied_over(sharding, mesh)
    places = [mesh.axis_names.index(axis) for axis in copied]
    last = range(sums.ndim - len(places), sums.ndim)
    rows = np.moveaxis(sums, places, last)
    devices = np.moveaxis(mesh.devices, places, last)
    copies = int(np.prod([mesh.shape[axis] for axis in copied]))
    by_piece = rows.reshape(-1, copies)
    holders_by_piece = devices.reshape(-1, copies)
    found = []
    for row, holders in zip(by_piece, holders_by_piece, strict=True):
        ((common, count),) = Counter(row.tolist()).most_common(1)
        if count == copies:
            continue
        if 2 * count > copies:
            blamed = tuple(holders[row != common])
        else:
            blamed = tuple(holders)
        found.append(Mismatch(name, blamed, copies))
    return found


def sum_of_array(x: jax.Array) -> jax.Array:
    """Add up the bits of an array as whole numbers, modulo 2^32: one flipped bit changes it.

    Args:
      x: an array of numbers or of bool.

    Returns:
      The sum, a uint32 scalar.
    """
    if jnp.issubdtype(x.dtype, jnp.bool_):
        bits = x
    else:
        bits = jax.lax.bitcast_convert_type(x, f"uint{8 * x.dtype.itemsize}")
    return jnp.sum(bits.astype(jnp.uint32), dtype=jnp.uint32)
