"""The schema: what TOML it takes and refuses, that it is written back whole, and what makes two
runs differ.
"""

import dataclasses
import typing
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxpar.base.config import (
    Config,
    fit_schedule,
    incompatible_changes,
    load_config,
    override,
    parse,
)
from jaxpar.base.config.checks import check
from jaxpar.base.errors import UserError, read_json
from jaxpar.base.layout.rules import ShardingRules
from jaxpar.base.toml import flatten, to_toml

LEAVES: dict[type, st.SearchStrategy] = {
    int: st.integers(),
    float: st.floats(allow_nan=False),
    bool: st.booleans(),
    str: st.text(st.characters(exclude_categories=["Cs"])),  # a lone surrogate has no UTF-8
}


def values(hint: Any) -> st.SearchStrategy:
    """Any value of an annotated type."""
    if dataclasses.is_dataclass(hint):
        inner = {name: values(one) for name, one in typing.get_type_hints(hint).items()}
        if hint is ShardingRules:  # of which one field has words of a form
            own = [(), ("gates=",), ("gates=tensor", "state=data,fsdp")]
            inner["own"] = st.sampled_from(own)
        return st.builds(hint, **inner)
    if typing.get_origin(hint) is Literal:
        return st.sampled_from(typing.get_args(hint))
    if typing.get_origin(hint) is tuple:
        return st.lists(values(typing.get_args(hint)[0]), max_size=3, unique=True).map(tuple)
    return LEAVES[hint]


def test_the_default_survives_toml():
    assert parse(to_toml(Config(), "A header\nof two lines.")) == Config()


@given(values(Config))
def test_every_config_survives_toml(config):
    assert parse(to_toml(config)) == config


@given(values(Config), values(Config))
def test_override_with_every_key_of_another_config_gives_that_config(one, other):
    assert override(one, flatten(other)) == other


def test_a_file_may_be_partial():
    assert parse("[train]\nsteps = 7\n") == override(Config(), {"train.steps": 7})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[trian]\nsteps = 1", "unknown key trian (did you mean 'train'?)"),
        ("[train]\nstep = 1", "unknown key train.step (did you mean 'steps'?)"),
        ("[mesh.dcn]\ntensr = 1", "unknown key mesh.dcn.tensr (did you mean 'tensor'?)"),
        ("[train]\nxyzzy = 1", "unknown key train.xyzzy"),
        ("[train]\nsteps = 1.5", "train.steps is a whole number, found 1.5"),
        ("[train]\nsteps = true", "train.steps is a whole number, found True"),
        ('[train]\nlearning_rate = "fast"', "train.learning_rate is a number, found 'fast'"),
        ("[train]\nlearning_rate = false", "train.learning_rate is a number, found False"),
        ("[data]\npack = 1", "data.pack is true or false, found 1"),
        ("[data]\npath = 3", "data.path is a string in quotes, found 3"),
        (
            "[data]\npath = 2024-01-01",
            "data.path is a string in quotes, found datetime.date(2024, 1, 1)",
        ),
        (
            '[train]\non_nonfinite = "skyp"',
            "one of stop, skip, rollback, found 'skyp' (did you mean 'skip'?)",
        ),
        ("[train]\non_nonfinite = 3", "train.on_nonfinite is one of stop, skip, rollback, found 3"),
        ("[train]\nschedule = 3", "train.schedule is a string in quotes, found 3"),
        ("[rules]\nbatch = 3", "rules.batch is a list of names, found 3"),
        ("[pipeline]\nlayers = 3", "pipeline.layers is a list of whole numbers, found 3"),
        ('[rules]\nbatch = ["data", "tensr"]', "found 'tensr' (did you mean 'tensor'?)"),
        ("train = 3", "train is a table of settings, found 3"),
        ("[train", "is not valid TOML"),
    ],
)
def test_a_mistake_is_named_with_its_file_and_key(text, message):
    with pytest.raises(UserError) as error:
        parse(text, "mine.toml")
    assert str(error.value).startswith("mine.toml")
    assert message in str(error.value)


def test_a_rule_is_a_name_or_a_list_of_names():
    assert parse('[rules]\nmlp = "tensor"') == parse('[rules]\nmlp = ["tensor"]')
    assert parse("[rules]\nmlp = []").rules.mlp == ()


def test_a_whole_number_is_a_number():
    rate = parse("[train]\nlearning_rate = 1").train.learning_rate
    assert (rate, type(rate)) == (1.0, float)


def test_override_names_the_nearest_key():
    with pytest.raises(UserError, match=r"train\.stepz \(did you mean 'train\.steps'"):
        override(Config(), {"train.stepz": 3})


def changed(key: str, value: Any) -> Config:
    """The default config with another value at `key`."""
    kinds = {
        bool: lambda v: not v,
        int: lambda v: v + 1,
        float: lambda v: v + 1,
        tuple: lambda v: (*v, "stage"),
    }
    others = dict.fromkeys(flatten(Config().overlap, "overlap."), "ring") | {
        **dict.fromkeys(flatten(Config().memory.keep, "memory.keep."), "save"),
        "data.source": "text",
        "train.schedule": "wsd",
        "optimizer.name": "lion",
        "mesh.platform": "cpu",
        "memory.policy": "full",
        "precision.compute": "bfloat16",
        "precision.params": "bfloat16",
        "precision.gradients": "bfloat16",
        "precision.moments": "bfloat16",
        "memory.optimizer": "offload",
        "memory.parameters": "offload",
        "memory.may": ["optimizer"],
        "data.loss_on": "all",
        "data.objective": "masked",
        "data.bos": True,
        "overlap.domino": "on",
        "context.strategy": "ulysses",
        "rules.stage": ["data"],
        "rules.own": ["gates=tensor"],
        "kernels.attention": "chunked",
        "pipeline.schedule": "gpipe",
        "pipeline.stash": "stage",
        "pipeline.layers": [1, 2],
        "model.rope_scaling": "linear",
        "model.router": "expert_choice",
        "model.sublayers": "parallel",
        "model.activation": "relu2",
        "pruning.method": "rigl",
        "pruning.distribution": "erdos_renyi",
        "pruning.sparsity_by_depth": [0.5],
        "model.sparsity.block": [2, 2],
        "model.sparsity.pattern": "cyclic",
        "metrics.sinks": ["wandb"],
        "train.on_nonfinite": "skip",
        "train.on_spike": "rollback",
    }
    # a rule that nobody wrote is a tuple of a type of its own
    kind = tuple if isinstance(value, tuple) else type(value)
    return override(Config(), {key: others.get(key) or kinds.get(kind, lambda v: v + "x")(value)})


@pytest.mark.parametrize(("key", "value"), flatten(Config()).items())
def test_only_layout_and_reporting_may_change_when_a_run_resumes(key, value):
    """The answer does not depend on them."""
    layout = "mesh", "rules", "overlap", "context", "pipeline", "memory", "kernels", "compiler"
    tables = *layout, "checkpoint", "metrics"
    own = key.split(".")[0] in tables or key.startswith("distill.mesh.")
    free = own or key in (
        "train.steps",
        "train.stop_at",
        "train.max_time",
        "train.eval_every",
        "train.eval_batches",
        "train.final_eval_batches",
        "train.accumulation",
        "train.allow_nonfinite",
        "train.on_nonfinite",
        "train.on_spike",
        "train.spike_window",
        "train.spike_deviations",
        "train.max_bad_in_a_row",
        "train.max_bad_steps",
        "train.hang_seconds",
        "train.check_replicas",
        "data.prefetch",
        "data.accept_changed",
        "model.scan_layers",
    )
    differences = incompatible_changes(Config(), changed(key, value))
    assert (
        not differences
        if free
        else (len(differences) == 1 and differences[0].startswith(f"{key}: {value!r} -> "))
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model.layers": 0}, "model.layers=0 is below 1"),
        ({"model.heads": 3}, "model.embed=128 is not a multiple of model.heads=3"),
        ({"model.kv_heads": 3}, "model.heads=4 is not a multiple of model.kv_heads=3"),
        ({"model.experts": 1}, "model.experts_per_token=2 is not in 1..model.experts=1"),
        ({"model.experts": -1}, "model.experts=-1 is below 0"),
        ({"model.dropout": 1.0}, "model.dropout=1.0 is not in"),
        ({"data.seq_len": 2048}, "data.seq_len=2048 is not in 1..model.max_seq_len=1024"),
        ({"data.val_fraction": 1.0}, "data.val_fraction=1.0 is not in"),
        ({"train.batch": 0}, "train.batch=0 is below 1"),
        ({"train.accumulation": 0}, "train.accumulation=0 is below 1"),
        ({"train.accumulation": 5}, "try train.batch=35"),
        ({"train.steps": 50}, "try train.warmup_steps=5"),
        ({"train.decay_steps": 950}, "train.decay_steps=950 is more than train.steps=1000 leave"),
        ({"train.decay_steps": 950, "train.schedule": "wsd"}, "try train.decay_steps=900"),
        (
            {"train.min_learning_rate_ratio": 1.5},
            "train.min_learning_rate_ratio=1.5 is not in [0, 1]",
        ),
        ({"train.min_learning_rate": 1e-2}, "train.min_learning_rate_ratio=10.0 is not in [0, 1]"),
        (
            {"precision.moments": "bfloat16", "train.beta1": 0.99},
            "try optimizer.adamw.beta1=0.95 or precision.moments=float32",
        ),
        (
            {"precision.gradients": "bfloat16", "train.accumulation": 512, "train.batch": 512},
            "adds up 512 microbatches: past 256 of them the next is rounded away",
        ),
        (
            {"checkpoint.local": "s3://bucket/fast"},
            "checkpoint.local=s3://bucket/fast is a URL: it is for a folder",
        ),
        ({"train.stop_at": 1001}, "train.stop_at=1001 is not in 0..1000"),
        ({"metrics.log_every": 0}, "metrics.log_every=0 is below 1"),
        ({"checkpoint.keep": 0}, "checkpoint.keep=0 is below 1"),
    ],
)
def test_sizes_that_contradict_each_other_are_refused(changes, message):
    assert check(Config()) == Config()
    with pytest.raises(UserError) as error:
        check(override(Config(), changes))
    assert message in str(error.value)


@given(st.integers(1, 200), st.integers(1, 20))
def test_the_suggested_batch_splits_into_the_microbatches(batch, accumulation):
    config = override(Config(), {"train.batch": batch, "train.accumulation": accumulation})
    if batch % accumulation == 0:
        assert check(config) == config
        return
    with pytest.raises(UserError) as error:
        check(config)
    suggested = int(str(error.value).rpartition("train.batch=")[2])
    assert abs(suggested - batch) <= accumulation and suggested % accumulation == 0
    mended = override(config, {"train.batch": suggested})
    assert check(mended) == mended


def test_the_floor_of_an_earlier_version_is_a_share_of_the_rate_beside_it():
    """In a file, in changes, and in a run folder of a constant rate, whose floor was never
    reached.
    """
    assert (
        parse(
            "[train]\nlearning_rate = 6e-4\nmin_learning_rate = 6e-5"
        ).train.min_learning_rate_ratio
        == 0.1
    )
    assert parse("[train]\nmin_learning_rate = 5e-4").train.min_learning_rate_ratio == 0.5
    assert override(Config(), {"train.min_learning_rate": 0.0}).train.min_learning_rate_ratio == 0
    changes = {"train.min_learning_rate": 1e-5, "train.learning_rate": 2e-5}
    assert override(Config(), changes).train.min_learning_rate_ratio == 0.5
    constant = parse(
        '[train]\nschedule = "constant"\nlearning_rate = 2e-5\nmin_learning_rate = 1e-4'
    )
    assert check(constant).train.learning_rate == 2e-5
    with pytest.raises(UserError, match=r"keep train\.min_learning_rate_ratio"):
        parse("[train]\nmin_learning_rate = 1e-5\nmin_learning_rate_ratio = 0.1")
    with pytest.raises(UserError, match=r"train\.min_learning_rate is a number, found 'low'"):
        parse('[train]\nmin_learning_rate = "low"')


def test_fewer_steps_shorten_a_warm_up_and_a_decay_that_were_not_given():
    config = override(Config(), {"train.steps": 50, "train.decay_steps": 60})
    fitted, note = fit_schedule(config, {"train.steps"})
    assert check(fitted).train.warmup_steps == 5 and fitted.train.decay_steps == 0
    assert note == (
        "train.steps=50 is shorter than the schedule was: train.warmup_steps 100 -> 5, "
        "train.decay_steps 60 -> 0"
    )
    for keys in ({"train.batch"}, {"train.steps", "train.warmup_steps", "train.decay_steps"}):
        assert fit_schedule(config, keys) == (config, "")


def test_an_unknown_preset_names_the_nearest():
    with pytest.raises(UserError, match=r"no preset 'tinny' \(did you mean 'tiny'\?\)"):
        load_config("tinny")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "No such file"),
        (b"[train\n", "not valid TOML"),
        (b"# caf\xe9\n", "utf-8"),
        (b"\xff\xfe", "utf-8"),
    ],
)
def test_an_unreadable_file_is_named(tmp_path, content, message):
    path = tmp_path / "mine.toml"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UserError, match=message) as error:
        load_config(str(path))
    assert str(path) in str(error.value)


def test_a_byte_order_mark_is_no_part_of_a_config(tmp_path):
    (tmp_path / "mine.toml").write_bytes(b"\xef\xbb\xbf[train]\r\nsteps = 7\r\n")
    assert load_config(str(tmp_path / "mine.toml")).train.steps == 7
    (tmp_path / "one.json").write_bytes(b'\xef\xbb\xbf{"a": 1}')
    assert read_json(tmp_path / "one.json") == {"a": 1}


def test_a_folder_is_no_config(tmp_path):
    (tmp_path / "folder.toml").mkdir()
    with pytest.raises(UserError, match="Is a directory"):
        load_config(str(tmp_path / "folder.toml"))


@pytest.mark.parametrize(
    "floor",
    [10**400, -1, float("nan"), float("inf"), -0.1],
)
def test_a_floor_of_an_earlier_version_that_is_no_rate(floor):
    with pytest.raises(UserError, match=r"train\.min_learning_rate is a finite number"):
        parse(f"[train]\nmin_learning_rate = {floor}")


def test_a_name_that_is_no_text_is_refused():
    """Python reads bytes of a file's name that are no UTF-8 as half a character, which no file of
    text can hold.
    """
    with pytest.raises(UserError, match=r"data\.path .*UTF-8"):
        check(override(Config(), {"data.source": "text", "data.path": "t\udcff.txt"}))


@pytest.mark.parametrize("key", ["train.init", "data.tokenizer"])
def test_a_folder_written_in_another_way_is_the_same(key):
    old, new, other = (override(Config(), {key: path}) for path in ("model", "./model/", "model2"))
    assert not incompatible_changes(old, new) and incompatible_changes(old, other)
    assert incompatible_changes(Config(), new)
