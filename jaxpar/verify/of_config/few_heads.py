"""The fewest heads with which a small mesh does what the mesh that was asked for does with the
model's own.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from jaxpar.base.config import Config, rules_of
from jaxpar.base.errors import UserError
from jaxpar.base.layout.fit_heads import fit_rules
from jaxpar.base.layout.sharding import ShardingRules
from jaxpar.parallel.context.ulysses import devices_sharing
from jaxpar.verify.of_config.sizes import AxisSizes, pieces


def few_heads(config: Config, sizes: AxisSizes, asked: AxisSizes) -> tuple[int, int]:
    """Find the fewest heads and kv heads with which a small mesh does what the config's own mesh
    does with the model's heads.

    Pairs are tried from the fewest query heads per kv head, and then from the fewest heads. The
    first that the mesh divides and whose situation is the model's is taken; if there is none, the
    first that has the same rules.

    Raises:
      UserError: there is none with the same rules on so few devices.
    """
    rules = config.rules
    model = config.model
    asked_rules = rules_of(config, asked)
    kv_heads = model.kv_head_count
    group = model.heads // kv_heads
    dealt, kv_dealt = _dealt(config, sizes, asked)
    split = pieces("heads", asked_rules, sizes) * dealt
    kv_split = pieces("kv_heads", asked_rules, sizes) * kv_dealt
    most = math.lcm(
        pieces("heads", rules, sizes), pieces("kv_heads", rules, sizes), split, kv_split
    )
    alike = [
        (K * group * times, K)
        for times in range(1, most + 1 if model.kv_heads else 2)
        for K in range(min(2, kv_heads), 2 * most + 3)
        if K * group * times % split == 0
        and K % kv_split == 0
        and _situation(config, K * group * times, K, sizes).rules == asked_rules
    ]
    if not alike:
        count = math.prod(sizes.values())
        raise UserError(
            f"model.heads={model.heads} and model.kv_heads={kv_heads} lie otherwise on the {count} "
            f"devices that verify has than on the {math.prod(asked.values())} of the mesh, however "
            "few they are made: give it as many devices, such as simulated ones (--mesh.platform "
            "cpu)"
        )
    wanted = _situation(config, model.heads, kv_heads, asked)
    return next((pair for pair in alike if _situation(config, *pair, sizes) == wanted), alike[0])


def _dealt(config: Config, sizes: AxisSizes, asked: AxisSizes) -> tuple[int, int]:
    """Count the devices over which Ulysses deals out the heads of a device, and its kv heads.

    Both are dealt out only if there are enough of them. Both are 1 without Ulysses.
    """
    asked_rules = rules_of(config, asked)
    if config.context.strategy != "ulysses" or _in_groups(asked_rules, config.model.heads, asked):
        return 1, 1
    dealt = pieces("attention_seq", asked_rules, sizes)
    kv_on_device = config.model.kv_head_count // pieces("kv_heads", asked_rules, asked)
    if kv_on_device % pieces("attention_seq", asked_rules, asked) == 0:
        return dealt, dealt
    return dealt, 1


class _Situation(NamedTuple):
    """The way in which heads lie on a mesh."""

    rules: ShardingRules
    """The fitted rules."""
    few: bool
    """Whether there are more devices than heads."""
    copied: bool
    """Whether a kv head has several copies."""
    in_groups: bool
    """Whether Ulysses shares the heads out over groups of devices."""


def _situation(config: Config, heads: int, kv_heads: int, sizes: AxisSizes) -> _Situation:
    """Return how so many heads lie on a mesh of these sizes."""
    rules = config.rules
    fitted, _ = fit_rules(rules, heads, kv_heads, sizes)
    devices = pieces("heads", fitted, sizes)
    several = math.lcm(kv_heads, devices) > devices
    return _Situation(
        rules=fitted,
        few=pieces("heads", rules, sizes) > heads,
        copied=fitted.heads != fitted.kv_heads and several,
        in_groups=config.context.strategy == "ulysses" and _in_groups(fitted, heads, sizes),
    )


def _in_groups(rules: ShardingRules, heads: int, sizes: AxisSizes) -> bool:
    """Return whether a device has too few heads for all devices that split the sequence."""
    here = heads // pieces("heads", rules, sizes)
    devices = pieces("attention_seq", rules, sizes)
    return devices_sharing(here, devices) < devices
