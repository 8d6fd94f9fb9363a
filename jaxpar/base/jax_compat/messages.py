"""What compilers and runtimes say, read and shortened."""

from __future__ import annotations

import re

_UNKNOWN_OPTION = re.compile(r"No such compile option: '(\w*)'")
_WRONG_VALUE = re.compile(r"While setting option (\w+), '(.*)' is not a valid (\w+) value")
_UNREADABLE = re.compile(r"Failed to parse '(.*)' into flag (\w+)")


def option_message(message: str) -> str:
    """What a compiler's message says about an option that it refuses; the empty string for any
    other message.
    """
    if found := _UNKNOWN_OPTION.search(message):
        return f"XLA knows no option {found[1]}"
    if found := _WRONG_VALUE.search(message):
        return f"{found[1]} takes a value of type {found[3]}, found {found[2]}"
    if found := _UNREADABLE.search(message):
        return f"{found[2]} takes no value {found[1]}"
    return ""


def is_unknown_option(message: str) -> bool:
    """Whether a compiler's message says that it has no option of a name."""
    return _UNKNOWN_OPTION.search(message) is not None


# XLA:TPU where a kernel's own memory is too small, on v5e and on v4. It says "RESOURCE_EXHAUSTED"
# of both, as of a device that is full.
_KERNELS_MEMORY = (
    r"memory space (?P<space>[vs]mem) while allocating on stack for %(?P<kernel>[\w.-]+)"
    r".*?Scoped allocation with size (?P<needs>[\d.]+\w?) and limit (?P<has>[\d.]+\w?)",
    r"Used (?P<needs>[\d.]+\w?) of (?P<has>[\d.]+\w?) (?P<space>[vs]mem)"
    r".*?XLA label: (?:[^\n]*HLO :: )?(?P<kernel>[\w.-]+)",
)


def kernel_memory_message(message: str) -> str:
    """What a compiler's message says about a kernel whose memory is too small: which kernel, what
    it asks for, what it may have, and what to try. The empty string for any other message."""
    for pattern in _KERNELS_MEMORY:
        if found := re.search(pattern, message, re.DOTALL):
            return (
                f"the kernel {found['kernel']} asks for {found['needs']} of {found['space']} "
                "and may have "
                f"{found['has']}; for attention, kernels.attention=chunked needs none"
            )
    return ""


# XLA:TPU of libtpu 0.0.50 where a gradient's rows, split over devices along its columns, fill no
# whole tiles; LLaMA-3's table of 128,256 rows on fsdp=64 x tensor=8 did so.
_SCATTERED_ROWS = re.compile(r"No feasible span count .* concat shape \w+\[(?P<rows>\d+),")


def scattered_rows_message(message: str) -> str:
    """What a compiler's message says about a matrix whose gradient it cannot scatter, and what to
    try. The empty string for any other message.
    """
    if found := _SCATTERED_ROWS.search(message):
        return (
            f"it cannot scatter the gradient of a matrix with {found['rows']} rows on a device; "
            "of a vocabulary's, try model.vocab_multiple=128 times the devices that split it"
        )
    return ""


# Gloo, between processes on CPUs (seen); JAX's coordination service; NCCL, by its documentation.
_LOST_PEER = re.compile(
    r"Connection (?:reset|closed) by peer|heartbeat timeout"
    r"|remote process exited or there was a network error"
)


def says_peer_is_lost(message: str) -> bool:
    """Whether an error of the runtime says that another process does not answer any more."""
    return _LOST_PEER.search(message) is not None


def compiler_message(message: str) -> str:
    """Shorten a message of a compiler or a runtime.

    Returns:
      One line of at most 300 characters: what `kernel_memory_message` or `scattered_rows_message`
      says, or else the first line with those that a heading announces.
    """
    if found := kernel_memory_message(message) or scattered_rows_message(message):
        return found[:300]
    words = []
    for line in filter(None, map(str.strip, message.splitlines())):
        words.append(line)
        if not line.endswith(":"):
            break
    return " ".join(words)[:300]
