"""Conversations as examples to learn: their rows (`conversations`), the template that writes them
as text (`chat_template`, and `template_worker`, in which it runs), and which of the tokens are
answers (`answers`, `turns`).
"""

from jaxpar.data.chat.examples import (
    load_examples,
)

__all__ = [
    "load_examples",
]
