"""Words of other trainers lead to the key that means the same."""

import pytest

from jaxpar.base.config import Config, override, parse
from jaxpar.base.errors import UserError
from jaxpar.base.field_marks import Called, marks_of
from jaxpar.base.key_aliases import suggest_preset
from jaxpar.base.layout.mesh import make_mesh
from jaxpar.base.toml import presets
from jaxpar.cli.arguments import config_args
from jaxpar.cli.commands import TrainArgs


def test_a_word_means_one_setting() -> None:
    """But for AdamW's numbers, which Adam has too."""
    marked = marks_of(Config, Called)
    words = [
        word for key in marked for word in marked[key][-1].words.split() if ".adam." not in key
    ]
    assert len(words) == len(set(words)) and all(word == word.lower() for word in words)


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        ("--train.lr 1e-3", "--train.learning-rate"),
        ("--lr 1e-3", "--train.learning-rate"),
        ("lr=1e-3", "--train.learning-rate"),
        ("--epochs 3", "--train.steps"),
        ("--num-train-epochs 3", "--train.steps"),
        ("--wandb", "--metrics.sinks"),
        ("--report_to wandb", "--metrics.sinks"),
        ("--mesh tensor=2", "--mesh.tensor 2"),
        ("--mesh.tp 2", "--mesh.tensor"),
        ("--tensor-model-parallel-size 2", "--mesh.tensor"),
        ("--adam_beta1 0.9", "--optimizer.adamw.beta1"),
        ("--steps 20", "--train.steps"),
        ("--batch-size 8", "--train.batch"),
        ("--per_device_train_batch_size 8", "--train.batch"),
        ("--n_layer 2", "--model.layers"),
        ("--model.hidden_size 64", "--model.embed"),
        ("--max_grad_norm 1", "--train.clip-norm"),
        ("--output_dir x", "--run"),
        ("--gradient-checkpointing", "--memory.policy"),
        ("--train.stpes 20", "--train.steps"),
        ("--rnu x", "--run"),
        ("--mesh.pipe 2", "--mesh.stage"),
        ("--mesh.pipeline 2", "--mesh.stage"),
        ("--mesh.model 2", "--mesh.tensor"),
        ("--mesh.replica 2", "--mesh.data"),
        ("--mesh.seq 2", "--mesh.context"),
        ("--mesh.exprt 2", "--mesh.expert"),
        ("--checkpoint.kep 2", "--checkpoint.keep"),
    ],
)
def test_a_flag_of_another_trainer_names_ours(words: str, meant: str) -> None:
    with pytest.raises(UserError) as error:
        config_args("jaxpar train", TrainArgs, ["tiny", *words.split()])
    assert f"(did you mean '{meant}'?)" in str(error.value)


@pytest.mark.parametrize("word", ["--mesh.qqq", "--mesh.width2"])
def test_a_shared_table_alone_does_not_make_two_keys_alike(word: str) -> None:
    with pytest.raises(UserError) as error:
        config_args("jaxpar train", TrainArgs, ["tiny", word, "2"])
    assert "did you mean" not in str(error.value)


def test_a_mesh_axis_of_another_trainer_names_ours() -> None:
    with pytest.raises(UserError, match="no mesh axis 'pipe' \\(did you mean 'stage'\\?\\)"):
        make_mesh(pipe=2)
    with pytest.raises(UserError, match="no mesh axis 'tensr' \\(did you mean 'tensor'\\?\\)"):
        make_mesh(tensr=2)


def test_a_table_alone_says_how_it_is_written() -> None:
    with pytest.raises(
        UserError, match=r"takes no --mesh \(it is a table: write --mesh\.NAME VALUE\)"
    ):
        config_args("jaxpar train", TrainArgs, ["tiny", "--mesh"])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[train]\nlr = 1", "unknown key train.lr (did you mean 'learning_rate'?)"),
        ("[train]\nblock_size = 1", "unknown key train.block_size (did you mean 'data.seq_len'?)"),
        ("lr = 1", "unknown key lr (did you mean 'train.learning_rate'?)"),
    ],
)
def test_so_does_a_key_of_a_file(text: str, message: str) -> None:
    with pytest.raises(UserError) as error:
        parse(text)
    assert message in str(error.value)


def test_so_does_an_override() -> None:
    with pytest.raises(
        UserError, match=r"unknown key train\.lr \(did you mean 'train\.learning_rate'\?\)"
    ):
        override(Config(), {"train.lr": 1e-3})


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("gpt2", "gpt2_124m"),
        ("gpt2-xl", "gpt2_1558m"),
        ("GPT2-medium", "gpt2_355m"),
        ("llama-3-8b", "llama3_8b"),
        ("llama3", "llama3_8b"),
        ("tinny", "tiny"),
        ("shakespeare", "shakespeare_char_cpu"),
    ],
)
def test_a_preset_by_its_usual_name(name: str, meant: str) -> None:
    assert suggest_preset(name, presets("jaxpar.configs")) == f" (did you mean {meant!r}?)"
