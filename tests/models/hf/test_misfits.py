"""Folders of Hugging Face whose tensors are not those of the model: quantised ones, those that
contradict themselves, and what the messages say to do, done.
"""

from __future__ import annotations

import json
import shutil
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxpar.base.config import Lora, ModelConfig
from jaxpar.base.errors import UserError
from jaxpar.base.layout.mesh import MeshSpec, make_mesh
from jaxpar.base.layout.plan import Plan
from jaxpar.cli.main import main
from jaxpar.models import Model
from jaxpar.models.hf import import_hf, model_config_from_hf, peft
from jaxpar.models.hf.export import export_hf

SIZES = ModelConfig("llama", vocab_size=64, layers=2, embed=16, heads=2, mlp=32, max_seq_len=32)
DTYPES = {"float32": "F32", "float16": "F16", "uint8": "U8", "int8": "I8", "int32": "I32"}
Tensors = dict[str, Any]


@pytest.fixture(scope="module")
def plan() -> Plan:
    return Plan(make_mesh(MeshSpec(), jax.devices()[:1]))


@pytest.fixture
def folder(tmp_path: Path, plan: Plan) -> Path:
    return made(tmp_path / "folder", SIZES, plan)


def made(folder: Path, sizes: ModelConfig, plan: Plan) -> Path:
    model = Model(sizes)
    params = jax.jit(model.init, out_shardings=plan.sharding(()))(jax.random.key(0))
    export_hf(params, model, folder)
    return folder


def say(folder: Path, **values: Any) -> None:
    """Write values into a config.json."""
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


def quantise(folder: Path, change: Any) -> None:
    """Write what `change` makes of each matrix: a name -> an array, or a dtype and its bytes."""
    tensors: Tensors = {}
    for name, value in load_file(folder / "model.safetensors").items():
        tensors |= change(name, value) if "proj" in name else {name: value}
    header: Tensors = {}
    data = b""
    for name, value in tensors.items():
        dtype, array = value if isinstance(value, tuple) else (DTYPES[str(value.dtype)], value)
        ends = [len(data), len(data) + array.nbytes]
        header[name] = {"dtype": dtype, "shape": list(array.shape), "data_offsets": ends}
        data += array.tobytes()
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + data)


def nf4(name: str, value: np.ndarray) -> Tensors:
    return {
        name: np.zeros((value.size // 2, 1), "u1"),
        name + ".absmax": np.zeros(4, "f4"),
        name + ".quant_map": np.zeros(16, "f4"),
        name + ".quant_state.bitsandbytes__nf4": np.zeros(80, "u1"),
    }


def int8(name: str, value: np.ndarray) -> Tensors:
    return {name: value.astype("i1"), name.removesuffix("weight") + "SCB": value[:, 0]}


def gptq(name: str, value: np.ndarray) -> Tensors:
    rows, columns = value.shape
    stem = name.removesuffix("weight")
    return {
        stem + "qweight": np.zeros((columns // 8, rows), "i4"),
        stem + "qzeros": np.zeros((1, rows // 8), "i4"),
        stem + "scales": np.zeros((1, rows), "f2"),
        stem + "g_idx": np.zeros(columns, "i4"),
    }


def awq(name: str, value: np.ndarray) -> Tensors:
    return {key: one for key, one in gptq(name, value).items() if not key.endswith("g_idx")}


def fp8_blocks(name: str, value: np.ndarray) -> Tensors:
    scale = np.ones((1, 1), "f4")
    return {name: ("F8_E4M3", np.zeros(value.shape, "u1")), name + "_scale_inv": scale}


def fp8(name: str, value: np.ndarray) -> Tensors:
    return {name: ("F8_E5M2", np.zeros(value.shape, "u1"))}


def packed(name: str, value: np.ndarray) -> Tensors:
    return {
        name + "_packed": np.zeros((value.shape[0], value.shape[1] // 8), "i4"),
        name + "_scale": np.ones((value.shape[0], 1), "f2"),
        name + "_shape": np.array(value.shape, "i4"),
    }


def scaled(name: str, value: np.ndarray) -> Tensors:
    """Rounded and left in 16 bits, with its scales beside."""
    return {name: value.astype("f2"), name + "_scale": np.ones((value.shape[0], 1), "f2")}


FORMS = {
    "nf4": (nf4, "bitsandbytes", "bitsandbytes"),
    "int8": (int8, "bitsandbytes", "bitsandbytes"),
    "gptq": (gptq, "gptq", "GPTQ"),
    "awq": (awq, "awq", "GPTQ or AWQ"),
    "fp8 blocks": (fp8_blocks, "fp8", "blocks of fp8"),
    "fp8 alone": (fp8, "fbgemm_fp8", ""),
    "packed": (packed, "compressed-tensors", "compressed-tensors"),
    "scaled": (scaled, "compressed-tensors", ""),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("said", ["config", "names", "word"])
def test_quantised_weights_are_told_as_that(form: str, said: str, folder: Path, plan: Plan) -> None:
    change, method, by_names = FORMS[form]
    quantise(folder, change)
    wanted = f" by {by_names}" if by_names else ""
    if said == "config":
        say(folder, quantization_config={"quant_method": method})
        wanted = f" by {method}, as quantization_config of its config.json says"
    elif said == "word":
        say(folder, quantization_config=True)
        wanted = " by what quantization_config of its config.json says"
    with pytest.raises(UserError) as caught:
        import_hf(folder, Model(SIZES), plan)
    found = str(caught.value)
    assert found.startswith(f"{folder} has quantised weights{wanted} (it has layers.0.")
    assert "in 16 or 32 bits first" in found


def test_a_method_that_no_name_tells_is_that_of_the_config(folder: Path, plan: Plan) -> None:
    quantise(folder, lambda name, value: {name + ".strange": value})
    say(folder, quantization_config={"quant_method": "newest"})
    with pytest.raises(UserError, match="newest, as quantization_config"):
        import_hf(folder, Model(SIZES), plan)


@pytest.mark.parametrize("value", [None, {}, {"quant_method": "compressed-tensors"}])
def test_weights_in_32_bits_are_read_whatever_the_config_says(
    value: Any, folder: Path, plan: Plan
) -> None:
    before = import_hf(folder, Model(SIZES), plan)
    say(folder, quantization_config=value)
    jax.tree.map(np.testing.assert_array_equal, import_hf(folder, Model(SIZES), plan), before)


def test_a_command_says_that_weights_are_quantised(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    quantise(folder, gptq)
    (folder / "quantize_config.json").write_text("{}")
    assert main(["convert", str(folder), str(tmp_path / "run"), "--mesh.platform", "cpu"]) == 2
    said = capsys.readouterr().err.strip()
    assert "has quantised weights by gptq (it has" in said and "\n" not in said


# What the folder contradicts itself in, and that the advice works


def change_tensors(folder: Path, **tensors: np.ndarray) -> None:
    file = folder / "model.safetensors"
    save_file(load_file(file) | tensors, file, {"format": "pt"})


def told(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """What a command says of a folder; empty = it takes it."""
    target = tmp_path / "run"
    shutil.rmtree(target, ignore_errors=True)
    code = main(["convert", str(folder), str(target), "--mesh.platform", "cpu"])
    said = capsys.readouterr().err.strip()
    assert code == (2 if said.startswith("jaxpar: error: ") else 0)
    assert "model_config_from_hf" not in said
    return said if code else ""


def test_a_tied_model_with_another_head_is_told_what_works(
    tmp_path: Path, plan: Plan, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = made(tmp_path / "folder", SIZES, plan)
    change_tensors(folder, **{"lm_head.weight": np.ones((64, 16), np.float32)})
    said = told(folder, tmp_path, capsys)
    assert 'write "tie_word' in said
    say(folder, tie_word_embeddings=False)
    assert not told(folder, tmp_path, capsys)


def test_a_head_of_another_shape_is_not_told_to_be_untied(
    tmp_path: Path, plan: Plan, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = made(tmp_path / "folder", SIZES, plan)
    change_tensors(folder, **{"lm_head.weight": np.ones((65, 16), np.float32)})
    said = told(folder, tmp_path, capsys)
    assert "download config.json and the weights again" in said


def test_a_model_without_its_head_is_told_what_works(
    tmp_path: Path, plan: Plan, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = made(tmp_path / "folder", SIZES, plan)
    say(folder, tie_word_embeddings=False)
    said = told(folder, tmp_path, capsys)
    assert "it lacks lm_head.weight: its config.json says" in said
    assert '"tie_word_embeddings": true there' in said
    say(folder, tie_word_embeddings=True)
    assert not told(folder, tmp_path, capsys)


@pytest.mark.parametrize("architecture", ["LlamaForSequenceClassification", "LlamaModel"])
def test_a_model_of_another_head_is_told_by_its_architecture(
    architecture: str, tmp_path: Path, plan: Plan, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = made(tmp_path / "folder", replace(SIZES, tied_head=False), plan)
    tensors = load_file(folder / "model.safetensors")
    del tensors["lm_head.weight"]
    save_file(tensors, folder / "model.safetensors")
    if architecture != "LlamaModel":
        change_tensors(folder, **{"score.weight": np.ones((2, 16), np.float32)})
    say(folder, architectures=[architecture])
    said = told(folder, tmp_path, capsys)
    assert f"architectures=['{architecture}'], which has another head or none" in said
    assert "take a folder of LlamaForCausalLM" in said


@pytest.mark.parametrize("key", ["intermediate_size", "num_hidden_layers", "vocab_size"])
def test_a_config_of_other_sizes_is_told(
    key: str, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    right = json.loads((folder / "config.json").read_text())[key]
    say(folder, **{key: right + 1})
    said = told(folder, tmp_path, capsys)
    assert "its config.json says otherwise" in said
    say(folder, **{key: right})
    assert not told(folder, tmp_path, capsys)


def test_a_model_of_other_sizes_is_told_those_of_the_folder(folder: Path, plan: Plan) -> None:
    model = Model(replace(SIZES, mlp=48, dropout=0.5))
    with pytest.raises(
        UserError, match=r"config\.json says model\.mlp=32 and not 48: take what it says$"
    ):
        import_hf(folder, model, plan)
    import_hf(folder, Model(model_config_from_hf(folder)), plan)


def test_tensors_alone_are_told_to_need_their_config(folder: Path, plan: Plan) -> None:
    (folder / "config.json").unlink()
    with pytest.raises(UserError, match=r"no config\.json"):
        import_hf(folder, Model(replace(SIZES, layers=3)), plan)


def test_a_longer_context_of_positions_is_told_by_its_setting(
    tmp_path: Path, plan: Plan, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = replace(SIZES, family="gpt2", tied_head=True)
    folder = made(tmp_path / "folder", sizes, plan)
    longer = ["--model.max-seq-len", "64", "--mesh.platform", "cpu"]
    assert main(["convert", str(folder), str(tmp_path / "run"), *longer]) == 2
    said = capsys.readouterr().err
    assert "says model.max_seq_len=32 and not 64: take what it says" in said


def test_an_adapter_of_another_model_is_told(tmp_path: Path, plan: Plan) -> None:

    adapted = Model(replace(SIZES, lora=Lora(2)))
    params = jax.jit(adapted.init)(jax.random.key(0))
    peft.export_adapter(params, adapted, tmp_path / "adapter", "base")
    other = Model(replace(SIZES, lora=Lora(2), layers=3))
    with pytest.raises(UserError, match="is it an adapter"):
        peft.import_adapter(tmp_path / "adapter", other, plan)
