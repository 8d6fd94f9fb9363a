"""Hugging Face checkpoints, without PyTorch: round trips to the bit, streaming, refusals. See
test_parity too.
"""

from __future__ import annotations

import dataclasses
import gc
import itertools
import json
import re
import tracemalloc
import zlib
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from tiers import some

from jaxpar.base.config import ModelConfig
from jaxpar.base.errors import UserError
from jaxpar.base.layout.mesh import MeshSpec, make_mesh
from jaxpar.base.layout.plan import Plan
from jaxpar.base.layout.sharding import ShardingRules
from jaxpar.models import Model, Params
from jaxpar.models.hf import export as hf_export
from jaxpar.models.hf import families as hf_families
from jaxpar.models.hf import hf_config, model_config_from_hf
from jaxpar.models.hf import load as hf
from jaxpar.models.hf.export import export_hf, hf_tensors

GPT2 = ModelConfig(
    family="gpt2", vocab_size=101, layers=3, embed=16, heads=4, mlp=24, max_seq_len=12
)
LLAMA = dataclasses.replace(GPT2, family="llama", kv_heads=2, head_dim=6, tied_head=False)
MIXTRAL = dataclasses.replace(LLAMA, layers=2, experts=4)
CONFIGS = {
    "gpt2": GPT2,
    "gpt2-untied": dataclasses.replace(GPT2, tied_head=False),
    "llama": LLAMA,
    "llama-tied": dataclasses.replace(LLAMA, tied_head=True),
    "mixtral": MIXTRAL,
    "mostly-padding": dataclasses.replace(LLAMA, vocab_size=5),
}
PLANS = {
    "one": MeshSpec(),
    "cube": MeshSpec(data=2, fsdp=2, tensor=2),
    "fsdp4-tensor2": MeshSpec(fsdp=4, tensor=2),
    "expert4-tensor2": MeshSpec(expert=4, tensor=2),
}


def plan_of(spec: MeshSpec, rules: ShardingRules | None = None) -> Plan:
    devices = 1 if spec == MeshSpec() else 8
    return Plan(make_mesh(spec, jax.devices()[:devices]), rules or ShardingRules())


ONE = plan_of(MeshSpec())
CUBE = plan_of(MeshSpec(data=2, fsdp=2, tensor=2))


def import_hf(path: Path, model: Model, plan: Plan) -> Params:
    """Import a checkpoint to the bit: those of `tensors_of` have entries that are not finite."""
    return hf.import_hf(path, model, plan, allow_nonfinite=True)


def tensors_of(config: ModelConfig) -> dict[str, np.ndarray]:
    """A checkpoint's tensors, random, written down here from Hugging Face's own modules and not
    from our tables.
    """
    V = config.vocab_size
    P = config.max_seq_len
    D = config.embed
    F = config.mlp
    Q = config.heads * (config.head_dim or D // config.heads)
    KV = config.kv_heads * config.head_dim
    if config.family == "gpt2":
        outer = {
            "transformer.wte.weight": (V, D),
            "transformer.wpe.weight": (P, D),
            "transformer.ln_f.weight": (D,),
            "transformer.ln_f.bias": (D,),
        }
        block = {
            "ln_1.weight": (D,),
            "ln_1.bias": (D,),
            "attn.c_attn.weight": (D, 3 * D),
            "attn.c_attn.bias": (3 * D,),
            "attn.c_proj.weight": (D, D),
            "attn.c_proj.bias": (D,),
            "ln_2.weight": (D,),
            "ln_2.bias": (D,),
            "mlp.c_fc.weight": (D, F),
            "mlp.c_fc.bias": (F,),
            "mlp.c_proj.weight": (F, D),
            "mlp.c_proj.bias": (D,),
        }
        blocks = "transformer.h"
    else:
        outer = {"model.embed_tokens.weight": (V, D), "model.norm.weight": (D,)}
        block = {
            "self_attn.q_proj.weight": (Q, D),
            "self_attn.k_proj.weight": (KV, D),
            "self_attn.v_proj.weight": (KV, D),
            "self_attn.o_proj.weight": (D, Q),
            "mlp.gate_proj.weight": (F, D),
            "mlp.up_proj.weight": (F, D),
            "mlp.down_proj.weight": (D, F),
            "input_layernorm.weight": (D,),
            "post_attention_layernorm.weight": (D,),
        }
        if config.experts:
            dense = {name: block.pop(f"mlp.{name}_proj.weight") for name in ("gate", "down", "up")}
            for e, w in itertools.product(
                range(config.experts),
                (
                    ("w1", "gate"),
                    ("w2", "down"),
                    ("w3", "up"),
                ),
            ):
                block[f"block_sparse_moe.experts.{e}.{w[0]}.weight"] = dense[w[1]]
            block["block_sparse_moe.gate.weight"] = (config.experts, D)
        blocks = "model.layers"
    if config.tied_head:
        head = {}
    else:
        head = {"lm_head.weight": (V, D)}
    inner = {
        f"{blocks}.{i}.{name}": shape for i in range(config.layers) for name, shape in block.items()
    }
    generator = np.random.default_rng(0)
    tensors = {
        name: generator.normal(size=shape).astype(np.float32)
        for name, shape in (outer | inner | head).items()
    }
    for tensor in tensors.values():
        tensor.flat[:3] = -0.0, np.inf, np.nan  # what arithmetic on the way would change
    return tensors


def write(
    folder: Path,
    config: ModelConfig,
    tensors: dict[str, np.ndarray] | None = None,
) -> Path:
    folder.mkdir()
    save_file(tensors_of(config) if tensors is None else tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(hf_config(config)))
    return folder


def read(folder: Path) -> dict[str, np.ndarray]:
    """All tensors of an exported folder."""
    files = sorted(folder.glob("*.safetensors"))
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


def assert_same(
    found: dict[str, np.ndarray],
    wanted: dict[str, np.ndarray],
) -> None:
    """Equal float32 tensors, to the bit."""
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        bits = np.ascontiguousarray(found[name]).view(np.int32)
        np.testing.assert_array_equal(
            bits,
            tensor.view(np.int32),
            err_msg=name,
            strict=True,
        )


def replace_file(folder: Path, change) -> None:
    """Rewrite the tensors of a folder after `change(tensors)`."""
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


# Round trips


@pytest.mark.parametrize(
    ("mesh", "max_bytes"),
    [
        pytest.param(mesh, size, id=f"{mesh}-{files}", marks=marks)
        for number, mesh in enumerate(PLANS)
        for files, size, marks in [
            ("single", 5 * 10**9, [pytest.mark.slow] * (number % 2)),
            ("sharded", 4000, [pytest.mark.slow] * ((number + 1) % 2)),
        ]
    ],
)
@pytest.mark.parametrize("name", some(CONFIGS, 2))
def test_round_trip_is_exact(name, mesh, max_bytes, tmp_path):
    config = CONFIGS[name]
    plan = plan_of(PLANS[mesh])
    model = Model(config)
    source = write(tmp_path / "source", config)
    params = import_hf(source, model, plan)
    export_hf(params, model, tmp_path / "exported", max_bytes)
    assert_same(read(tmp_path / "exported"), tensors_of(config))
    again = import_hf(tmp_path / "exported", model, plan)
    jax.tree.map(np.testing.assert_array_equal, again, params)
    assert (tmp_path / "exported" / "model.safetensors").exists() == (max_bytes > 4000)


def test_every_parameter_has_its_sharding_and_its_values(tmp_path):
    """What went where, said a second time without the tables: transposes, heads, the thirds of
    c_attn, the padding.
    """
    tensors = tensors_of(GPT2)
    model = Model(GPT2)
    params = import_hf(write(tmp_path / "gpt2", GPT2), model, CUBE)
    assert jax.tree.structure(params) == jax.tree.structure(model.shapes())
    for leaf, shape in zip(
        jax.tree.leaves(params),
        jax.tree.leaves(model.shapes()),
        strict=True,
    ):
        assert (leaf.shape, leaf.dtype) == (shape.shape, np.float32)
    assert params["blocks"]["q"].sharding == CUBE.sharding(("layers", "embed", "heads", "head_dim"))
    table = np.asarray(params["embed"]["tokens"])
    assert table.shape == (128, 16) and not table[101:].any()
    np.testing.assert_array_equal(table[:101], tensors["transformer.wte.weight"])
    for layer in range(GPT2.layers):
        fused = tensors[f"transformer.h.{layer}.attn.c_attn.weight"]
        for part, name in enumerate("qkv"):
            wanted = fused[:, part * 16 : (part + 1) * 16].reshape(
                16,
                4,
                4,
            )
            np.testing.assert_array_equal(params["blocks"][name][layer], wanted)

    tensors = tensors_of(LLAMA)
    params = import_hf(write(tmp_path / "llama", LLAMA), Model(LLAMA), CUBE)
    for layer in range(LLAMA.layers):
        prefix = f"model.layers.{layer}."
        k = tensors[prefix + "self_attn.k_proj.weight"]
        np.testing.assert_array_equal(
            params["blocks"]["k"][layer],
            k.T.reshape(16, 2, 6),
        )
        np.testing.assert_array_equal(
            params["blocks"]["down"][layer], tensors[prefix + "mlp.down_proj.weight"].T
        )


def test_layers_experts_and_head_dim_may_be_split_too(tmp_path):
    config = dataclasses.replace(LLAMA, layers=4)
    rules = ShardingRules(layers=("stage",), head_dim=("context",))
    plan = plan_of(MeshSpec(stage=2, context=2, tensor=2), rules)
    params = import_hf(write(tmp_path / "source", config), Model(config), plan)
    assert params["blocks"]["q"].addressable_shards[0].data.shape == (2, 16, 2, 3)
    assert_same(dict(hf_tensors(params, Model(config))), tensors_of(config))
    compiled = hf_export._piece.lower(
        [params["blocks"]["q"]], (1,), "float32", 1.0, None, ()
    ).compile()
    assert "all-gather" not in compiled.as_text()  # of the layers, onto every device
    plan = plan_of(MeshSpec(fsdp=2, expert=4))
    params = import_hf(write(tmp_path / "mixtral", MIXTRAL), Model(MIXTRAL), plan)
    assert params["blocks"]["gate"].addressable_shards[0].data.shape == (2, 1, 8, 24)
    compiled = hf_export._piece.lower(
        [params["blocks"]["gate"]], (1, 2), "float32", 1.0, None, ()
    ).compile()
    assert "all-gather" not in compiled.as_text()


@pytest.mark.parametrize("family", [GPT2, LLAMA, MIXTRAL], ids=hf_families.model_type)
def test_tables_cover_every_parameter_once(family):
    for tied in (False, True):
        model = Model(dataclasses.replace(family, tied_head=tied))
        named = [
            param
            for _, *params in hf_families.HF_FAMILIES[
                hf_families.model_type(family)
            ].tensors.values()
            for param in params
        ]
        assert len(named) == len(set(named))
        assert set(hf.dim_letters(model)) == set(named) - ({"head.table"} if tied else set())


def test_imported_parameters_can_be_donated(tmp_path):
    params = import_hf(write(tmp_path / "source", GPT2), Model(GPT2), CUBE)
    step = jax.jit(
        lambda params: jax.tree.map(lambda leaf: leaf + 1, params),
        donate_argnums=0,
    )
    jax.block_until_ready(step(params))
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(params))


# Forms of a checkpoint


@pytest.mark.parametrize(
    "dtype",
    [ml_dtypes.bfloat16, np.float16],
    ids=["bfloat16", "float16"],
)
def test_half_precision_is_read_as_float32(dtype, tmp_path):
    tensors = {name: tensor.astype(dtype) for name, tensor in tensors_of(LLAMA).items()}
    params = import_hf(write(tmp_path / "source", LLAMA, tensors), Model(LLAMA), CUBE)
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {np.dtype(np.float32)}
    assert_same(
        dict(hf_tensors(params, Model(LLAMA))),
        {name: t.astype(np.float32) for name, t in tensors.items()},
    )


def test_bfloat16_export_rounds_to_nearest(tmp_path):
    model = Model(GPT2)
    params = import_hf(write(tmp_path / "source", GPT2), model, CUBE)
    export_hf(params, model, tmp_path / "exported", dtype="bfloat16")
    wanted = {
        name: tensor.astype(ml_dtypes.bfloat16).astype(np.float32)
        for name, tensor in tensors_of(GPT2).items()
    }
    assert_same(dict(hf_tensors(import_hf(tmp_path / "exported", model, ONE), model)), wanted)
    assert json.loads((tmp_path / "exported" / "config.json").read_text())["dtype"] == "bfloat16"


@pytest.mark.parametrize("config", [GPT2, LLAMA], ids=lambda config: config.family)
def test_names_without_prefix_and_old_buffers(config, tmp_path):
    """As the hub's own gpt2 has them, and checkpoints of old releases."""
    tensors = {
        re.sub(r"^(transformer|model)\.", "", name): tensor
        for name, tensor in tensors_of(config).items()
    }
    buffers = {
        "gpt2": ("h.0.attn.bias", "h.0.attn.masked_bias"),
        "llama": ("layers.0.self_attn.rotary_emb.inv_freq",),
    }
    tensors |= {name: np.ones((3, 3), np.uint8) for name in buffers[config.family]}
    params = import_hf(write(tmp_path / "source", config, tensors), Model(config), CUBE)
    assert_same(dict(hf_tensors(params, Model(config))), tensors_of(config))


def test_a_tied_head_may_stand_in_the_file_twice(tmp_path):
    tensors = tensors_of(GPT2)
    tensors["lm_head.weight"] = tensors["transformer.wte.weight"] = np.ones((101, 16), np.float32)
    source = write(tmp_path / "source", GPT2, tensors)
    params = import_hf(source, Model(GPT2), CUBE)
    assert "table" not in params["head"]
    replace_file(source, lambda tensors: tensors["lm_head.weight"].__setitem__((100, 15), 7))
    with pytest.raises(
        UserError, match=r'lm_head.weight is not the embedding.*write "tie_word_embeddings": false'
    ):
        import_hf(source, Model(GPT2), CUBE)


def test_index_and_file_sizes(tmp_path):
    model = Model(LLAMA)
    source = write(tmp_path / "source", LLAMA)
    export_hf(import_hf(source, model, ONE), model, tmp_path / "exported", 4000)
    index = json.loads((tmp_path / "exported" / "model.safetensors.index.json").read_text())
    tensors = tensors_of(LLAMA)
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in tensors.values())
    assert index["weight_map"].keys() == tensors.keys()
    for name in set(index["weight_map"].values()):
        inside = load_file(tmp_path / "exported" / name)
        assert {key for key, file in index["weight_map"].items() if file == name} == inside.keys()
        assert sum(tensor.nbytes for tensor in inside.values()) <= 4000 or len(inside) == 1


# Streaming: `gate`, the largest parameter, has 16 layers of half a MiB each, in four shards on CUBE

LARGE = dataclasses.replace(
    LLAMA,
    layers=16,
    embed=128,
    mlp=1024,
    head_dim=32,
    vocab_size=1100,
)
LAYER = 128 * 1024 * 4


@pytest.mark.slow
def test_import_holds_a_part_of_a_tensor_at_a_time(tmp_path, monkeypatch):
    """One device's part of one tensor, as it is read and as it is stored: not the parameter, not
    all its layers.
    """
    # A CPU device may keep a block as its own memory: stand-ins, so that only what waits for a
    # device is measured.
    monkeypatch.setattr(
        hf, "_put", lambda block, devices: [jnp.zeros(block.shape, device=one) for one in devices]
    )
    model = Model(LARGE)
    source = write(tmp_path / "source", LARGE)
    import_hf(source, model, CUBE)  # what jax allocates once, at first, is not ours
    _, _, peak = traced(lambda: import_hf(source, model, CUBE))
    # of the embedding, which has 1.07 layers, two devices have a half each
    assert LAYER / 4 < peak < 1.5 * LAYER


@pytest.mark.slow
def test_export_holds_one_tensor_at_a_time(tmp_path):
    model = Model(LARGE)
    source = write(tmp_path / "source", LARGE)
    export_hf(import_hf(source, model, CUBE), model, tmp_path / "first")  # compiles
    params = import_hf(source, model, CUBE)
    _, kept, peak = traced(lambda: export_hf(params, model, tmp_path / "second"))
    assert LAYER < peak < 5 * LAYER
    # jax caches what numpy has seen of an array: it must not be the parameters
    assert kept < LAYER / 2


def traced(function):
    """The result, and the bytes of Python and numpy memory that it kept and that it held at
    most.
    """
    tracemalloc.start()
    try:
        result = function()
        gc.collect()  # jax lets go of buffers late
        return result, *tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()


def test_each_byte_is_read_once(tmp_path, monkeypatch):
    """Replicas (data=2) share a read, and no device reads another's block."""
    counted = []

    def counting(*args):
        block = read_block(*args)
        counted.append(block.size)
        return block

    read_block = hf._read
    monkeypatch.setattr(hf, "_read", counting)
    import_hf(write(tmp_path / "source", LLAMA), Model(LLAMA), CUBE)
    assert sum(counted) == sum(tensor.size for tensor in tensors_of(LLAMA).values())


# Refusals


def drop(*names):
    return lambda folder: replace_file(
        folder, lambda tensors: [tensors.pop(name) for name in names]
    )


def add(name, tensor):
    return lambda folder: replace_file(folder, lambda tensors: tensors.update({name: tensor}))


def truncate(folder):
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def index_with(text):
    def change(folder):
        (folder / "model.safetensors").rename(folder / "model-1.safetensors")
        (folder / "model.safetensors.index.json").write_text(text)

    return change


def pickled(folder):
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def twice(folder):
    (folder / "other.safetensors").write_bytes((folder / "model.safetensors").read_bytes())
    index_with('{"weight_map": {"a": "model-1.safetensors", "b": "other.safetensors"}}')(folder)


BAD = {
    "empty": (
        lambda folder: (folder / "model.safetensors").unlink(),
        "holds no model.safetensors and no index",
    ),
    "pickle": (pickled, r"pytorch_model.bin is not safetensors.*never read.*from_pretrained"),
    "gguf": (
        lambda folder: (folder / "model.safetensors").rename(folder / "model.Q4_K_M.gguf"),
        r"model.Q4_K_M.gguf is GGUF.*only safetensors of 16 or 32 bits are read",
    ),
    "truncated": (
        truncate,
        "model.safetensors is truncated",
    ),
    "garbage": (
        lambda folder: (folder / "model.safetensors").write_bytes(b"hi"),
        "truncated or not",
    ),
    "index names an absent file": (
        index_with('{"weight_map": {"x": "model-2.safetensors"}}'),
        "index.json names model-2.safetensors",
    ),
    "index leads elsewhere": (
        index_with('{"weight_map": {"x": "../model-1.safetensors"}}'),
        "is not beside it",
    ),
    "index is no index": (index_with('{"weights": []}'), "has no weight_map"),
    "index is no JSON": (index_with("{"), "is not valid JSON"),
    "same tensor in two files": (twice, "in two files"),
    "missing": (
        drop("transformer.ln_f.bias"),
        "lacks ln_f.bias: its config.json",
    ),
    "missing several": (
        drop("transformer.wte.weight", "transformer.ln_f.bias"),
        r"it lacks wte.weight \(and 1 more\)",
    ),
    "extra": (
        add("transformer.h.3.ln_1.bias", np.ones(16, np.float32)),
        r"no place for its h.3.ln_1.bias: ",
    ),
    "both": (
        lambda folder: replace_file(
            folder, lambda t: t.update(wqe=t.pop("transformer.wpe.weight"))
        ),
        "lacks wpe.weight, .*wqe:",
    ),
    "shape": (
        add("transformer.h.1.mlp.c_fc.weight", np.ones((24, 16), np.float32)),
        r"h.1.mlp.c_fc.weight has shape \(24, 16\), the model wants \(16, 24\)",
    ),
    "dtype": (
        add("transformer.ln_f.bias", np.ones(16, np.float64)),
        r"ln_f.bias is F64, not one of F32, BF16, F16",
    ),
    "two prefixes": (
        add("wpe.weight", np.ones((12, 16), np.float32)),
        r"holds wpe.weight twice|holds .* twice",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_checkpoints_are_refused_before_data_is_read(name, tmp_path, monkeypatch):
    change, message = BAD[name]
    folder = write(tmp_path / "source", GPT2)
    change(folder)
    monkeypatch.setattr(hf, "_read", lambda *args: pytest.fail("data was read"))
    with pytest.raises(UserError, match=message) as caught:
        import_hf(folder, Model(GPT2), ONE)
    assert "\n" not in str(caught.value) and str(tmp_path) in str(caught.value)


def test_no_such_path(tmp_path):
    with pytest.raises(UserError, match=r"no checkpoint at .*absent: pass the folder"):
        import_hf(tmp_path / "absent", Model(GPT2), ONE)


def test_a_plan_that_does_not_fit_is_refused(tmp_path):
    folder = write(tmp_path / "source", LLAMA)
    with pytest.raises(
        UserError, match=r"blocks.k: dim 2 \(kv_heads\) has size 2, which tensor=8 does not divide"
    ):
        import_hf(folder, Model(LLAMA), plan_of(MeshSpec(tensor=8)))


def test_export_refusals_leave_nothing_behind(tmp_path, monkeypatch):
    model = Model(GPT2)
    params = import_hf(write(tmp_path / "source", GPT2), model, ONE)
    with pytest.raises(UserError, match="source is there already"):
        export_hf(params, model, tmp_path / "source")
    with pytest.raises(
        UserError, match=r"cannot export dtype 'float23' \(did you mean 'float32'\?\)"
    ):
        export_hf(params, model, tmp_path / "exported", dtype="float23")  # pyright: ignore[reportArgumentType]

    def disk_full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(hf_export, "write_tensors", disk_full)
    with pytest.raises(UserError, match="exported: No space left"):
        export_hf(params, model, tmp_path / "exported")
    assert [entry.name for entry in tmp_path.iterdir()] == ["source"]


def test_an_empty_folder_is_taken(tmp_path):
    model = Model(GPT2)
    (tmp_path / "exported").mkdir()
    export_hf(import_hf(write(tmp_path / "source", GPT2), model, ONE), model, tmp_path / "exported")
    assert_same(read(tmp_path / "exported"), tensors_of(GPT2))


# Logits of checkpoints of random numbers as transformers 5.24 computes them, by the keys of
# config.json.
SMALL_GPT2 = {
    "vocab_size": 11,
    "n_embd": 8,
    "n_layer": 2,
    "n_head": 2,
    "n_positions": 16,
    "n_inner": 12,
}
SMALL = {
    "vocab_size": 11,
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "max_position_embeddings": 16,
    "tie_word_embeddings": True,
}
EXPERTS = {"num_local_experts": 3, "num_experts_per_tok": 2, "tie_word_embeddings": False}
GEMMA = {
    "query_pre_attn_scalar": 5,
    "sliding_window": 3,
    "layer_types": ["sliding_attention", "full_attention"],
}
CAPS = {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0}
STORED = {
    "gpt2": (
        SMALL_GPT2 | {"tie_word_embeddings": False},
        [-0.4246, -2.1402, 0.9952, -2.6547, 7.0954],
    ),
    "mixtral": (SMALL | EXPERTS, [-2.1575, -4.3423, -7.1597, -0.786, 1.8162]),
    "qwen2": (
        SMALL | {"head_dim": 2},
        [-3.2427, 1.7968, -0.3422, 1.0742, -3.4159],
    ),
    "qwen3": (SMALL, [1.0528, 3.8221, -3.9623, 1.6624, -2.5901]),
    "gemma2": (
        SMALL | GEMMA | CAPS,
        [-2.9805, -0.9961, -2.084, 2.8955, 1.0517],
    ),
    "gemma3_text": (SMALL | GEMMA, [-8.5692, -0.532, -2.8572, 6.0991, 0.7661]),
}


@pytest.mark.parametrize("family", STORED)
def test_logits_are_the_stored_ones_of_transformers(family: str, tmp_path: Path) -> None:
    """Two names that are swapped on import and on export again pass every round trip. Each tensor's
    numbers depend on its name alone."""
    sizes, want = STORED[family]
    (tmp_path / "config.json").write_text(json.dumps({"model_type": family} | sizes))
    config = model_config_from_hf(tmp_path)
    model = Model(config)
    zeros = jax.tree.map(
        lambda leaf: jnp.zeros(leaf.shape),
        model.shapes(),
    )
    tensors = {
        name: np.random.default_rng(zlib.crc32(name.encode()))
        .standard_normal(tensor.shape)
        .astype(np.float32)
        for name, tensor in hf_tensors(zeros, model)
    }
    save_file(tensors, tmp_path / "model.safetensors")
    params = import_hf(tmp_path, model, ONE)
    found = jax.jit(lambda ids: model.logits(params, {"tokens": ids}, ONE))(
        jnp.array([[3, 1, 4, 1, 5, 9, 2, 6]])
    )
    # Written down with four decimals; sums of float32 in another order add some 1e-5 to numbers of
    # this size.
    np.testing.assert_allclose(found[0, -1, :5], want, atol=1.5e-4)
