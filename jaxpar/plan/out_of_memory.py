"""When a training step runs out of memory, the user is told the flags of the fastest plan that should fit."""

from __future__ import annotations

from dataclasses import replace

import jax

from jaxpar.base.config import Config
from jaxpar.base.console import bytes_text
from jaxpar.base.hardware import Hardware
from jaxpar.base.jax_compat import compiler_message
from jaxpar.base.plan import Plan
from jaxpar.plan.memory_account import memory_account
from jaxpar.plan.memory_search import assign_actions, searches


def out_of_memory(message: str, config: Config, plan: Plan, hardware: Hardware, platform: str, has: int) -> str:
    """Tell the user in one line of a step that does not fit.

    Args:
      message: the message of the runtime.
      config: the experiment.
      plan: the plan of the config.
      hardware: the figures of a device.
      platform: the platform of a device.
      has: the bytes that a device has; 0 = not known.
    """
    total = sum(part.device for part in memory_account(config, plan, platform))
    said = compiler_message(message)[:200]
    room = has or int(0.9 * total)  # if not known, less than what was just too much
    devices, alone = list(plan.mesh.devices.flat), replace(config, memory=replace(config.memory, may=()))
    found = fitting_flags(alone, devices, platform, hardware, room)
    found = found or fitting_flags(config, devices, platform, hardware, room)
    where = f"a device has {bytes_text(has)}" if has else "what a device has is not known"
    tried = f"try {found}" if found else (
        f"nothing this mesh can keep, offload or recompute fits: try mesh.fsdp={2 * plan.mesh.shape['fsdp']} or "
        f"train.accumulation={2 * config.train.accumulation}"
    )  # fmt: skip
    return f"out of memory: a step was predicted to take {bytes_text(total)}, {where}; {tried} ({said})"


def fitting_flags(config: Config, devices: list[jax.Device], platform: str, hardware: Hardware, room: int) -> str:
    """The flags of the fastest plan predicted to fit into some bytes, with nothing compiled; empty = none does."""
    searched = searches(config, devices, platform, hardware)
    found = [(one, solution) for one in searched if (solution := one.solve(room)) is not None]
    if not found:
        return ""
    search, solution = min(found, key=lambda pair: pair[0].seconds(pair[1]))
    memory = assign_actions(search.config, search.items, solution.actions).memory
    groups: dict[str, list[str]] = {}
    for name, choice in vars(memory.keep).items():
        if choice != "policy" and (name, choice) != ("block_input", "save"):
            groups.setdefault(choice, []).append(name)
    flags = [f"memory.keep.{name}={action}" for action in ("save", "offload") for name in groups.get(action, [])]
    state = [f"memory.{name}=offload" for name in ("optimizer", "parameters") if getattr(memory, name) == "offload"]
    accumulated, loss = search.config.train.accumulation, memory.loss_mib
    more = [f"train.accumulation={accumulated}"] if accumulated != config.train.accumulation else []
    more += [f"memory.loss_mib={loss}"] if loss != config.memory.loss_mib else []
    return " ".join(["memory.policy=full", *flags, *state, *more])
