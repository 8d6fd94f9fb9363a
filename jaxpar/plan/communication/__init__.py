"""The bytes a plan sends in a training step, in closed form."""

from jaxpar.plan.communication.blocks import sublayers
from jaxpar.plan.communication.moves import Array, Site
from jaxpar.plan.communication.sites import arrays, one_block, part_of, sent, sites
from jaxpar.plan.communication.stages import turns, with_a_stage

__all__ = ["Array", "Site", "arrays", "one_block", "part_of", "sent", "sites", "sublayers", "turns", "with_a_stage"]
