"""Tasks of the lm-eval harness get from our models what they get from `transformers`.

Runs where the extras eval and parity are installed.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxpar.base.errors import UserError
from jaxpar.base.layout.mesh import MeshSpec
from jaxpar.train.generation.trained import open_trained

pytestmark = pytest.mark.slow

torch = pytest.importorskip(
    "torch", reason="lm-eval is NOT tested: install the extras eval and parity"
)
transformers = pytest.importorskip(
    "transformers", reason="lm-eval is NOT tested: install the extras eval and parity"
)
tokenizers = pytest.importorskip(
    "tokenizers", reason="lm-eval is NOT tested: install the extras eval and parity"
)
pytest.importorskip("lm_eval", reason="lm-eval is NOT tested: install the extras eval and parity")

WORDS = ["fox", "dog", "cat", "owl", "bee", "ant", "yak", "elk"]
TASKS = {
    "animals": {
        "output_type": "multiple_choice",
        "doc_to_text": "Q: {{text}}\nA:",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "label",
        "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
        "num_fewshot": 1,
    },
    "answers": {
        "output_type": "generate_until",
        "doc_to_text": "Q: {{text}}\nA:",
        "doc_to_target": "{{text}}",
        "metric_list": [{"metric": "exact_match"}],
        "generation_kwargs": {"until": ["o"], "max_gen_toks": 20},
    },
    "texts": {
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "{{text * 20}}",
        "metric_list": [{"metric": "byte_perplexity"}, {"metric": "bits_per_byte"}],
    },
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random LLaMA and a tokenizer of bytes with some pairs, which begins a text with <s>."""
    path = tmp_path_factory.mktemp("hf")
    pre = tokenizers.pre_tokenizers
    decoders = tokenizers.decoders
    processors = tokenizers.processors
    vocab = {
        token: i
        for i, token in enumerate(
            ["<s>", "</s>", *sorted(pre.ByteLevel.alphabet()), "th", "at", "og"]
        )
    }
    tokenizer = tokenizers.Tokenizer(
        tokenizers.models.BPE(
            vocab,
            [("t", "h"), ("a", "t"), ("o", "g")],
        )
    )
    tokenizer.pre_tokenizer = pre.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = [("<s>", 0)]
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=special
    )
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>"
    )
    fast.pad_token = "</s>"
    fast.save_pretrained(path)
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=len(vocab),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=1,
    )
    module = transformers.LlamaForCausalLM(config)
    with torch.no_grad():
        for weight in module.parameters():
            torch.nn.init.normal_(
                weight,
                mean=float(weight.ndim == 1),
                std=0.3,
            )
    module.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The YAML files of some tasks, with their data in a JSON file."""
    path = tmp_path_factory.mktemp("tasks")
    rng = np.random.default_rng(0)
    files = []
    rows = [
        {
            "text": " ".join(rng.choice(WORDS, 3)),
            "choices": rng.choice(WORDS, 3, replace=False).tolist(),
            "label": int(rng.integers(3)),
        }
        for _ in range(13)
    ]
    (path / "rows.json").write_text("\n".join(map(json.dumps, rows)))
    for name, task in TASKS.items():
        split = {"dataset_path": "json", "dataset_kwargs": {"data_files": str(path / "rows.json")}}
        whole = {"task": name, "test_split": "train", "fewshot_split": "train", **split, **task}
        (path / f"{name}.yaml").write_text(json.dumps(whole))  # JSON is YAML
        files.append(str(path / f"{name}.yaml"))
    return files


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


def numbers(results: dict[str, Any]) -> dict[str, float]:
    return {
        f"{task} {key}": value
        for task, found in results["results"].items()
        for key, value in found.items()
        if isinstance(value, float) and "stderr" not in key
    }


@pytest.mark.filterwarnings("default")  # the harness's own imports
@pytest.mark.parametrize("mesh", [{}, {"data": 2, "tensor": 4}])
def test_a_task_gets_the_numbers_of_transformers(
    mesh: dict[str, int], folder: Path, tasks: list[str]
) -> None:
    from lm_eval import simple_evaluate
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM

    from jaxpar.train.generation.harness import HarnessModel, run_tasks

    theirs = HFLM(pretrained=str(folder), device="cpu", batch_size=4, dtype="float32")
    trained = open_trained(folder, MeshSpec(**mesh, platform="cpu"))
    ours = HarnessModel(trained, 4)

    def requests(kind: str, *args: tuple[Any, ...]) -> list[Any]:
        return [Instance(kind, {}, arg, i) for i, arg in enumerate(args)]

    pairs = requests(
        "loglikelihood",
        ("the fox", " that"),
        ("", "dog"),
        ("a " * 60, "elk"),
        ("ends in a space ", "x"),
    )
    for (total, best), (expected, expected_best) in zip(
        ours.loglikelihood(pairs), theirs.loglikelihood(pairs), strict=True
    ):
        # float32, sums of up to 62 logits near 30
        assert total == pytest.approx(expected, abs=1e-3)
        assert best == expected_best
    texts = requests("loglikelihood_rolling", ("the fox and the dog " * 9,), ("a",))
    expected = theirs.loglikelihood_rolling(texts)
    np.testing.assert_allclose(ours.loglikelihood_rolling(texts), expected, rtol=1e-5)
    asked = [
        {"until": ["\n"], "max_gen_toks": 12},
        {"until": ["t", "o"], "max_gen_toks": 20},
    ]
    prompts = ["the fox", "a", "dog " * 30, "cat that"]
    until = requests(
        "generate_until", *((prompt, dict(way)) for way in asked for prompt in prompts)
    )
    assert ours.generate_until(until) == theirs.generate_until(until)
    if not mesh:
        found = numbers(run_tasks(trained, tasks, limit=9))
        expected = numbers(simple_evaluate(theirs, tasks=tasks, limit=9, log_samples=False))
        assert found.keys() == expected.keys() and len(found) == 5
        assert found == pytest.approx(expected, rel=1e-5)


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("content", ["m.content", "m.content | trim"])
def test_chat_prompts_leave_an_answer_open_and_end_at_the_end_of_a_turn(
    content: str, folder: Path, tmp_path: Path
):
    from jaxpar.train.generation.harness import HarnessModel

    copy = Path(shutil.copytree(folder, tmp_path / "chat"))
    template = "{% for m in messages %}[{{ m.role }}]{{ " + content + " }}at\n{% endfor %}"
    (copy / "chat_template.jinja").write_text(
        template + "{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    config = json.loads((copy / "tokenizer_config.json").read_text())
    (copy / "tokenizer_config.json").write_text(json.dumps(config | {"eos_token": "at"}))
    ours = HarnessModel(open_trained(copy, MeshSpec(platform="cpu")), 2)
    theirs = transformers.AutoTokenizer.from_pretrained(copy)
    talk = [{"role": "user", "content": "a "}, {"role": "assistant", "content": "It is "}]
    for opened, some in ((True, talk[:1]), (False, talk)):
        expected = theirs.apply_chat_template(
            some, tokenize=False, add_generation_prompt=opened, continue_final_message=not opened
        )
        assert ours.apply_chat_template(some, opened) == expected
    assert ours.eot_token_id in ours.stop
    with pytest.raises(UserError, match=r"70 tokens, .*64"):
        ours._loglikelihood_tokens([(None, [1], [2] * 70)])


@pytest.mark.filterwarnings("default")
def test_what_cannot_be_run_is_told(folder: Path, tmp_path: Path) -> None:
    from jaxpar.train.generation.harness import run_tasks

    trained = open_trained(folder, MeshSpec(platform="cpu"))
    with pytest.raises(
        UserError, match=r"lm-eval has no task 'helaswag' .did you mean 'hellaswag'"
    ):
        run_tasks(trained, ["helaswag"])
    task = {
        "task": "gone",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": str(tmp_path / "gone.json")},
        "test_split": "train",
        **TASKS["answers"],
    }
    (tmp_path / "gone.yaml").write_text(json.dumps(task))
    with pytest.raises(UserError, match=r"the data of .*gone.yaml cannot be had"):
        run_tasks(trained, [str(tmp_path / "gone.yaml")])
