"""What the front door refuses, each in a sentence that says what was found and what to try."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from strangers import own_rehearsal

import jaxpar
from jaxpar import parallel, rehearse, verify
from jaxpar.kernels import masks


def layout(**mesh: int) -> jaxpar.Layout:
    return jaxpar.Layout(jaxpar.make_mesh(**mesh))


def alone() -> jaxpar.Layout:
    return jaxpar.Layout(
        jaxpar.make_mesh(
            data=1,
            devices=jax.devices()[:1],
        )
    )


def attend(mask: Any, context: Any = "ring") -> Any:
    q = jnp.ones((2, 16, 4, 8))
    return parallel.attention(q, q, q, mask, layout(context=8), context=context)


IDS = jnp.zeros((2, 16), int)
X = jnp.ones((8, 16, 8))
W = jnp.ones((8, 32))
EXPERTS = (
    jnp.ones((8, 4)),
    jnp.ones((4, 8, 32)),
    jnp.ones((4, 8, 32)),
    jnp.ones(
        (4, 32, 8),
    ),
)


def experts(
    number: int,
    shape: tuple[int, ...],
    count: int = 2,
) -> Any:
    """The experts with one weight of another shape."""
    weights = [
        jnp.ones(shape) if place == number else weight for place, weight in enumerate(EXPERTS)
    ]
    return parallel.expert_mlp(X, *weights, layout(data=8), experts_per_token=count)


def loss_of(**options: Any) -> Any:
    return parallel.linear_cross_entropy(
        X,
        W.T,
        jnp.ones((8, 16), int),
        layout(data=8),
        **options,
    )


# Arguments of the wrong type or size, each of which once gave a traceback, or split nothing.
WRONG: dict[str, tuple[Callable[[], Any], str]] = {
    "rules of no form": (
        lambda: jaxpar.Layout(jaxpar.make_mesh(fsdp=8), "fsdp"),  # pyright: ignore[reportArgumentType]
        r"a dict or a list of pairs, and were given 'fsdp': write \{\"embed\": \"fsdp\"\}",
    ),
    "a mesh by name": (
        lambda: jaxpar.Layout("v5e"),
        "mesh is a jax.sharding.Mesh, and was given the string 'v5e'",
    ),  # pyright: ignore[reportArgumentType]
    "a sharding of a string": (
        lambda: layout(fsdp=8).sharding("embed", (8,)),
        r"tuple of .* the string 'embed': write \('embed',\)",
    ),
    "a spec of a string": (lambda: layout(fsdp=8).spec("embed"), "was given the string 'embed'"),  # pyright: ignore[reportArgumentType]
    "a tree of numbers": (
        lambda: layout(fsdp=8).sharding({"w": 3}),
        r"w takes a tuple .* given a value of type int",
    ),
    "a constraint of a string": (
        lambda: layout(fsdp=8).constrain(X, "batch"),
        "was given the string 'batch'",
    ),  # pyright: ignore[reportArgumentType]
    "a column by a string": (
        lambda: parallel.column_linear(X, W, "mlp", layout(tensor=8)),
        r"column_linear takes .* write \('mlp',\)",
    ),
    "columns by one axis": (
        lambda: parallel.column_linear(X, (W, W), "mlp", layout(tensor=8)),
        "2 weights and the axes 'mlp': give axes",
    ),
    "a row by a string": (
        lambda: parallel.row_linear(
            jnp.ones((8, 16, 32)),
            W.T,
            "mlp",
            layout(tensor=8),
        ),
        "row_linear takes a tuple",  # pyright: ignore[reportArgumentType]
    ),
    "a column of another width": (
        lambda: parallel.column_linear(
            X,
            jnp.ones((16, 32)),
            ("mlp",),
            layout(tensor=8),
        ),
        r"column_linear: an input of shape \(8, 16, 8\) does not fit a weight whose first dim "
        r"is 16",
    ),
    "a row of another width": (
        lambda: parallel.row_linear(
            jnp.ones((8, 16, 32)), jnp.ones((16, 8)), ("mlp",), layout(tensor=8)
        ),
        r"row_linear: an input of shape \(8, 16, 32\) does not fit a weight whose first dim is 16",
    ),
    "a low rank of another width": (
        lambda: parallel.rank_linear(
            X,
            jnp.ones((4, 32)),
            ("mlp",),
            layout(tensor=8),
        ),
        "whose first dim is 4",
    ),
    "a bias of half a weight": (
        lambda: parallel.column_linear(
            X,
            W,
            ("mlp",),
            layout(tensor=8),
            biases=jnp.arange(16.0),
        ),
        r"column_linear: a bias has the shape of the weight's output dims, \(32,\), and was "
        r"given one of shape \(16,\)",
    ),
    "a bias of a row": (
        lambda: parallel.row_linear(
            jnp.ones((8, 16, 32)), W.T, ("mlp",), layout(tensor=8), bias=jnp.ones(4)
        ),
        r"row_linear: a bias has the shape .*, \(8,\), and was given one of shape \(4,\)",
    ),
    "a bias for one head": (
        lambda: parallel.column_linear(
            X,
            jnp.ones((8, 4, 2)),
            ("kv_heads", "head_dim"),
            layout(data=8),
            biases=jnp.ones((1, 2)),
        ),
        r"output dims, \(4, 2\), and was given one of shape \(1, 2\)",
    ),
    "a bias that is a number": (
        lambda: parallel.column_linear(
            X,
            W,
            ("mlp",),
            layout(data=8),
            biases=3,
        ),
        "was given a value of type int",
    ),
    "one bias for two weights": (
        lambda: parallel.column_linear(
            X, (W, W), (("mlp",), ("mlp",)), layout(data=8), biases=(jnp.ones(32),)
        ),
        "2 weights and 1 biases: give one for each, or None",
    ),
    "scores of another width": (
        lambda: parallel.logits(
            X,
            jnp.ones((32, 16)),
            layout(tensor=8),
        ),
        "first dim is 16",
    ),
    "a loss of another width": (
        lambda: parallel.linear_cross_entropy(
            X, jnp.ones((32, 16)), jnp.ones((8, 16), int), layout(tensor=8)
        ),
        "linear_cross_entropy: an input of shape",
    ),
    "labels of another shape": (
        lambda: parallel.linear_cross_entropy(
            X,
            W.T,
            jnp.ones((8, 8), int),
            layout(data=8),
        ),
        r"an integer label for each token \(8, 16\), and was given int32 of shape \(8, 8\)",
    ),
    "labels that are no numbers of words": (
        lambda: parallel.linear_cross_entropy(
            X,
            W.T,
            jnp.ones((8, 16)),
            layout(data=8),
        ),
        "an integer label",
    ),
    "ids that are no numbers of words": (
        lambda: parallel.lookup(
            W.T,
            jnp.ones((8, 16)),
            "vocab",
            layout(data=8),
        ),
        "lookup takes ids of an integer dtype",
    ),
    "a batch that shards do not divide": (
        lambda: parallel.column_linear(
            X[:6],
            W,
            ("mlp",),
            layout(data=8),
        ),
        r"x: dim 0 \(batch\) has size 6, which data=8 does not divide",
    ),
    "ids that shards do not divide": (
        lambda: parallel.lookup(
            W.T,
            jnp.ones((6, 16), int),
            "vocab",
            layout(data=8),
        ),
        r"ids: dim 0 \(batch\)",
    ),
    "labels that shards do not divide": (
        lambda: parallel.linear_cross_entropy(
            X[:6],
            W.T,
            jnp.ones((6, 16), int),
            layout(data=8),
        ),
        r"x: dim 0 \(batch\)",
    ),
    "queries that shards do not divide": (
        lambda: parallel.attention(
            *[jnp.ones((6, 16, 4, 8))] * 3,
            masks.Causal(),
            layout(data=8),
        ),
        r"q: dim 0 \(batch\) has size 6, which data=8 does not divide",
    ),
    "a mask that is an array": (
        lambda: attend(jnp.ones((16, 16), bool)),
        r"given an array bool\[16, 16\]",
    ),
    "a mesh in place of a layout": (
        lambda: parallel.column_linear(X, W, ("mlp",), jaxpar.make_mesh(data=8)),  # pyright: ignore[reportArgumentType]
        "column_linear takes a jaxpar.Layout, and was given a value of type Mesh",
    ),
    "a gate of another width": (lambda: experts(1, (4, 16, 32)), "expert_mlp: gate has shape"),
    "a router of another width": (lambda: experts(0, (16, 4)), "expert_mlp: router has shape"),
    "a down of another width": (lambda: experts(3, (4, 16, 8)), "expert_mlp: down has shape"),
    "more experts than there are": (
        lambda: experts(0, (8, 4), 5),
        "experts_per_token as a whole number from 1 to 4, and was given .*=5",
    ),
    "experts by a float": (lambda: experts(0, (8, 4), 1.0), "was given experts_per_token=1.0"),  # pyright: ignore[reportArgumentType]
    "text that weighs": (
        lambda: parallel.expert_mlp(
            X,
            *EXPERTS,
            layout(data=8),
            experts_per_token=2,
            text_BS=jnp.full((8, 16), 2),  # pyright: ignore[reportArgumentType]
        ),
        r"text_BS as a boolean for each token \(8, 16\), and was given int32 of shape \(8, 16\)",
    ),
    "text of another shape": (
        lambda: parallel.expert_mlp(
            X, *EXPERTS, layout(data=8), experts_per_token=2, text_BS=jnp.ones((8, 4), bool)
        ),
        r"was given bool of shape \(8, 4\)",
    ),
    "a vocabulary below nothing": (
        lambda: loss_of(vocab_size=-1),
        "vocab_size as a whole number from 0 to 32",
    ),
    "a vocabulary past the head": (lambda: loss_of(vocab_size=999), "and was given vocab_size=999"),
    "a z-loss that is no number": (
        lambda: loss_of(z_loss=float("nan")),
        "z_loss as a finite number of at least 0",
    ),
    "scores past the head": (
        lambda: parallel.logits(X, W.T, layout(data=8), vocab_size=99),
        "vocab_size=99",
    ),
    "a cap below nothing": (
        lambda: parallel.logits(
            X,
            W.T,
            layout(data=8),
            softcap=-3,
        ),
        "softcap=-3",
    ),
    "all dropped": (
        lambda: parallel.dropout(X, 1.0, jax.random.key(0)),
        "rate as a finite number of at least 0 and b",
    ),
    "a lookup by a tuple": (
        lambda: parallel.lookup(W.T, jnp.ones((8, 16), int), ("vocab",), layout(data=8)),  # pyright: ignore[reportArgumentType]
        r'lookup takes one logical axis, such as "vocab", or None, and was given \(\'vocab\',\)',
    ),
    "no batch in order": (
        lambda: parallel.in_order(None, layout(data=8)),
        "in_order takes arrays .* was given None",
    ),  # pyright: ignore[reportArgumentType]
    "a batch without tokens": (
        lambda: parallel.in_order({"labels": IDS}, layout(data=8)),
        "among them, and was given the names labels",
    ),
    "an order of no strategy": (
        lambda: parallel.in_order({"tokens": IDS}, layout(data=8), "rnig"),  # pyright: ignore[reportArgumentType]
        r"no context strategy 'rnig' \(did you mean 'ring'\?\)",
    ),
    "a natural order by no layout": (
        lambda: parallel.in_natural_order(X, None),
        "takes a jaxpar.Layout",
    ),  # pyright: ignore[reportArgumentType]
}

RULES: dict[str, tuple[Any, str]] = {
    "a set, whose order is that of hashes": (
        {"fsdp", "data"},
        r"rules.embed is a mesh axis, a tuple of them, or None",
    ),
    "false": (False, "and was given False: write"),
    "nothing": (0, "was given 0"),
    "a number": (3, "was given 3"),
    "a dictionary": ({"fsdp": 1}, r"was given {'fsdp': 1}"),
    "an axis twice": (("fsdp", "fsdp"), "rules.embed names the mesh axis 'fsdp' twice"),
    "none within": (("fsdp", None), "rules.embed names no mesh axis: None: mesh axes are"),
    "a tuple within": ((("fsdp", "tensor"),), r"names no mesh axis: \('fsdp', 'tensor'\)"),
}


@pytest.mark.parametrize("what", RULES)
def test_a_rule_is_an_axis_or_a_tuple_of_axes(what: str) -> None:
    given, said = RULES[what]
    with pytest.raises(jaxpar.UserError, match=said):
        jaxpar.ShardingRules(embed=given)


def test_a_rule_may_be_written_in_other_ways() -> None:
    wanted = ("data", "fsdp")
    for given in (wanted, [*wanted], P(*wanted)):
        assert jaxpar.ShardingRules(embed=given).embed == wanted  # pyright: ignore[reportArgumentType]
    assert jaxpar.ShardingRules(embed="fsdp", mlp=None) == jaxpar.ShardingRules(
        embed=("fsdp",), mlp=()
    )  # pyright: ignore[reportArgumentType]


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "a mesh by a dictionary": (
        lambda: jaxpar.make_mesh({"data": 2}),  # pyright: ignore[reportArgumentType]
        r"takes a MeshSpec, or sizes by name, and was given {'data': 2}: write make_mesh\(data=2\)",
    ),
    "a size in words": (
        lambda: jaxpar.make_mesh(data="2"),
        "mesh.data as a whole number, and was given mesh.data='2'",
    ),  # pyright: ignore[reportArgumentType]
    "a size of half a device": (
        lambda: jaxpar.make_mesh(data=2.0, tensor=4),
        "was given mesh.data=2.0",
    ),  # pyright: ignore[reportArgumentType]
    "a size that is true": (lambda: jaxpar.make_mesh(data=True), "was given mesh.data=True"),
    "devices by number": (
        lambda: jaxpar.make_mesh(data=2, devices=2),
        "list of jax's devices, and was given 2",
    ),  # pyright: ignore[reportArgumentType]
    "no devices": (
        lambda: jaxpar.make_mesh(data=-1, devices=[]),
        r"list of jax's devices, and was given \[\]",
    ),
    "a name on one device": (
        lambda: alone().constrain(X, ("bogus", None, None)),
        "no logical axis 'bogus'",
    ),  # pyright: ignore[reportArgumentType]
    "dims on one device": (
        lambda: alone().constrain(X, ("batch",)),
        r"1 logical axes \(batch\) of an array of shape",
    ),
    "a mesh axis": (
        lambda: jaxpar.make_mesh(tensr=2),
        r"no mesh axis 'tensr' \(did you mean 'tensor'\?\)",
    ),
    "a spec and sizes": (
        lambda: jaxpar.make_mesh(jaxpar.MeshSpec(), tensor=2),
        "given both: tensor=2",
    ),
    "a rule": (
        lambda: jaxpar.Layout(jaxpar.make_mesh(tensor=8), jaxpar.ShardingRules(mlp="tensr")),
        r"rules.mlp names no mesh axis: 'tensr' \(did you mean",
    ),  # pyright: ignore[reportArgumentType]
    "a logical axis": (
        lambda: layout(tensor=8).sharding(("emebd",)),
        r"no logical axis 'emebd' \(did you mean",
    ),
    "too few axes": (
        lambda: layout(tensor=8).sharding(("embed",), (8, 8)),
        r"1 logical axes \(embed\) of an array of shape \(8, 8\)",
    ),
    "a dtype": (
        lambda: jaxpar.Layout(jaxpar.make_mesh(data=8), compute="bf16"),
        "was given compute='bf16'",
    ),  # pyright: ignore[reportArgumentType]
    "ids of two kinds": (
        lambda: attend(masks.Causal() & masks.Segments(IDS, IDS + 1)),
        r"write Segments\(ids, ids\)",
    ),
    "ids by or": (
        lambda: attend(masks.Causal() | masks.Segments(IDS, IDS)),
        "has its Segments once, joined by &",
    ),
    "a router": (
        lambda: parallel.expert_mlp(
            X, *EXPERTS, layout(data=8), experts_per_token=1, router=cast(Any, "top_k")
        ),
        "has no router 'top_k': try one of token_choice, expert_choice",
    ),
    "a strategy": (
        lambda: attend(masks.Causal(), "rnig"),
        r"no context strategy 'rnig' \(did you mean 'ring'\?\)",
    ),
    "a form of overlap": (
        lambda: parallel.column_linear(
            jnp.ones((1, 8, 8)),
            jnp.ones((8, 8)),
            ("mlp",),
            layout(tensor=8),
            overlap="rnig",  # pyright: ignore[reportCallIssue, reportArgumentType]
        ),
        r"is one of xla, ring, bidirectional.*, found 'rnig' \(did you mean 'ring'\?\)",
    ),
    "a function that is not jitted": (
        lambda: rehearse.step(lambda x: x, X, target="v5e-8"),
        r"takes a jitted function, .*: write jax.jit\(step\)",
    ),
    "no target": (
        lambda: rehearse.step(jax.jit(jnp.sin), X, target=None),
        "a target is a name, .* and None was given",
    ),  # pyright: ignore[reportArgumentType]
    "a target by number": (lambda: jaxpar.load_target(3), "a target is a name"),  # pyright: ignore[reportArgumentType]
    "options in a list": (
        lambda: rehearse.step(jax.jit(jnp.sin), X, target="v5e-8", compiler_options=["xla_a=1"]),  # pyright: ignore[reportArgumentType]
        r"compiler_options by name, and was given \['xla_a=1'\]",
    ),
    "tokens in words": (
        lambda: rehearse.step(jax.jit(jnp.sin), X, target="v5e-8", tokens="8"),  # pyright: ignore[reportArgumentType]
        "tokens as a whole number of at least 0, and was given tokens='8'",
    ),
    "shapes on a mesh of no devices": (
        lambda: rehearse.step(
            jax.jit(jnp.sin),
            jax.ShapeDtypeStruct(
                (8,), jnp.float32, sharding=NamedSharding(layout(tensor=8).mesh.abstract_mesh, P())
            ),
            target="v5e-8",
        ),
        "NamedShardings on a mesh of devices, or none, and was given NamedSharding",
    ),
    "devices of another": (
        lambda: rehearse.step(
            own_rehearsal.step, *own_rehearsal.shapes(layout(tensor=8)), target="v5e-8"
        ),
        r"the arguments lie on 8 devices \(cpu\) and v5e-8 has 8 \(tpu\): make the mesh with "
        r"devices=",
    ),
    "no shardings": (
        lambda: verify.gradients(
            lambda p, b: jnp.sum(p),
            lambda p, b: jnp.sum(p),
            np.ones(8),
            np.ones(8),
            (jax.sharding.SingleDeviceSharding(jax.devices()[0]),) * 2,
        ),
        "needs NamedShardings of one mesh, and was given SingleDeviceSharding of 0",
    ),
    "a loss that is an array": (
        lambda: verify.gradients(
            lambda p, b: p * b,
            lambda p, b: jnp.sum(p),
            np.ones(8),
            np.ones(8),
            (layout(data=8).sharding((None,)),) * 2,
        ),
        r"needs a loss that is a scalar, or \(scalar, gradients\)",
    ),
}


def compare_with(
    loss: Any = None, reference: Any = None, params: Any = None, batch: Any = None, **options: Any
) -> Any:
    """`verify.gradients` of a product, with one thing in another form."""
    if params is None:
        params = np.ones(8, np.float32)
    if batch is None:
        batch = np.ones(8, np.float32)
    right = product if not isinstance(params, dict) else lambda p, b: jnp.sum(b)
    whole = layout(data=8).sharding(())
    shardings = (
        whole,
        layout(data=8).sharding(("batch",)) if isinstance(batch, np.ndarray) else whole,
    )
    return verify.gradients(loss or right, reference or right, params, batch, shardings, **options)


def product(params: Any, batch: Any) -> Any:
    return jnp.sum(params * batch)


VERIFIED: dict[str, tuple[Callable[[], Any], str]] = {
    "a loss with metrics": (
        lambda: compare_with(lambda p, b: (product(p, b), {"accuracy": 1.0})),
        r"beside its scalar as its gradients, .* given {'accuracy': .*: return the scalar alone",
    ),
    "some of the gradients": (
        lambda: compare_with(
            lambda p, b: (jnp.sum(b), {"a": p["a"]}), params={"a": np.ones(8), "b": np.ones(8)}
        ),
        "as its gradients, an array for each of params",
    ),
    "a reference with metrics": (
        lambda: compare_with(reference=lambda p, b: (product(p, b), 3.0)),
        "the loss alone",
    ),
    "a loss of integers": (
        lambda: compare_with(lambda p, b: jnp.int32(3)),
        "needs a loss that is a scalar",
    ),
    "a counter in params": (
        lambda: compare_with(
            params={
                "w": np.ones(8),
                "n": np.int32(3),
            }
        ),
        "n is int32: put what is not trained into",
    ),
    "no params": (lambda: compare_with(params={}), "params has no arrays"),
    "a key in the batch": (
        lambda: compare_with(
            batch=(
                np.ones(8),
                jax.random.key(0),
            )
        ),
        "batch 1 is a key of jax.random: give jax.random",
    ),
    "words in the batch": (
        lambda: compare_with(batch=("text",)),
        "takes arrays of numbers, and batch 0 is 'text'",
    ),
    "a batch of three": (
        lambda: compare_with(batch=np.ones(3)),
        r"batch of shape \(3,\) is not divided by .* data=8",
    ),
    "a tolerance of anything": (
        lambda: compare_with(tolerance=np.inf),
        "a finite number above 0 and below 1",
    ),
    "a tolerance below nothing": (lambda: compare_with(tolerance=-1.0), "was given tolerance=-1.0"),
    "a tolerance in words": (lambda: compare_with(tolerance="1e-3"), "was given tolerance='1e-3'"),
}


@pytest.mark.parametrize("what", VERIFIED)
def test_what_verify_is_wrongly_given_is_a_sentence(what: str) -> None:
    do, said = VERIFIED[what]
    with pytest.raises(jaxpar.UserError, match=said):
        do()


@pytest.mark.usefixtures("unchecked_shapes")
@pytest.mark.parametrize("what", [*REFUSED, *WRONG])
def test_a_mistake_is_a_sentence(what: str) -> None:
    do, said = (REFUSED | WRONG)[what]
    with pytest.raises(jaxpar.UserError, match=said):
        do()


def test_a_full_mask_is_right_where_the_strategy_can() -> None:
    q = jax.random.normal(
        jax.random.key(0),
        (2, 16, 8, 8),
    )
    here = layout(context=8)
    whole = jax.jit(lambda q: parallel.attention(q, q, q, masks.Full()))(q)
    found = jax.jit(lambda q: parallel.attention(q, q, q, masks.Full(), here, context="ulysses"))(q)
    # outputs of order one, float32 sums in another order
    np.testing.assert_allclose(found, whole, atol=5e-6)


def test_a_partition_spec_may_leave_out_what_is_replicated() -> None:
    assert layout(fsdp=8).sharding(P("embed"), (8, 3)).spec == P("fsdp")


def test_a_loss_whose_copies_differ_is_not_equal() -> None:
    """The first device's copy is right, and the gradients are."""
    here = layout(data=8)

    def wrong(params: Any, batch: Any) -> Any:
        def local(params: Any, batch: Any) -> Any:
            total = jax.lax.psum(jnp.sum(params * batch), "data")
            grads = jax.lax.psum(jnp.sum(batch), "data") * jnp.ones_like(params)
            return total + jax.lax.axis_index("data"), grads

        specs = P(), P("data")
        return jax.shard_map(local, mesh=here.mesh, in_specs=specs, out_specs=P(), check_vma=False)(
            params, batch
        )

    verdict = verify.gradients(
        wrong,
        lambda params, batch: jnp.sum(params * batch),
        np.float32(2),
        np.arange(1, 9, dtype=np.float32),
        (here.sharding(()), here.sharding(("batch",))),
    )
    assert not verdict.equal and not verdict.wrong
    assert verdict.loss_error > 0.01
