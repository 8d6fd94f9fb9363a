"""Sharding rules in the three forms that people write, on any mesh, with logical axes of one's
own.
"""

from __future__ import annotations

import logging
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import chex
import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

import jaxpar
from jaxpar.base.config import load_config
from jaxpar.base.errors import UserError
from jaxpar.base.layout import rules as rules_module
from jaxpar.base.layout.rules import as_rules
from jaxpar.base.toml import to_toml


def foreign() -> jax.sharding.Mesh:
    return jax.make_mesh((2, 4), ("data", "model"))


def test_one_rule_in_three_forms_makes_equal_layouts_that_split() -> None:
    mesh = jaxpar.make_mesh(fsdp=2, data=4)
    layouts = [
        jaxpar.Layout(mesh, {"embed": "data", "seq": None}),
        jaxpar.Layout(mesh, [("seq", None), ("embed", ["data"])]),
        jaxpar.Layout(mesh, jaxpar.ShardingRules(embed="data", seq=None)),  # pyright: ignore[reportArgumentType]
    ]
    assert len(set(layouts)) == 1
    assert layouts[0].spec(("embed", "mlp")) == P("data")


def test_an_axis_that_is_not_written_has_its_default_in_every_form() -> None:
    """The dict is no whole table: a batch that nobody named would else be whole on every device."""
    layout = jaxpar.Layout(foreign(), {"mlp": "model", "heads": "model"})
    assert layout.spec(("batch", "seq")) == P("data")
    # this default names no axis of the mesh
    assert layout.spec(("embed", "mlp")) == P(None, "model")
    assert layout.mesh_axes("vocab") == ()


def test_what_follows_another_axis_does_so_where_its_default_is_not_on_the_mesh() -> None:
    layout = jaxpar.Layout(foreign(), {"heads": "model", "seq": "data", "batch": None})
    assert layout.mesh_axes("kv_heads") == ("model",)
    assert layout.mesh_axes("residual_seq") == ("data",)
    whole = jaxpar.Layout(foreign(), {"heads": "model", "kv_heads": None})
    assert whole.mesh_axes("kv_heads") == ()
    ours = jaxpar.Layout(jaxpar.make_mesh(data=2, tensor=4), {"heads": "data", "batch": None})
    assert ours.mesh_axes("kv_heads") == ("tensor",)


def test_logical_axes_of_ones_own_are_split_as_their_rule_says() -> None:
    layout = jaxpar.Layout(foreign(), {"state": ("data", "model"), "scale": None})
    assert layout.spec(("scale", "state")) == P(None, ("data", "model"))
    assert layout.size("state") == 8
    assert layout == jaxpar.Layout(foreign(), [("scale", None), ("state", ("data", "model"))])
    assert layout != jaxpar.Layout(foreign(), {"state": "data", "scale": None})
    place = layout.sharding({"h": ("batch", "scale")}, {"h": jnp.zeros((4, 6))})
    assert place["h"].spec == P("data")


def test_a_layout_of_any_mesh_is_a_static_argument() -> None:
    @chex.assert_max_traces(n=1)
    def double(x: jax.Array, layout: jaxpar.Layout) -> jax.Array:
        return layout.constrain(2 * x, ("batch", "state"))

    jitted = jax.jit(double, static_argnums=1)
    x = jnp.ones((4, 8))
    for rules in ({"state": "model"}, [("state", "model")]):
        out = jitted(x, jaxpar.Layout(foreign(), rules))
    assert out.sharding.spec == P("data", "model")


def test_a_mesh_with_explicit_axes_is_taken_with_automatic_ones() -> None:
    mesh = foreign()
    assert AxisType.Explicit in mesh.axis_types
    layout = jaxpar.Layout(mesh)
    assert set(layout.mesh.axis_types) == {AxisType.Auto}
    x = jax.device_put(jnp.ones((4, 8)), jax.sharding.NamedSharding(mesh, P("data")))
    out = jax.jit(lambda x: layout.constrain(x + 1, ("batch", None)))(x)
    assert out.sharding.spec == P("data")


def test_a_front_door_function_takes_a_dict_and_a_foreign_mesh_too() -> None:
    assert jaxpar.spec_for(("batch", "mlp"), {"mlp": "model"}, foreign()) == P("data", "model")


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "a mesh axis that is not there, in a dict": (
        lambda: jaxpar.Layout(foreign(), {"embed": "fsdp"}),
        "rules.embed .*'fsdp': .*data, model",
    ),
    "and in pairs, with the near one": (
        lambda: jaxpar.Layout(foreign(), [("embed", "modle")]),
        r"rules.embed names no mesh axis: 'modle' \(did you mean 'model'\?\)",
    ),
    "and in our dataclass, though it is the default": (
        lambda: jaxpar.Layout(foreign(), jaxpar.ShardingRules(embed="fsdp")),  # pyright: ignore[reportArgumentType]
        "rules.embed names no mesh axis: 'fsdp'",
    ),
    "for an axis of one's own": (
        lambda: jaxpar.Layout(foreign(), {"state": ("data", "tensor")}),
        "rules.state names no mesh axis: 'tensor'",
    ),
    "an axis that no rule names": (
        lambda: jaxpar.Layout(foreign(), {"state": "model"}).spec(("sate",)),
        r"no logical axis 'sate' \(did you mean 'state'\?\).* as \{\"sate\": None\} where it is",
    ),
    "two rules for one axis": (
        lambda: jaxpar.Layout(foreign(), [("mlp", "model"), ("mlp", "data")]),
        r"the rules name 'mlp' twice, as \('model',\) and as \('data',\): Flax would",
    ),
    "a rank that is split": (
        lambda: jaxpar.Layout(foreign(), {"rank": "model"}),
        "rules.rank=.*never split",
    ),
    "a name that is none": (
        lambda: jaxpar.Layout(foreign(), {3: "model"}),  # pyright: ignore[reportArgumentType]
        "were given {3",
    ),
    "a name that no word can have": (
        lambda: jaxpar.Layout(foreign(), {"a=b": "model"}),
        "'a=b': a name has",
    ),
    "an axis of ours among one's own": (
        lambda: jaxpar.ShardingRules(own=("mlp=tensor",)),
        "rules.own: 'mlp=tensor'",
    ),
    "an axis of one's own twice": (
        lambda: jaxpar.ShardingRules(own=("state=tensor", "state=data")),
        "rules.own names the logical axis 'state' twice",
    ),
    "a word without its mesh axes": (
        lambda: jaxpar.ShardingRules(own=("state",)),
        "rules.own: 'state'",
    ),
    "a flat list": (
        lambda: jaxpar.Layout(foreign(), ["embed", "model"]),  # pyright: ignore[reportArgumentType]
        "a list of pairs",
    ),
    "a set of axes": (
        lambda: jaxpar.Layout(foreign(), {"state": {"data", "model"}}),
        "rules.state is a mesh axis",
    ),
    "an axis that splits two dims": (
        lambda: jaxpar.Layout(foreign(), {"mlp": "data"}).spec(("batch", "mlp")),
        "data=2 is used twice",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_used_is_refused_by_name(what: str) -> None:
    make, said = REFUSED[what]
    with pytest.raises(UserError, match=said):
        make()


def test_a_name_that_stands_twice_alike_is_one_rule() -> None:
    assert jaxpar.Layout(foreign(), [("mlp", "model"), ("mlp", ["model"])]) == jaxpar.Layout(
        foreign(), {"mlp": "model"}
    )


def test_a_mesh_axis_that_splits_nothing_is_said(caplog: pytest.LogCaptureFixture) -> None:
    rules_module._warn_once.cache_clear()
    with caplog.at_level(logging.WARNING, logger="jaxpar"):
        jaxpar.Layout(foreign(), {"mlp": "model", "gates": None})
        assert not caplog.messages
        jaxpar.Layout(foreign())
    (idle,) = caplog.messages
    assert idle.startswith("no rule names the mesh axis model=4, so its devices all do the same")


@pytest.mark.parametrize(
    ("written", "meant"), [("mpl", "mlp"), ("mlp2", "mlp"), ("emb", "embed"), ("hedas", "heads")]
)
def test_a_name_of_one_s_own_that_looks_like_ours_is_said(
    written: str, meant: str, caplog: pytest.LogCaptureFixture
) -> None:
    """It may be meant, so it is no error: `mlp2` is split as its rule says."""
    rules_module._warn_once.cache_clear()
    with caplog.at_level(logging.WARNING, logger="jaxpar"):
        layout = jaxpar.Layout(foreign(), {written: "model", "gates": None})
    assert layout.spec((written,)) == P("model")
    assert caplog.messages == [
        f"the rules name a logical axis of your own, {written!r} (did you mean {meant!r}?)"
    ]


def test_rules_of_one_s_own_are_words_in_a_file(tmp_path: Path) -> None:
    """So a run with them can be saved and resumed; their order means nothing."""
    wanted = jaxpar.ShardingRules(own=("state=data,fsdp", "gates="))
    assert wanted == as_rules({"gates": None, "state": ("data", "fsdp")})
    assert wanted.own_rules == {"gates": (), "state": ("data", "fsdp")}
    file = tmp_path / "run.toml"
    file.write_text(
        '[model]\nfamily = "gpt2"\n[rules.own]\nstate = "data, fsdp"\ngates = ""\n',
        encoding="utf-8",
    )
    config = load_config(str(file))
    assert config.rules == wanted
    file.write_text(to_toml(config), encoding="utf-8")
    assert load_config(str(file)) == config
    own = '[model]\nfamily = "gpt2"\n[rules.own]\nstate = ["data", "fsdp"]\ngates = []\n'
    file.write_text(own, encoding="utf-8")
    assert load_config(str(file)).rules == wanted
    file.write_text('[rules]\nstate_dim = "tensor"\n', encoding="utf-8")
    with pytest.raises(UserError, match=r"unknown key rules.state_dim.* in \[rules.own\]$"):
        load_config(str(file))


def test_default_rules_stay_defaults_where_they_are_copied_and_sent() -> None:
    """A plan's rules are replaced, pickled for other processes, and laid on meshes without
    devices.
    """
    rules = pickle.loads(pickle.dumps(jaxpar.ShardingRules()))
    mesh = AbstractMesh((2, 4), ("data", "model"))
    assert jaxpar.spec_for(("batch", "embed"), rules, mesh) == P("data")
