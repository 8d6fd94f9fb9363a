"""A checksum as the last line of a text that a person may read: damage is told from a change that
is meant, because whoever changes the text deletes the line.
"""

from __future__ import annotations

import hashlib

from jaxpar.base.errors import UserError

_MARK = "# Checksum of the lines above. Whoever changes them deletes this line: "


def add_checksum(text: str) -> str:
    """Add the checksum of a text of whole lines to it, as one more line, a comment of TOML."""
    return f"{text}{_MARK}{_checksum(text)}\n"


def require_intact(text: str, origin: str) -> None:
    """Refuse a text that is not as it was written, by the checksum in its last line. A text without
    one is anyone's.

    Args:
      text: the text, as it was read.
      origin: the text's name in a message.

    Raises:
      UserError: the text has another checksum than the one in its last line.
    """
    above, found, checksum = text.rpartition(_MARK)
    if found and checksum.strip() != _checksum(above):
        raise UserError(
            f"{origin} is not as it was written: it is damaged, so bring it back; if you have "
            "changed it, delete its last line, the checksum"
        )


def _checksum(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
