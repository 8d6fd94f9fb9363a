"""Types of machines that GPUs come in: what their networks and hosts can do, from
`jaxpar.meshes.machines`.

A chip's file has the figures of its maker's own machine; a cloud's may have a quarter of its
network, and fewer cores.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from jaxpar.base.errors import UserError, suggest
from jaxpar.base.hardware import Hardware
from jaxpar.base.toml import from_toml, presets

MACHINES = "jaxpar.meshes.machines"


@dataclass(frozen=True)
class MachineType:
    """A type of machine. Figures are an equal share for one GPU, and bandwidths for one direction;
    0 = as in the chip's file.
    """

    chips: tuple[str, ...] = ()
    """The chips that it is sold with: files of `jaxpar.meshes.chips`."""
    gpus: int = 0
    dcn_bandwidth: float = 0.0
    """Bytes/s of the network to other machines."""
    host_link_bandwidth: float = 0.0
    """Bytes/s to the host's memory."""
    host_memory_bandwidth: float = 0.0
    """Bytes/s of the host's memory."""
    host_flops: float = 0.0
    """Float32 FLOP/s of the host's processors."""

    def on(self, hardware: Hardware) -> Hardware:
        """The figures of a chip in a machine of this type."""
        names = (
            "dcn_bandwidth",
            "host_link_bandwidth",
            "host_memory_bandwidth",
            "host_flops",
        )
        own = {name: getattr(self, name) for name in names if getattr(self, name)}
        return replace(hardware, **own)


def load_machine_type(name: str, chip: str) -> MachineType:
    """Load a type of machine from its file in `jaxpar.meshes.machines`.

    Args:
      name: the name of the file, without its ending.
      chip: the chip that it must be sold with.

    Raises:
      UserError: there is no such file, or the machine has other chips.
    """
    types = {
        one: from_toml(MachineType, file.read_text(encoding="utf-8"), one)
        for one, file in presets(MACHINES).items()
    }
    fitting = [one for one, machine in types.items() if chip in machine.chips]
    known = f"with {chip} there are {', '.join(fitting) or 'none'}"
    if name not in types:
        raise UserError(f"no type of machine {name!r}{suggest(name, fitting)}: {known}")
    if name not in fitting:
        raise UserError(
            f"a machine {name!r} has {' or '.join(types[name].chips)}, and no {chip}: {known}"
        )
    return types[name]
