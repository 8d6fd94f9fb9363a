"""The bytes a plan sends in a training step, in closed form."""

from jaxpar.communication.blocks import sublayers
from jaxpar.communication.moves import Array, Site
from jaxpar.communication.sites import arrays, one_block, part_of, sent, sites
from jaxpar.communication.stages import turns, with_a_stage

__all__ = ["Array", "Site", "arrays", "one_block", "part_of", "sent", "sites", "sublayers", "turns", "with_a_stage"]
