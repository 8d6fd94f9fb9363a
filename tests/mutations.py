"""Believable faults, planted one at a time: does the quick suite (`make test`) notice each of them?

    python tests/mutations.py [--only NAME ...] [--list] [--likely] [--timeout SECONDS] [--json FILE]

A fault goes into a fresh copy of the repository, never into the checkout. The tests most likely to notice it run first
(their whole files, where the words choose none), then the whole quick suite. A kill counts where the same tests pass in
a copy without the fault. The exit code is 1 where a fault survives, cannot be planted, or breaks the import, which any
test would notice.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
IGNORED = (
    ".git",
    ".venv*",
    ".*_cache",
    ".hypothesis",
    "__pycache__",
    "*.egg-info",
    "build",
    "dist",
)
RUNS = (
    ROOT / "runs"
)  # where trainings go that somebody began here; jaxpar has a folder of this name
QUICK = ["-x", "-q", "-p", "no:cacheprovider", "-m", "not slow and not long"]
# pytest, and then which file the tests had the module from.
RUN = """import sys, pytest
code = pytest.main(sys.argv[2:])
print("\\nUSED", getattr(sys.modules.get(sys.argv[1]), "__file__", ""))
sys.exit(code)"""


class Mutation(NamedTuple):
    """A fault: `old` stands exactly once in `file`; `likely` are test files and perhaps `-k` words, tried first."""

    name: str
    fault: str
    file: str
    old: str
    new: str
    likely: str


# fmt: off
MUTATIONS = [
    # Rules on any mesh.
    Mutation("absent_axis", "a rule that was written for an axis that the mesh lacks splits nothing, unsaid",
             "jaxpar/base/layout/rules.py", "if isinstance(axes, DefaultRule):\n        return DefaultRule(",
             "if isinstance(axes, tuple):\n        return DefaultRule(", "tests/base/layout/test_rules.py"),
    Mutation("kv_rule", "kv heads without a rule are whole where heads are split", "jaxpar/base/layout/rules.py",
             "and default and not fitted[name]:", "and not default and not fitted[name]:",
             "tests/base/layout/test_rules.py"),
    Mutation("own_axis", "a logical axis that no rule names is whole, unsaid", "jaxpar/base/layout/rules.py",
             "    known = rules.logical_axes\n    raise UserError(", "    known = rules.logical_axes\n    return ()\n    raise UserError(",
             "tests/base/layout/test_rules.py"),
    Mutation("open_word", "a word of model.masks may show what comes after a token", "models/masks.py",
             "if not (made.looks_ahead or looks_back(mask)):", "if looks_back(mask) is None:", "tests/models/test_masks.py"),
    # Processes under Ray.
    Mutation("elastic_memory", "fewer processes hold more sequences on a device at a time", "jaxpar/launch/elastic.py",
             "if keeps or not fits or", "if True or keeps or not fits or", "tests/launch/test_elastic.py"),
    Mutation("stop_once", "a stop is not handed on to processes that have started again", "jaxpar/launch/preemption.py",
             "stops.place not in (None, told)", "stops.place and told is None", "tests/launch/test_preemption.py"),
    # A teacher's hidden states.
    Mutation("hidden_labels", "tokens without a label learn a teacher's hidden states", "models/hidden.py",
             "jnp.where(labels_BS >= 0, distance_BS, 0.0)", "distance_BS", "tests/train/distil/test_hidden.py"),
    Mutation("hidden_layer", "the stream of the layer before is kept", "models/forward.py",
             "number + 1 == one", "number + 2 == one", "tests/train/distil/test_hidden.py"),
    # Masks and kernels.
    Mutation("window", "a mask off by one", "jaxpar/kernels/masks/patterns.py",
             "i - j <= self.left", "i - j < self.left", "tests/models/test_masks.py -k shows_what"),
    Mutation("halves_start", "queries of a second half see the keys that those of the first half see",
             "jaxpar/parallel/context/split.py", "call = PARTS._replace(softcap=split.softcap, q_start=split.q_start)",
             "call = PARTS._replace(softcap=split.softcap)", "tests/parallel/test_attention.py -k halves"),
    Mutation("tpu_rescale", "a dropped scale: sums are not scaled down to the new maximum",
             "jaxpar/kernels/attention/tpu_kernels.py",
             "weighted[...] = weighted[...] * kept + added", "weighted[...] = weighted[...] + added",
             "tests/kernels/attention/test_tpu.py -k 'definition or traced'"),
    Mutation("triton_dq", "a dropped scale of a gradient", "jaxpar/kernels/attention/triton_kernels.py",
             "queries.store(dq_ref, ONLY, dq_qh * plan.scale)", "queries.store(dq_ref, ONLY, dq_qh)",
             "tests/kernels/attention/test_triton.py -k right"),
    Mutation("chunked_padding", "a mask off by one: what a last tile is filled up with counts as keys",
             "jaxpar/kernels/attention/chunked.py",
             "        if self.tiles.T % self.tiles.block_k:\n            full[:, -1] = False\n", "",
             "tests/kernels/attention/test_chunked.py"),
    Mutation("document_start", "a document of a packed sequence has the first tokens of the row",
             "jaxpar/kernels/masks/documents.py",
             "if not any(_counts_from_start(leaf) or", "if any(_counts_from_start(leaf) or",
             "tests/kernels/masks/test_masks.py -k alone"),
    Mutation("chunk_start", "in a ring a document begins anew with each chunk", "jaxpar/parallel/context/task.py",
             "return And(in_documents(mask, q_places, kv_places), Segments(q_ids, kv_ids))",
             "return mask & Segments(q_ids, kv_ids)", "tests/parallel/context/test_context.py -k 'alone and ring'"),
    Mutation("bigbird_length", "the random blocks of a shorter sequence are others", "jaxpar/kernels/masks/patterns.py",
             "rng = np.random.default_rng((seed, number))", "rng = np.random.default_rng((seed, number, n))",
             "tests/models/test_masks.py -k longer_context"),
    Mutation("cudnn_window", "a window that is one longer in a library's call", "jaxpar/kernels/attention/libraries.py",
             "(band.left, 0), implementation", "(band.left + 1, 0), implementation",
             "tests/parallel/test_attention.py -k cudnn_is_asked"),
    # Parallel ops.
    Mutation("linear_sum", "a missing sum of weight gradients over the devices that split the sequence",
             "jaxpar/parallel/linear/pieces.py", "split_over(used[:2], layout)", "split_over(used[:1], layout)",
             "tests/parallel/linear/test_linear.py tests/parallel/context/test_context.py"),
    Mutation("reduce_twice", "a sum taken again over axes that a reduce-scatter has summed",
             "jaxpar/parallel/collectives.py",
             "        left.difference_update(moved)\n", "", "tests/parallel/test_collectives.py -k reduce"),
    Mutation("ring_matmul_way", "a wrong sign: chunks of sums go to the mirror place, the same of two devices",
             "jaxpar/parallel/linear/ring_matmul.py", "summand(ring.behind(-hops, way)", "summand(ring.behind(hops, way)",
             "tests/parallel/linear/test_ring_matmul.py -k rings"),
    Mutation("ring_home", "a skipped hop: the sums of dk and dv stay one device before home",
             "jaxpar/parallel/context/ring.py", "home = work.hop(state.passing)", "home = state.passing",
             "tests/parallel/context/test_context.py -k 'strategy and ring'"),
    Mutation("ring_middle", "in a long ring the middle hops are one short", "jaxpar/parallel/context/ring.py",
             "jnp.arange(unrolled.stop, last))", "jnp.arange(unrolled.stop, last - 1))",
             "tests/parallel/context/test_context.py -k ring_of_any"),
    Mutation("ring_loop_hops", "in a long ring the middle hops count from the first", "jaxpar/parallel/context/ring.py",
             "jnp.arange(unrolled.stop, last))", "jnp.arange(last - unrolled.stop))",
             "tests/parallel/context/test_context.py -k ring_of_any"),
    Mutation("zigzag_documents", "documents of the wrong chunk of a packed sequence", "jaxpar/parallel/context/task.py",
             "2 * (2 * self.size - 1 - chunk) + 1", "2 * (2 * self.size - 1 - chunk)",
             "tests/parallel/context/test_context.py -k strategy"),
    Mutation("router_sum", "a missing sum of the router's gradient over tensor", "jaxpar/parallel/experts/token_choice.py",
             "dwhole_DE, split_over(STORED[:2], layout), (None", "dwhole_DE, split_over((\"batch\",), layout), (None",
             "tests/parallel/experts/test_experts.py -k layout"),
    Mutation("router_labels", "a dropped scale: the losses of routers grow as fewer labels count",
             "jaxpar/parallel/padding.py", "self.labels / jnp.maximum(self.text, 1)", "jnp.ones(())",
             "tests/verify/of_config/test_checks.py -k experts_give"),
    Mutation("padding_balanced", "padding is balanced as if it were text", "jaxpar/parallel/experts/token_choice.py",
             "jnp.sum(balance_BS * text_BS)", "jnp.sum(balance_BS)", "tests/verify/of_config/test_checks.py -k experts_give"),
    Mutation("loss_rescale", "a dropped scale: slices of the vocabulary with different maxima are added as they are",
             "jaxpar/parallel/cross_entropy/loss_terms.py", "total=seen.total * jnp.exp(below_T)", "total=seen.total",
             "tests/parallel/cross_entropy/test_cross_entropy.py"),
    Mutation("soft_temperature", "a dropped scale: a teacher's gradient shrinks as the temperature rises",
             "jaxpar/parallel/cross_entropy/loss_terms.py", "(alpha * T) * own.weights", "alpha * own.weights",
             "tests/parallel/cross_entropy/test_cross_entropy.py -k soft"),
    Mutation("answers_row", "a teacher's answers are those of another window", "jaxpar/data/top_k_files.py",
             "first[part_B] + window_B", "first[part_B] + np.arange(len(window_B))",
             "tests/train/distil/test_distil.py -k batch"),
    # Pipelines.
    Mutation("ends_sum", "a missing sum of the embedding's and head's gradients over stages",
             "jaxpar/parallel/pipeline/ticks.py",
             "partial(jax.tree.map, self._total)", "lambda grads: grads",
             "tests/verify/test_pipeline.py -k 'gives or random'"),
    Mutation("stale_slot", "a stale buffer: every action reads the first slot", "jaxpar/parallel/pipeline/program.py",
             "slots[slot] = None\n        self.fields[field][t, s] = slot", "slots[slot] = None",
             "tests/parallel/pipeline/test_pipeline.py -k slots"),
    Mutation("layer_order", "the backward goes through a stage's layers from the first on",
             "jaxpar/parallel/pipeline/stage.py",
             "grads), reverse=True)", "grads))",
             "tests/verify/test_pipeline.py -k 'gives or random'"),
    Mutation("ends_bfloat16", "gradients of the ends are summed over stages in the dtype that they have",
             "jaxpar/parallel/pipeline/ticks.py",
             "jax.lax.psum(grad.astype(jnp.float32), self.axes)", "jax.lax.psum(grad, self.axes)",
             "tests/parallel/pipeline/test_pipeline.py -k summed_over_stages"),
    Mutation("stage_slot", "what a stage computes again goes to the slot of its input, past the one there is",
             "jaxpar/parallel/pipeline/ticks.py", "row._replace(kept=0)", "row",
             "tests/parallel/pipeline/test_pipeline.py -k keys_and_layers"),
    Mutation("parts_cache", "a model is cached by its config alone, whatever its blocks are", "models/model.py",
             "return self.config, self.parts, self.ops", "return self.config, self.ops",
             "tests/models/test_parts.py -k ones_own"),
    Mutation("lora_names", "a checkpoint of LoRA that was saved with the old names is not renamed",
             "jaxpar/train/restore/load.py", "return with_new_names(read_as_named(with_old_names(shapes)))",
             "return read_as_named(shapes)", "tests/train/restore/test_finetune.py -k old_names"),
    Mutation("sparse_groups", "a group of N:M may lie on two devices", "jaxpar/parallel/linear/weight_view.py",
             "        if together % unit:", "        if False:",
             "tests/parallel/linear/test_weight_view.py -k two_devices"),
    Mutation("sparse_decay", "SR-STE decays what multiplies", "jaxpar/train/optimizer/sparse_decay.py",
             "left_out = param - read_stacked(param, form, axes)", "left_out = read_stacked(param, form, axes)",
             "tests/models/test_sparsity.py -k once_a_step"),
    Mutation("pruned_gradient", "what is pruned is trained all the same", "jaxpar/train/optimizer/pruning.py",
             "jnp.where(mask, -weights[name], move)", "move",
             "tests/train/optimizer/test_pruning.py -k cubic"),
    Mutation("pruned_score", "movement scores a pruned weight as the zero that it is", "jaxpar/train/optimizer/movement.py",
             "(params[name] + held) * grads[name]", "params[name] * grads[name]",
             "tests/train/optimizer/test_pruning.py -k movement_scores"),
    Mutation("query_stream", "the query layer asks with the stream", "models/query_layer.py",
             "column_linears(next_BSD,", "column_linears(x_BSD,",
             "tests/models/test_query_layer.py -k scores"),
    Mutation("other_parts", "a checkpoint is read as a model of other parts", "jaxpar/train/restore/metadata.py",
             "    if saved != ours:", "    if False:", "tests/models/test_own_block.py -k other_parts"),
    Mutation("pipeline_key", "dropout: every microbatch of a pipeline has one key",
             "jaxpar/parallel/pipeline/stage_inputs.py",
             "jax.random.split(jax.random.fold_in(self.arrays.key, i))", "jax.random.split(self.arrays.key)",
             "tests/parallel/pipeline/test_pipeline.py -k keys_and_layers"),
    Mutation("pipeline_layer_key", "dropout: the stages' first layers have one key",
             "jaxpar/parallel/pipeline/stage_inputs.py", "keys[jnp.maximum(layer, 0)]", "keys[j]",
             "tests/parallel/pipeline/test_pipeline.py -k keys_and_layers"),
    Mutation("pipeline_documents", "a stage does not know where documents begin",
             "jaxpar/parallel/pipeline/stage_inputs.py",
             'Places(row["positions"], row.get("segments"), row.get("text")), self.task.plan',
             'Places(row["positions"], None, row.get("text")), self.task.plan',
             "tests/parallel/pipeline/test_pipeline.py -k documents"),
    Mutation("group_stride", "chunks collide where groups are larger than stages",
             "jaxpar/parallel/pipeline/schedules.py",
             "stride = max(P, size)", "stride = P", "tests/parallel/pipeline/test_schedules.py"),
    # A step.
    Mutation("norm_tokens", "a dropped scale: the norm that clips is of sums, not means", "jaxpar/train/optimizer/update.py",
             "jnp.sqrt(squares) / sums.tokens", "jnp.sqrt(squares)",
             "tests/train/optimizer/test_learning_rate.py tests/train/optimizer/test_update.py -k clipped"),
    Mutation("late_clip", "gradients are clipped from 1.3 times the norm on", "jaxpar/train/optimizer/update.py",
             "norm < optimizer.clip_norm, 1.0", "norm < 1.3 * optimizer.clip_norm, 1.0",
             "tests/train/optimizer/test_update.py -k clipped_from"),
    Mutation("adafactor_decay", "Adafactor decays at the rate of the first step",
             "jaxpar/train/optimizer/named_optimizers.py", "-chosen.weight_decay * rate(count), decay_mask(axes)",
             "-chosen.weight_decay * rate(0), decay_mask(axes)", "tests/train/optimizer/test_named_optimizers.py -k decay_of_adafactor"),
    Mutation("matrix_dims_back", "the dims of a matrix come back in the order they went in",
             "jaxpar/train/optimizer/per_matrix.py", "return ordered.transpose(inverse)",
             "return ordered.transpose(dims.order)", "tests/train/optimizer/test_named_optimizers.py -k by_itself"),
    Mutation("deferred_axes", "a sum that waits is over the first of its axes", "jaxpar/train/step/accumulate.py",
             "jax.lax.psum(x.astype(jnp.float32), over)", "jax.lax.psum(x.astype(jnp.float32), over[:1])",
             "tests/train/step/test_train_step.py -k sums_that_wait"),
    Mutation("microbatch_counts", "losses of routers are means over a microbatch and not over the step",
             "jaxpar/train/step/accumulate.py",
             "loss(merged, rows, plan, key, weights, counts)", "loss(merged, rows, plan, key, weights)",
             "tests/parallel/test_padding.py -k microbatches"),
    Mutation("eval_accumulation", "an evaluation takes the whole batch at once", "jaxpar/train/step/eval_step.py",
             "accumulation = experiment.config.train.accumulation", "accumulation = 1",
             "tests/train/step/test_train_step.py -k evaluation"),
    Mutation("dropout_key", "every microbatch drops the same", "jaxpar/train/step/accumulate.py",
             "jax.random.fold_in(key, index)", "key", "tests/train/step/test_train_step.py -k drops"),
    Mutation("dropout_step", "every step drops the same", "jaxpar/train/step/accumulate.py",
             "jax.random.fold_in(jax.random.key(config.train.seed), step)", "jax.random.key(config.train.seed)",
             "tests/train/step/test_train_step.py -k each_step_drops"),
    Mutation("moments_order", "moments stay in the old order of layers", "jaxpar/train/state.py",
             "    if jax.tree.leaves(opt_state):", "    if not jax.tree.leaves(opt_state):",
             "tests/train/step/test_train_step.py -k carried"),
    Mutation("step_order", "another order of layers begins at step 0", "jaxpar/train/state.py",
             "TrainState(state.step, params, opt_state", "TrainState(0 * state.step, params, opt_state",
             "tests/train/step/test_train_step.py -k carried"),
    Mutation("count_order", "another order of layers begins the optimizer's counts anew", "jaxpar/train/state.py",
             "x if array.parameter is None else", "0 * x if array.parameter is None else",
             "tests/train/step/test_train_step.py -k carried"),
    Mutation("qk_norms_decay", "scales of the norms of queries and keys decay", "jaxpar/base/layout/plan.py",
             "return len(dims) > 1 and", 'return axes == ("layers", "head_dim") or len(dims) > 1 and',
             "tests/train/optimizer/test_learning_rate.py -k matrices"),
    Mutation("decode_softcap", "the soft cap is lost where a new token is decoded", "jaxpar/parallel/cache.py",
             "partial(attend, softcap=call.softcap)", "partial(attend, softcap=0.0)",
             "tests/train/generation/test_generator.py -k new_token"),
    Mutation("decode_logit_softcap", "the soft cap of the vocabulary's scores is lost in generation",
             "jaxpar/train/generation/decode_programs.py", ".logits(head.scores(model.config))",
             ".logits(head.scores(model.config)._replace(softcap=0.0))",
             "tests/train/generation/test_generator.py -k scores_are"),
    Mutation("norms_decay", "scales of stacked norms decay as matrices do", "jaxpar/base/layout/plan.py",
             "return len(dims) > 1 and", "return len(axes) > 1 and", "tests/train/optimizer/test_learning_rate.py"),
    # Data, checkpoints, configs.
    Mutation("val_fill", "off by one: a row that fills the last batch is counted", "jaxpar/data/batches.py",
             "place_B >= count", "place_B > count", "tests/data/test_corpus.py -k validation"),
    Mutation("straddling_label", "the label of a token that reaches into a completion is lost", "jaxpar/data/chat/examples.py",
             "(ends > begin) & (begins < end)", "(begins >= begin) & (begins < end)",
             "tests/data/chat/test_chat.py -k reaches"),
    Mutation("swapped_experts", "two matrices of an expert are swapped on import, and on export again",
             "models/hf/families.py",
             '"w1.weight": ("F D", "blocks.gate"),\n        _EXPERT + "w2.weight": ("D F", "blocks.down"),\n'
             '        _EXPERT + "w3.weight": ("F D", "blocks.up")',
             '"w1.weight": ("F D", "blocks.up"),\n        _EXPERT + "w2.weight": ("D F", "blocks.down"),\n'
             '        _EXPERT + "w3.weight": ("F D", "blocks.gate")',
             "tests/models/hf/test_hf.py -k stored"),
    Mutation("swapped_norms", "the norms of queries and keys are swapped on import, and on export again",
             "models/hf/families.py",
             'q_norm.scale"),\n    _LAYER + "self_attn.k_norm.weight": ("h", "blocks.k_norm.scale")',
             'k_norm.scale"),\n    _LAYER + "self_attn.k_norm.weight": ("h", "blocks.q_norm.scale")',
             "tests/models/hf/test_hf.py -k stored"),
    Mutation("keep_best", "a wrong sign: the worst checkpoint is kept", "jaxpar/train/runs/folder/val_losses.py",
             "return min(", "return max(", "tests/train/runs/test_checkpoints.py"),
    Mutation("resume_data", "a run goes on with other data as if it were the same", "jaxpar/base/config/loading.py",
             "before[key] != after[key] and key not in free", "before[key] != after[key] and key not in free and key[:4] != 'data'",
             "tests/base/config/test_config.py -k resumes"),
    # Compiled programs read and priced.
    Mutation("loop_once", "a cost that counts a loop once", "jaxpar/hlo/program/tasks.py",
             "times * node.trips", "times",
             "tests/rehearse/test_cost.py tests/rehearse/test_timeline.py tests/hlo/read/test_programs.py"),
    Mutation("group_axis", "a wrong axis: groups of devices are not transposed", "jaxpar/hlo/work/collectives.py",
             "str(prod(shape))), _ints(match[3]))", "str(prod(shape))), ())", "tests/hlo/work/test_groups.py"),
    Mutation("jump_once", "time that counts the repeated trips of a loop once", "jaxpar/rehearse/timeline.py",
             "later = repeats * (end.now", "later = (end.now", "tests/rehearse/test_timeline.py"),
    Mutation("no_carried_edge", "a task graph without the edges from one trip to the next",
             "jaxpar/rehearse/graph/runs.py",
             "for part in needs.states:", "for part in ():", "tests/rehearse/graph/test_task_graph.py -k handed"),
    Mutation("gather_own_part", "a dropped scale: a gather sends a device's own part too",
             "jaxpar/rehearse/link_costs.py",
             "part * (size - 1) / size / share", "part / share", "tests/rehearse/test_link_costs.py"),
    # Verify.
    Mutation("verify_tolerance", "a tolerance that is 100 times too wide", "jaxpar/verify/comparison.py",
             "FLOAT32 = 1e-5", "FLOAT32 = 1e-3",
             "tests/verify/of_config/test_losses_and_gradients.py -k tolerance"),
    Mutation("any_loss_tolerance", "any program's gradients may be off by 1e-3", "jaxpar/verify/_gradients.py",
             "max(FLOAT32, _NOISE *", "max(_MOST, _NOISE *", "tests/verify/test_gradients.py -k small_error"),
    Mutation("first_copy", "of a gradient's copies only the first is compared", "jaxpar/verify/comparison.py",
             "for copy in got.grads[name])", "for copy in got.grads[name][:1])",
             "tests/verify/of_config/test_checks.py -k copy"),
]
# fmt: on


class Outcome(NamedTuple):
    """Of one mutation: `killed`, `survived`, `survived the likely files`, `no match`, or what else went wrong."""

    name: str
    file: str
    fault: str
    result: str
    by: str
    seconds: int


def copy_of(mutation: Mutation | None, folder: Path) -> Path:
    """The repository in a new folder, the fault planted, laid out so that it is imported before any installation."""
    patterns = shutil.ignore_patterns(*IGNORED)

    def ignore(place: str, names: list[str]) -> set[str]:
        return patterns(place, names) | {name for name in names if Path(place, name) == RUNS}

    shutil.copytree(ROOT, folder, ignore=ignore, symlinks=True)
    setuptools = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"][
        "setuptools"
    ]
    for package, source in setuptools["package-dir"].items():
        inside = folder / package.replace(
            ".", "/"
        )  # an editable install finds it by a hook, which comes last
        if not inside.exists():
            inside.symlink_to(folder / source)
    if mutation:
        text = planted(mutation)
        assert text is not None, mutation
        (folder / mutation.file).write_text(text, encoding="utf-8")
    return folder


def planted(mutation: Mutation) -> str | None:
    """The text of a mutation's file with its fault; None where `old` does not stand there once.

    However the code is broken into lines, and whether a trailing comma follows, it is the same.
    """
    text = (ROOT / mutation.file).read_text(encoding="utf-8")
    words = re.findall(r"\w+|[^\w\s]", mutation.old)
    found = list(re.finditer(r"\s*,?\s*".join(map(re.escape, words)), text))
    if len(found) != 1:
        return None
    return text[: found[0].start()] + mutation.new.strip() + text[found[0].end() :]


def pytest(folder: Path, module: str, words: list[str], timeout: float) -> tuple[int | str, str]:
    """Exit code, or `timeout`, and the first failed test of a run in a copy.

    Raises:
      RuntimeError: the tests had the module from somewhere else.
    """
    env = os.environ | {"PYTHONPATH": str(folder), "COLUMNS": "300", "PYTHONFAULTHANDLER": "1"}
    command = [sys.executable, "-c", RUN, module, *QUICK, *words]
    with subprocess.Popen(
        command,
        cwd=folder,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    ) as process:
        try:
            text, _ = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            return "timeout", ""
    used = re.findall(r"^USED (.+)$", text, re.MULTILINE)
    if used and not Path(used[-1]).is_relative_to(folder):
        raise RuntimeError(f"the tests imported {used[-1]}, not the copy in {folder}")
    failed = re.findall(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", text, re.MULTILINE)
    return process.returncode, failed[0] if failed else ""


def judge(mutation: Mutation, work: Path, timeout: float, likely_only: bool) -> tuple[str, str]:
    """The result, and which test gave it."""
    if planted(mutation) is None:
        return "no match", f"{mutation.old!r} does not stand once in {mutation.file}"
    module = mutation.file.removesuffix(".py").replace("/", ".")
    words = shlex.split(mutation.likely)
    for absent in [
        word for word in words if word.startswith("tests/") and not (ROOT / word).exists()
    ]:
        print(f"{mutation.name}: {absent} is absent", flush=True)
        words.remove(absent)
    files = [word for word in words if word.startswith("tests/")]
    folder, code = (
        copy_of(mutation, work / mutation.name),
        5,
    )  # what pytest says where no test was chosen
    for chosen in ([words, files] if files else []) + ([] if likely_only else [[]]):
        if chosen is files and code != 5:
            continue
        stage = [*chosen, "-n", "0" if chosen else "auto"]
        code, test = pytest(folder, module, stage, timeout)
        if code in (0, 5):
            continue
        if "::" not in test and (test or code in (2, 3, 4)):
            return "broken", f"{test or 'the first test'} cannot be collected"
        how = (
            test or f"{'timeout' if code == 'timeout' else f'crash ({code})'} of {' '.join(stage)}"
        )
        again = [test, "-n", "0"] if test else stage
        if (clean := pytest(work / "clean", module, again, timeout)[0]) != 0:
            return f"undecided, {clean} without the fault", how
        if (
            "auto" in stage and pytest(folder, module, again, timeout)[0] == 0
        ):  # the machine's fault, not this one
            return "undecided, passes when run alone", how
        return "killed", how
    return ("survived the likely files" if likely_only else "survived"), " ".join(files)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--only", nargs="+", metavar="NAME", choices=[m.name for m in MUTATIONS], help="these alone"
    )
    parser.add_argument("--list", action="store_true", help="say what would be planted")
    parser.add_argument("--likely", action="store_true", help="leave the whole suite out")
    parser.add_argument(
        "--timeout",
        type=float,
        default=1800,
        help="seconds a run may take: one that hangs is a kill",
    )
    parser.add_argument("--json", type=Path, help="where to write the outcomes, after each")
    options = parser.parse_args()
    chosen = [m for m in MUTATIONS if not options.only or m.name in options.only]
    if options.list:
        print("\n".join(f"{m.name:17} {m.file:31} {m.fault}" for m in chosen))
        return 0
    outcomes: list[Outcome] = []
    with tempfile.TemporaryDirectory() as name:
        work = Path(name).resolve()
        copy_of(None, work / "clean")
        for m in chosen:
            began = time.monotonic()
            result, by = judge(m, work, options.timeout, options.likely)
            outcomes.append(
                Outcome(m.name, m.file, m.fault, result, by, round(time.monotonic() - began))
            )
            print(
                f"{len(outcomes)}/{len(chosen)} {m.name}: {result} by {by}, {outcomes[-1].seconds} s",
                flush=True,
            )
            shutil.rmtree(work / m.name, ignore_errors=True)
            if options.json:
                options.json.write_text(
                    json.dumps([o._asdict() for o in outcomes], indent=2) + "\n"
                )
    print(
        "\n"
        + "\n".join(
            f"{o.name:17} {o.file:31} {o.seconds:5} s  {o.result}: {o.by}" for o in outcomes
        )
    )
    killed = sum(o.result == "killed" for o in outcomes)
    print(f"{killed} of {len(outcomes)} killed")
    return int(killed < len(outcomes))


if __name__ == "__main__":
    sys.exit(main())
