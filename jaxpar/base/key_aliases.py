"""What people type who come from another trainer, and which key of a config means it.

The words are those of nanoGPT, of Hugging Face's Trainer, of MaxText, torchtitan and Megatron-LM,
and what one would guess. They stand at the field of the key, `Called("lr max_lr")`.
docs/coming_from.md has them with what differs; here they only make a mistyped key name the right
one.
"""

from __future__ import annotations

import difflib
import functools
import re
from collections.abc import Iterable, Mapping

from jaxpar.base.errors import suggest
from jaxpar.base.field_marks import Called, marks_of

_OF_FLAGS = {
    "run": "output_dir out_dir output out save_dir save checkpoint_dir run_name "
    "base_output_directory logdir log_dir"
}
"""What a command's own flags are called elsewhere: they are no settings of a config."""
_PRESETS = {
    "gpt2small": "gpt2_124m",
    "gpt2medium": "gpt2_355m",
    "gpt2large": "gpt2_774m",
    "gpt2xl": "gpt2_1558m",
}


@functools.cache
def _keys_by_word(schema: type) -> Mapping[str, str]:
    """The dotted key that each word of another trainer means: the first that is called so."""
    marked = marks_of(schema, Called).items()
    words = {key: called[-1].words for key, called in marked} | _OF_FLAGS
    return {word: key for key in reversed(words) for word in words[key].split()}


def meaning(typed: str, schema: type) -> str:
    """Find the key that a word of another trainer means.

    Args:
      typed: the word, behind the name of a table or not.
      schema: the dataclass whose fields say what they are called elsewhere.

    Returns:
      The dotted key; empty = none is known.
    """
    return _keys_by_word(schema).get(typed.rpartition(".")[2].lower(), "")


def suggest_key(typed: str, known: Iterable[str], schema: type) -> str:
    """` (did you mean 'train.learning_rate'?)`: the key that means what was typed, or the nearest
    by its letters.

    Args:
      typed: a dotted key that is not known, or its last word alone: `train.lr`, `lr`.
      known: the dotted keys that could have been meant.
      schema: the dataclass whose fields say what they are called elsewhere.

    Returns:
      The hint; empty where nothing is near.
    """
    known = list(known)
    word = typed.rpartition(".")[2].lower()
    meant = meaning(word, schema)
    if meant in known:
        return f" (did you mean {meant!r}?)"
    same = [key for key in known if key.rpartition(".")[2] == word]
    if same:
        return f" (did you mean {same[0]!r}?)"
    table = typed.rpartition(".")[0]
    within = {key.rpartition(".")[2]: key for key in known if key.rpartition(".")[0] == table}
    if not table or not within:
        return suggest(typed, known)
    # a table that is known is as long in all its keys, and would make any two of them alike
    near = difflib.get_close_matches(word, within, n=1, cutoff=0.5)
    if near:
        return f" (did you mean {within[near[0]]!r}?)"
    return suggest(typed, known, alike=0.75)


def suggest_axis(typed: str, axes: Iterable[str], schema: type) -> str:
    """Suggest a mesh axis: ` (did you mean 'stage'?)`.

    Args:
      typed: what was written, such as `pipe`.
      axes: the mesh axes that there are.
      schema: the dataclass whose fields are mesh axes.

    Returns:
      A hint at the axis that means the same to another trainer, or the nearest by its letters;
      empty where there is none.
    """
    axes = list(axes)
    axis = meaning(typed, schema)
    if axis in axes:
        return f" (did you mean {axis!r}?)"
    return suggest(typed, axes)


def suggest_preset(name: str, known: Iterable[str]) -> str:
    """Suggest a preset: ` (did you mean 'gpt2_124m'?)`.

    Args:
      name: what was written.
      known: the names of the presets.

    Returns:
      A hint at the preset whose name is the same but for signs, the smallest that begins with it,
      or the nearest by its letters; empty where there is none.
    """
    known = list(known)
    plain = _plain(name)
    if not plain:
        return suggest(name, known)
    by_plain = {_plain(preset): preset for preset in known} | _PRESETS
    if by_plain.get(plain) in known:
        return f" (did you mean {by_plain[plain]!r}?)"
    parts = [preset for preset in known if _plain(preset.partition("_")[0]) == plain]
    longer = parts or [preset for preset in known if _plain(preset).startswith(plain)]
    if longer:
        return f" (did you mean {min(longer, key=_size)!r}?)"
    return suggest(name, known)


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())


def _size(preset: str) -> tuple[float, str]:
    """The parameters that a preset's name has, in millions, and the name; those without any
    come last.
    """
    found = re.search(r"_(\d+)([mb])(?:_|$)", preset)
    return float("inf") if found is None else int(found[1]) * (
        1000 if found[2] == "b" else 1
    ), preset
