"""What an estimate of a training step consists of."""

from __future__ import annotations

from typing import NamedTuple


class Bytes(NamedTuple):
    """The bytes of one device, by what they are for.

    Attributes:
      parameters: parameters that lie on the device.
      gradients: gradients of a step, and their sums over microbatches.
      optimizer: the optimizer's state that lies on the device.
      activations: what is kept between forward and backward.
      working: what one block, the loss or the update needs while it runs.
      host: activations that are kept in host memory, which are no bytes of the device.
    """

    parameters: float = 0.0
    gradients: float = 0.0
    optimizer: float = 0.0
    activations: float = 0.0
    working: float = 0.0
    host: float = 0.0

    @property
    def total(self) -> float:
        """All that lie on the device."""
        return sum(self[:5])


class Estimate(NamedTuple):
    """What a step costs under a candidate, by the closed forms.

    Attributes:
      compute: seconds of matmuls, attention and passes over memory.
      exposed: seconds of collectives that nothing hides.
      bubble: seconds that a stage of a pipeline waits for others.
      launches: seconds between kernels, on GPUs.
      update: seconds of the optimizer's step.
      host: seconds of transfers to host memory and back that nothing hides.
      bytes: the bytes of one device.
      offloaded: the bytes of activations that go to host memory in a step, and come back.
    """

    compute: float
    exposed: float
    bubble: float
    launches: float
    update: float
    host: float
    bytes: Bytes
    offloaded: float = 0.0

    @property
    def seconds(self) -> float:
        """The seconds of the step."""
        return self.compute + self.exposed + self.bubble + self.launches + self.update + self.host
