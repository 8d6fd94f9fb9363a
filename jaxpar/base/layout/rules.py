"""Sharding rules: over which mesh axes each logical axis is split, in the forms that people write.

Three forms say the same thing, and make equal rules:

    ShardingRules(embed="fsdp", seq=None)
    {"embed": "fsdp", "seq": None}
    [("embed", "fsdp"), ("seq", None)]

A logical axis that is not written has its default (`ShardingRules`), in all three. A default names
the mesh axes of `make_mesh`; on another mesh those that the mesh lacks are left out. What is
written must be there.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import lru_cache
from typing import Annotated, Any, Literal, TypeAlias, get_args

from jax.sharding import AbstractMesh, Mesh
from jax.sharding import PartitionSpec as P

from jaxpar.base.errors import UserError, short, suggest
from jaxpar.base.field_marks import Idle
from jaxpar.base.layout.mesh import MESH_AXES, ConfigMeshAxis, MeshAxis
from jaxpar.base.toml import TABLE_OF_LISTS

_LibraryAxis = Literal[
    "batch",
    "seq",
    "residual_seq",
    "attention_seq",
    "embed",
    "state_embed",
    "heads",
    "kv_heads",
    "head_dim",
    "mlp",
    "vocab",
    "layers",
    "experts",
    "stage",
    "rank",
]
LOGICAL_AXES: tuple[str, ...] = get_args(_LibraryAxis)
"""The logical axes that the ops of `jaxpar.parallel` and our models know."""
LogicalAxis: TypeAlias = str
"""A named dim of an array: one of `LOGICAL_AXES`, or one of the caller's own, which the rules name.
"""
Axes: TypeAlias = Sequence[LogicalAxis | None]
RulesLike: TypeAlias = "ShardingRules | Mapping[str, Any] | Sequence[tuple[str, Any]]"
"""Rules in any of the three forms: see `as_rules`."""

log = logging.getLogger(__name__)


@lru_cache(maxsize=256)
def _warn_once(line: str) -> None:
    log.warning("%s", line)


NO_EXPERTS = Idle(
    lambda c: c.model.experts < 1, "the model has no experts", "add --model.experts 8"
)


class DefaultRule(tuple):
    """The mesh axes of a rule that nobody wrote, of which a mesh need not have all."""

    __slots__ = ()


def _default(*axes: ConfigMeshAxis) -> tuple[ConfigMeshAxis, ...]:
    return DefaultRule(axes)


def _mesh_axes_of(given: object, name: str) -> tuple[Any, ...]:
    """The mesh axes of one rule, outermost first; a default stays one."""
    if isinstance(given, DefaultRule):
        return given
    if given is None:
        return ()
    axes = (given,) if isinstance(given, str) else given
    if not isinstance(axes, tuple | list | P):
        raise UserError(
            f"{name} is a mesh axis, a tuple of them, or None, and was given {short(given)}: "
            'write ("data", "fsdp"), '
            "the outermost first"
        )
    for place, axis in enumerate(axes):
        if not isinstance(axis, str) or not axis:
            raise UserError(
                f"{name} names no mesh axis: {short(axis)}: mesh axes are names, such as "
                f"{', '.join(MESH_AXES)}"
            )
        if axis in tuple(axes)[:place]:
            raise UserError(
                f"{name} names the mesh axis {axis!r} twice: an axis splits a dim once, leave "
                "one out"
            )
    return tuple(axes)


@dataclass(frozen=True)
class ShardingRules:
    """For each logical axis, the mesh axes that it is split over, outermost first. An empty rule
    replicates it.

    `embed` is the embed dim of *parameters*, which fsdp shards (ZeRO-3); activations leave that dim
    whole. `seq` is the sequence where heads or mlp are split. `residual_seq` is the sequence of the
    residual stream between them, which may also be split over tensor: this is Megatron's sequence
    parallelism (Korthikanti et al. 2022, arXiv:2205.05198). `attention_seq` is the sequence of q, k
    and v; an empty rule means that of `seq`, and `fit_rules` makes it that of `residual_seq` where
    heads cannot be split. `state_embed` is the embed dim of gradients and of the optimizer's state;
    an empty rule means that of `embed`. It may be split over further mesh axes: over `data`, with
    parameters whole there, it is ZeRO-1 (Rajbhandari et al. 2020, arXiv:1910.02054). `layers` is
    the dim that the parameters of all blocks are stacked over; an empty rule means that of `stage`,
    so that a pipeline's stages have their own layers. Devices along `expert` split the batch too:
    each sends its tokens to the devices that have the experts they chose. The logical axis `rank`,
    the small dim of a LoRA matrix, has no rule: it is never split.

    A rule may name an axis of any mesh; a layout checks that its own mesh has it. `own` has the
    rules of logical axes of one's own, which only a block or a model of one's own can name: words
    such as `state=tensor`, or `state=data,fsdp`, or `state=` for one that is whole. In a TOML file
    they may be a table, `[rules.own]`; in Python a dict is plainer (`as_rules`).
    """

    batch: tuple[ConfigMeshAxis, ...] = _default("data", "fsdp", "expert")
    seq: tuple[ConfigMeshAxis, ...] = _default("context")
    residual_seq: tuple[ConfigMeshAxis, ...] = _default("context", "tensor")
    attention_seq: tuple[ConfigMeshAxis, ...] = _default()
    embed: tuple[ConfigMeshAxis, ...] = _default("fsdp")
    state_embed: tuple[ConfigMeshAxis, ...] = _default()
    heads: tuple[ConfigMeshAxis, ...] = _default("tensor")
    kv_heads: tuple[ConfigMeshAxis, ...] = _default("tensor")
    head_dim: tuple[ConfigMeshAxis, ...] = _default()
    mlp: tuple[ConfigMeshAxis, ...] = _default("tensor")
    vocab: tuple[ConfigMeshAxis, ...] = _default("tensor")
    layers: tuple[ConfigMeshAxis, ...] = _default()
    experts: Annotated[tuple[ConfigMeshAxis, ...], NO_EXPERTS] = _default("expert")
    stage: tuple[ConfigMeshAxis, ...] = _default("stage")
    own: tuple[str, ...] = field(default=(), metadata=TABLE_OF_LISTS)

    def __post_init__(self) -> None:
        """Accept a bare mesh axis in place of a tuple of one, a list, and None in place of an empty
        tuple. Own rules are sorted, so that equal rules are equal in whatever order they came.

        Raises:
          UserError: a mesh axis is no name or stands twice, a rule is of another type, or one's own
            logical axis has no name, one that stands twice, or that of an axis of the library. A
            set has no order, and each process of a run would lay arrays out in an order of its own.
        """
        for name in RULE_NAMES:
            axes = _mesh_axes_of(getattr(self, name), f"rules.{name}")
            object.__setattr__(self, name, axes)
        if self.own != ():
            object.__setattr__(self, "own", _own_words(_read_own(self.own)))

    @property
    def own_rules(self) -> dict[LogicalAxis, tuple[MeshAxis, ...]]:
        """The mesh axes of each logical axis that is the caller's own."""
        return _read_own(self.own)

    @property
    def logical_axes(self) -> tuple[LogicalAxis, ...]:
        """Every logical axis that an array may name under these rules."""
        return (*LOGICAL_AXES, *self.own_rules)


RULE_NAMES = tuple(rule.name for rule in fields(ShardingRules) if rule.name != "own")
"""The logical axes of the library that have a rule."""


def _read_own(words: object) -> dict[LogicalAxis, tuple[MeshAxis, ...]]:
    """The rules of one's own axes, from the words of `rules.own`."""
    given = (words,) if isinstance(words, str) else words
    if not isinstance(given, tuple | list):
        raise UserError(
            f'rules.own is a list of words, and was given {short(given)}: write ["state=data,fsdp"]'
        )
    found: dict[LogicalAxis, tuple[MeshAxis, ...]] = {}
    for word in given:
        if not isinstance(word, str) or "=" not in word:
            raise UserError(
                f"rules.own: {short(word)} is no logical axis with its mesh axes: write "
                '"state=data,fsdp", or "state=" for one that is whole'
            )
        name, _, axes = word.partition("=")
        name = name.strip()
        if not name or name in LOGICAL_AXES:
            raise UserError(
                f"rules.own: {word!r} names no logical axis of your own: the library's are "
                f"{', '.join(LOGICAL_AXES)}, and their rules stand in [rules]"
            )
        if name in found:
            raise UserError(f"rules.own names the logical axis {name!r} twice: leave one out")
        named = tuple(axis.strip() for axis in axes.split(",")) if axes.strip() else ()
        found[name] = _mesh_axes_of(named, f"rules.own.{name}")
    return found


def _own_words(rules: Mapping[LogicalAxis, tuple[MeshAxis, ...]]) -> tuple[str, ...]:
    """Write the rules of one's own axes as words, sorted by name: the inverse of `_read_own`."""
    return tuple(f"{name}={','.join(axes)}" for name, axes in sorted(rules.items()))


DEFAULT_RULES = ShardingRules()


def as_rules(given: RulesLike) -> ShardingRules:
    """Rules in the house's own form.

    Args:
      given: a `ShardingRules`; a dict from logical axes to a mesh axis, a tuple of them, or None;
        or the same as a list of pairs, as Flax and MaxText write it. Logical axes that are not
        named have the defaults of `ShardingRules`. A name that is none of `LOGICAL_AXES` is a
        logical axis of the caller's own.

    Returns:
      Rules that are equal where the same was said in another form.

    Raises:
      UserError: the rules are of another form, a pair names a logical axis for the second time with
        other mesh axes, or a rule is not one of `ShardingRules`' kinds. Flax would take the first
        of two that is free in each array; here an axis is split in one way in all arrays, which is
        what the ops count on.
    """
    if isinstance(given, ShardingRules):
        return given
    table = _table_of(given)
    if table.get("rank") not in (None, ()):
        raise UserError(
            f"rules.rank={short(table['rank'])}: the small dim of a LoRA matrix is never split: "
            "leave it out"
        )
    table.pop("rank", None)
    known = {name: axes for name, axes in table.items() if name in RULE_NAMES}
    own = {
        name: _mesh_axes_of(axes, f"rules.{name}")
        for name, axes in table.items()
        if name not in RULE_NAMES
    }
    words = _own_words(own)
    if _read_own(words) != own:
        raise UserError(
            f"the rules name logical axes of your own, {', '.join(map(repr, own))}: a name has no "
            "'=' or ',' and no spaces around it"
        )
    return ShardingRules(**known, own=words)


def _warn_of_near_name(name: LogicalAxis) -> None:
    """Say that a logical axis of the caller's own looks like one of the library's: it may be one
    that is spelt wrong, whose rule then splits nothing.
    """
    swapped = [axis for axis in LOGICAL_AXES if sorted(axis) == sorted(name) and axis[0] == name[0]]
    if swapped:
        near = f" (did you mean {swapped[0]!r}?)"
    else:
        near = suggest(name, LOGICAL_AXES, alike=0.75)
    if near:
        _warn_once(f"the rules name a logical axis of your own, {name!r}{near}")


def _table_of(given: object) -> dict[str, Any]:
    """Rules as a dict from names to what was written; a UserError for rules of no form."""
    wrong = UserError(
        "a layout's rules are a jaxpar.ShardingRules, a dict or a list of pairs, and were given "
        f'{short(given)}: write {{"embed": "fsdp"}}'
    )
    if isinstance(given, Mapping):
        pairs = list(given.items())
    elif isinstance(given, list | tuple):
        pairs = list(given)
    else:
        raise wrong
    table: dict[str, Any] = {}
    for pair in pairs:
        if not isinstance(pair, list | tuple) or len(pair) != 2 or not isinstance(pair[0], str):
            raise wrong
        name, axes = pair
        written = _mesh_axes_of(axes, f"rules.{name}")
        if table.setdefault(name, written) != written:
            raise UserError(
                f"the rules name {name!r} twice, as {short(table[name])} and as "
                f"{short(written)}: Flax would choose anew for each array, and a layout has one "
                "rule for all of them, so leave one out"
            )
    return table


# On a mesh that has no axis of the default of the first, it is the rule of the second.
_FOLLOWS: dict[LogicalAxis, LogicalAxis] = {"kv_heads": "heads", "residual_seq": "seq"}


def fit_to_mesh(rules: ShardingRules, mesh: Mesh | AbstractMesh) -> ShardingRules:
    """Fit the rules to a mesh, whose axes may be others: defaults lose the axes that it lacks.

    Args:
      rules: the rules as they were written.

    Returns:
      The rules as they are on the mesh.

    Raises:
      UserError: a rule that was written names an axis that the mesh does not have.
    """
    present = tuple(mesh.shape)
    if present == MESH_AXES and not rules.own and not _foreign(rules):
        return rules
    fitted: dict[str, tuple[MeshAxis, ...]] = {}
    for name in RULE_NAMES:
        fitted[name] = _present_axes(name, getattr(rules, name), present)
    for name, leader in _FOLLOWS.items():
        default = getattr(rules, name)
        if isinstance(default, DefaultRule) and default and not fitted[name]:
            fitted[name] = DefaultRule(fitted[leader])
    for name, axes in rules.own_rules.items():
        _present_axes(name, axes, present)
        _warn_of_near_name(name)
    changes: dict[str, Any] = {**fitted}
    rules = replace(rules, **changes)
    if present != MESH_AXES:
        _warn_of_idle_axes(rules, mesh)
    return rules


def _foreign(rules: ShardingRules) -> bool:
    """Whether a rule names an axis that `make_mesh` does not make."""
    return any(axis not in MESH_AXES for name in RULE_NAMES for axis in getattr(rules, name))


def _present_axes(
    name: str, axes: tuple[MeshAxis, ...], present: tuple[MeshAxis, ...]
) -> tuple[MeshAxis, ...]:
    """The mesh axes of the rule `name` on a mesh that has the axes `present`."""
    if isinstance(axes, DefaultRule):
        return DefaultRule(axis for axis in axes if axis in present)
    for axis in axes:
        if axis not in present:
            raise UserError(
                f"rules.{name} names no mesh axis: {axis!r}{suggest(axis, present)}: the axes of "
                f"this mesh are {', '.join(map(str, present))}"
            )
    return axes


def _warn_of_idle_axes(rules: ShardingRules, mesh: Mesh | AbstractMesh) -> None:
    """Say which axes of a mesh that is not ours no rule names: along them all devices do the same,
    which nothing else would show.
    """
    used = {axis for name in rules.logical_axes for axis in named_axes(name, rules)}
    for axis, size in mesh.shape.items():
        if size > 1 and axis not in used:
            _warn_once(
                f"no rule names the mesh axis {axis}={size}, so its devices all do the same: add "
                f'one, such as {{"mlp": "{axis}", "heads": "{axis}"}} or {{"batch": "{axis}"}}'
            )


# An empty rule of the first means that of the second.
_AS: dict[LogicalAxis, LogicalAxis] = {
    "state_embed": "embed",
    "attention_seq": "seq",
    "layers": "stage",
}


def split_axes(
    axis: LogicalAxis | None,
    rules: ShardingRules,
    mesh: Mesh | AbstractMesh,
) -> tuple[MeshAxis, ...]:
    """Find what a logical axis is split over on a mesh.

    Args:
      axis: the logical axis; None is split over nothing.

    Returns:
      The mesh axes of more than one device that the rules give it, outermost first.

    Raises:
      UserError: `named_axes` refuses the axis.
    """
    if axis is None:
        named = ()
    else:
        named = named_axes(axis, rules)
    return tuple(mesh_axis for mesh_axis in named if mesh.shape[mesh_axis] > 1)


def named_axes(axis: LogicalAxis, rules: ShardingRules) -> tuple[MeshAxis, ...]:
    """Look up the mesh axes that the rules give a logical axis, whatever their sizes.

    Args:
      axis: the logical axis.

    Returns:
      The mesh axes, outermost first.

    Raises:
      UserError: no rule names it, and it is none of `LOGICAL_AXES`: what it was meant to be split
        over cannot be known, and leaving it whole would be silent.
    """
    if axis in RULE_NAMES:
        return getattr(rules, axis) or (getattr(rules, _AS[axis]) if axis in _AS else ())
    if axis == "rank":
        return ()
    if axis in rules.own_rules:
        return rules.own_rules[axis]
    known = rules.logical_axes
    raise UserError(
        f"no logical axis {axis!r}{suggest(str(axis), known)}: they are {', '.join(known)}; "
        f'one of your own is named by the layout\'s rules, as {{"{axis}": None}} where it is '
        f'whole, or by a run\'s setting rules.own=["{axis}="]'
    )
