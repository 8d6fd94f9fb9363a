"""A program's digest: two compilations that run the same instructions on the same arrays have one.

The text of a compiled program says more than what runs. Where a line of the source has moved, the
metadata differs; and where the compiler numbers its instructions otherwise, their names do. So
metadata and stack frames are left out, and names are numbered anew in the order in which they
appear:

    %fusion.7 = f32[8]{0} fusion(%p.1), calls=%fused.2, metadata={op_name="jit(step)/add"}
    %0 = f32[8]{0} fusion(%1), calls=%2
"""

from __future__ import annotations

import hashlib
import re

from jaxpar.hlo.program.text import fields

_METADATA = re.compile(r', metadata=\{(?:[^{}"]|"(?:[^"\\]|\\.)*")*\}')
_NAME = re.compile(r'%[\w.\-]+|"(?:[^"\\]|\\.)*"')
_COMMENT = re.compile(r"/\*index=\d+\*/")
_SIGNATURE = re.compile(r"^((?:ENTRY )?%\S+) \(.*\) -> .*\{$", re.MULTILINE)
"""The first line of a computation, with its parameters, whose names and shapes stand below too."""
_COMPUTATIONS = re.compile(r"^(?:ENTRY )?%\S+ \(", re.MULTILINE)
_HEADER = (
    "is_scheduled",
    "input_output_alias",
    "entry_computation_layout",
    "num_partitions",
    "replica_count",
)
"""What the first line of a program says of what runs; its name, and a fingerprint of the text
before compilation, are no part of that."""


def program_digest(text: str) -> str:
    """Make a name of 16 hexadecimal digits from what a compiled program runs.

    Args:
      text: the text of the program, `compiled.as_text()`.

    Returns:
      The digest; two programs that differ in their names, metadata and stack frames only have the
      same.
    """
    header = fields(text.lstrip().partition("\n")[0].partition(",")[2])
    said = [f"{key}={header.get(key, '')}" for key in _HEADER]
    start = _COMPUTATIONS.search(text)
    body = text[start.start() :] if start else text
    for pattern, instead in ((_METADATA, ""), (_COMMENT, ""), (_SIGNATURE, r"\1 {")):
        body = pattern.sub(instead, body)
    numbers: dict[str, str] = {}

    def renamed(found: re.Match[str]) -> str:
        word = found[0]
        if word.startswith('"'):
            return word
        return numbers.setdefault(word, f"%{len(numbers)}")

    plain = "\n".join([*said, _NAME.sub(renamed, body)])
    return hashlib.sha256(plain.encode()).hexdigest()[:16]
