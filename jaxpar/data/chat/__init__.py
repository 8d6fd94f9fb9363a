"""Conversations as examples to learn. To be read in this order: the template that writes them as
text (`chat_template`, and `template_worker`, in which it runs), and their rows (`conversations`);
the forms of a message that a template is given (`template_forms`), what an assistant's turn has
said (`turns`) and what is not written (`unwritten`); by all of which one knows which of the tokens
are answers (`answers`) and with which token a turn ends (`end_of_turn`). `examples` puts them
together.
"""

from jaxpar.data.chat.examples import (
    load_examples,
)

__all__ = [
    "load_examples",
]
