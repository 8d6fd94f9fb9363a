"""`jaxpar generate`: what it prints and writes, of a run and of a Hugging Face folder, and the
mistakes it names.
"""

from __future__ import annotations

import json
import math
import shutil
from dataclasses import replace
from pathlib import Path

import jax
import pytest

from jaxpar.base.config import Config, Lora, ModelConfig
from jaxpar.base.errors import visible
from jaxpar.base.layout.mesh import MeshSpec
from jaxpar.cli.main import main
from jaxpar.data.vocabulary.tokenizer import BytesTokenizer
from jaxpar.models import Model, Params
from jaxpar.models.hf import peft
from jaxpar.models.hf.export import export_hf
from jaxpar.train.generation import Generator
from jaxpar.train.generation.prompts import continuation
from jaxpar.train.generation.trained import decode_mesh

MODEL = ModelConfig(
    "llama", vocab_size=256, layers=1, embed=16, heads=2, mlp=32, max_seq_len=32, init_std=0.5
)


@pytest.fixture(scope="module")
def pristine(tmp_path_factory, plan_of) -> Path:
    folder = tmp_path_factory.mktemp("hf") / "llama"
    model = Model(MODEL)
    plan = plan_of()
    params = jax.jit(model.init, out_shardings=plan.sharding(()))(jax.random.key(0))
    export_hf(params, model, folder)
    (folder / "tokenizer.json").write_text('{"tokenizer": "bytes"}')
    template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    return folder


@pytest.fixture
def folder(pristine: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(pristine, tmp_path / "llama"))


@pytest.fixture
def generate(capsys):
    def call(*words: object, code: int = 0) -> str:
        assert main(["generate", *map(str, words)]) == code
        out, err = capsys.readouterr()
        (line,) = err.splitlines()
        if code:
            assert not out and line.startswith("jaxpar: error: ")
            return line.removeprefix("jaxpar: error: ")
        assert line.startswith("prefill ") and "decode" in line
        return out

    return call


@pytest.mark.slow
def test_prompts_are_continued_alike_on_the_screen_and_in_files(generate, folder, tmp_path) -> None:
    rows = [
        json.loads(line)
        for line in generate(folder, "--prompt", "ab", "--prompt", "cdé", "--json").splitlines()
    ]
    assert [(row["prompt"], row["prompt_tokens"], len(row["tokens"])) for row in rows] == [
        ("ab", 2, 28),
        ("cdé", 4, 28),
    ]
    live = generate(folder, "--prompt", "ab", "--max-tokens", 28, "--mesh.platform", "cpu")
    assert live == "ab" + visible(rows[0]["text"]) + "\n"
    file = tmp_path / "prompts.jsonl"
    lines = [
        {"prompt": "ab"},
        {"messages": [{"role": "user", "content": "x"}]},
    ]
    file.write_text("\n".join(map(json.dumps, lines)))
    words = (folder, "--prompts", file, "--max-tokens", 5)
    said = generate(*words, "--json", "mesh.data=2", "mesh.tensor=2", "--mesh.platform", "cpu")
    answers = [json.loads(line) for line in said.splitlines()]
    assert answers[0]["tokens"] == rows[0]["tokens"][:5] and answers[0]["finish"] == "length"
    assert answers[1]["prompt"] == "<user>x"
    chat = json.loads(generate(folder, "--prompt", "x", "--chat", "--json", "--max-tokens", 5))
    assert chat["tokens"] == answers[1]["tokens"]
    # The third token, as a stop of the folder's own.
    (folder / "generation_config.json").write_text(
        json.dumps({"eos_token_id": [rows[0]["tokens"][2]]})
    )
    stopped = json.loads(generate(folder, "--prompt", "ab", "--json"))
    assert stopped["tokens"] == rows[0]["tokens"][: rows[0]["tokens"].index(rows[0]["tokens"][2])]
    assert stopped["finish"] == "stop"


def test_a_hugging_face_folder_is_evaluated(folder, tmp_path, capsys) -> None:
    text = tmp_path / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog é\n" * 20)
    words = [
        "eval",
        str(folder),
        "--data.val-path",
        str(text),
        "--mesh.data",
        "8",
        "--train.batch",
        "8",
    ]
    assert main([*words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["bits_per_byte"] == pytest.approx(found["val_loss"] / math.log(2))
    (folder / "tokenizer.json").write_text(
        json.dumps(
            {
                "tokenizer": "chars",
                "chars": "".join(sorted(set(text.read_text()))),
            }
        )
    )
    assert main([*words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    bits = found["val_loss"] / math.log(2) * 45 / 46  # a line has 45 characters, one of two bytes
    # the last window ends within a line
    assert found["bits_per_byte"] == pytest.approx(bits, rel=1e-3)
    for more, said in (
        (["--limit", "3"], "--limit has no effect without --tasks"),
        (["--batch", "3"], "--batch has no effect without --tasks"),
        (["--tasks", "a", "--batch", "0"], "--batch is at least 1"),
        (["--tasks", "a", "--train.seed", "3"], "has no effect beside --tasks"),
    ):
        assert main([*words, *more]) == 2
        assert said in capsys.readouterr().err


@pytest.mark.slow
def test_an_adapter_is_merged_and_read_with_the_words_of_its_model(
    generate, folder, tmp_path, plan_of, capsys
) -> None:
    lora = Model(
        replace(
            MODEL,
            lora=Lora(rank=2, alpha=8.0, targets=("q", "down")),
        )
    )
    plan = plan_of()

    def init(key: jax.Array) -> Params:
        random = lora.trained(lora.init(key))  # B is zeros
        random = jax.tree.map(
            lambda x: jax.random.normal(key, x.shape) / 2,
            random,
        )
        return Model.merge(lora.init(jax.random.key(0)), random)

    params = jax.jit(init, out_shardings=plan.sharding(()))(jax.random.key(1))
    peft.export_adapter(params, lora, tmp_path / "adapter", str(folder))
    expected = Generator(lora, params, plan).generate([list(b"ab")], 9)
    for where in ({}, {"data": 2, "tensor": 2}):
        flags = [f"mesh.{axis}={size}" for axis, size in where.items()] + ["mesh.platform=cpu"]
        found = generate(
            tmp_path / "adapter", "--prompt", "ab", "--max-tokens", 9, "--json", *flags
        )
        assert json.loads(found)["tokens"] == expected[0]
    text = tmp_path / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog\n" * 20)
    words = ["--data.val-path", str(text), "--data.seq-len", "16", "--train.batch", "8", "--json"]
    assert main(["eval", str(tmp_path / "adapter"), *words]) == 0
    assert json.loads(capsys.readouterr().out)["bits_per_byte"] > 0


def test_half_a_character_waits_for_its_other_half() -> None:
    tokenizer = BytesTokenizer()
    new = list("né€".encode())
    shown = [
        continuation(tokenizer, [65], new[:count], ended=False) for count in range(len(new) + 1)
    ]
    assert shown == ["", "n", "n", "né", "né", "né", "né€"]
    assert continuation(tokenizer, [65], new[:2]) == "n\ufffd"


def test_a_mesh_is_chosen_by_what_divides() -> None:
    for heads, kv_heads, devices, tensor in (
        (8, 2, 8, 2),
        (8, 8, 8, 8),
        (12, 12, 8, 4),
        (25, 25, 8, 1),
        (8, 8, 1, 1),
    ):
        model = Config().model.__class__(heads=heads, kv_heads=kv_heads, mlp=512)
        assert decode_mesh(model, devices) == MeshSpec(data=devices // tensor, tensor=tensor)


def test_mistakes_are_one_line(generate, folder, tmp_path) -> None:
    for words, said in (
        ((), "generate needs --prompt TEXT"),
        (("--prompt", ""), "prompt 1 is empty"),
        (
            ("--prompt", "a" * 40),
            "prompt 1 has 40 tokens, and 1 more are beyond the context of 32 (model.max_seq_len)",
        ),
        (("--prompt", "a" * 30, "--max-tokens", 9), "at most 2 new ones fit"),
        (("--prompt", "a", "--top-k", 5), "no effect at temperature 0"),
        (("--prompt", "a", "--step", 5), "--step has no effect"),
        (
            ("--prompt", "a", "mesh.stage=2", "mesh.platform=cpu"),
            "a pipeline of 2 stages trains",
        ),
        (
            ("--prompt", "a", "mesh.context=2", "mesh.platform=cpu"),
            "mesh.context=2 splits sequences",
        ),
        (("--prompt", "a", "--batch", 0), "--batch is at least 1"),
        (("--prompts", tmp_path / "none.txt"), "cannot read"),
    ):
        assert said in generate(folder, *words, code=2)
    file = tmp_path / "broken.jsonl"
    for text, said in (
        ("", "has no prompt in it"),
        ('{"prompt": "a\u2028"}\n{"a', "line 2 is not valid JSON"),
        ('{"messages": ["hi"]}', "line 1: message 1 is no object"),
        ('{"prompt": "\\ud83d"}', "is not Unicode text"),
        ('{"text": "a"}', 'line 1 has neither "prompt"'),
    ):
        file.write_text(text)
        assert said in generate(folder, "--prompts", file, code=2)
    (folder / "tokenizer.json").write_text(
        json.dumps(
            {
                "tokenizer": "chars",
                "chars": "".join(map(chr, range(300))),
            }
        )
    )
    assert "has 300 tokens, and the model 256" in generate(folder, "--prompt", "a", code=2)
    (folder / "tokenizer.json").unlink()
    assert "has no tokenizer.json" in generate(folder, "--prompt", "a", code=2)
    (folder / "config.json").unlink()
    assert "has neither config.toml" in generate(folder, "--prompt", "a", code=2)
    assert "there is no" in generate(tmp_path / "nowhere", "--prompt", "a", code=2)
    assert "usage: jaxpar generate RUN|HF_FOLDER" in generate(code=2)
