"""The writer of pictures to files, and the names of the pictures that programs and notebooks draw:
each has a room.
"""

from __future__ import annotations

from pathlib import Path

import matplotlib
from matplotlib.figure import Figure
from matplotlib.text import Text

from jaxpar.base.atomic_write import replacing
from jaxpar.base.console import check_pictures
from jaxpar.base.errors import UserError, visible
from jaxpar.show.losses import loss_figure, sweep_figure
from jaxpar.show.memory_bars import memory_figure
from jaxpar.show.ring import ring_figure
from jaxpar.show.shards import draw_array, mesh_figure

__all__ = [
    "draw_array",
    "loss_figure",
    "memory_figure",
    "mesh_figure",
    "ring_figure",
    "save_figure",
    "sweep_figure",
]


def save_figure(figure: Figure, path: Path) -> None:
    """Write a picture to a file, whole or not at all; an SVG has the same bytes each time.

    Args:
      figure: the picture. Its texts are changed so that they are drawn as they stand.
      path: the file, a `.png` or an `.svg`.

    Raises:
      UserError: it is neither, its folder is not there, or it cannot be written.
    """
    check_pictures(path)
    for text in figure.findobj(Text):
        assert isinstance(text, Text)
        text.set_parse_math(False)  # a name may have two dollars in it
        text.set_text(visible(text.get_text()))
    svg = path.suffix == ".svg"
    try:
        with (
            replacing(path) as file,
            matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "jaxpar"}),
        ):
            figure.savefig(
                file, format="svg" if svg else "png", metadata={"Date": None} if svg else None
            )
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror or error}") from error
