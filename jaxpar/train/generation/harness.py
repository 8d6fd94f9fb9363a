"""EleutherAI's lm-eval harness with the library's models: `pip install 'jaxpar[eval]'`, which this
module imports.

Tokens, windows and stop strings are treated as by the harness's own class for `transformers`, so
both give the same numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import Any

from jaxpar.base.errors import UserError, suggest
from jaxpar.data.chat.answers import ConversationWriter
from jaxpar.data.chat.conversations import Conversation
from jaxpar.data.chat.template.files import special_tokens
from jaxpar.data.vocabulary.special_tokens import TOKENIZER
from jaxpar.train.generation.prompts import encode_text, stop_ids
from jaxpar.train.generation.sampling import Sampling
from jaxpar.train.generation.trained import Trained, require_tokenizer

# By name, as the package need not be installed where types are checked.
lm_eval: Any = import_module("lm_eval")
TaskManager: Any = import_module("lm_eval.tasks").TaskManager
TemplateLM: Any = import_module("lm_eval.api.model").TemplateLM
models: Any = import_module("lm_eval.models.utils")
utils: Any = import_module("lm_eval.utils")

_CHUNK = 16
"""The number of tokens that are generated before stop strings are looked for."""
_OPEN = "THE_ANSWER_GOES_ON "
"""The mark in a rendered conversation of the place where its last turn breaks off."""


def run_tasks(
    trained: Trained,
    tasks: Sequence[str],
    limit: int = 0,
    few_shot: int = -1,
    chat: bool = False,
    batch: int = 32,
) -> dict[str, Any]:
    """Run tasks of the harness, and return its results.

    `tasks` are names of tasks, groups or tags, with `*`, or paths of YAML files; `limit` is the
    number of examples of each that are run (0 = all), and `few_shot` the number that come before a
    question (-1 = as the task says). `chat` writes the prompts by the folder's chat template, and
    `batch` requests run at once. A UserError says that there is no such task, that its data cannot
    be had, or that the model has no tokenizer.
    """
    manager = TaskManager()
    names = []
    for task in tasks:
        if Path(task).is_file():
            found = [task]
        else:
            found = manager.match_tasks([task])
        if not found:
            raise UserError(
                f"lm-eval has no task {task!r}{suggest(task, manager.all_tasks)}: `lm-eval ls "
                "tasks`"
            )
        names += found
    model = HarnessModel(trained, batch)
    try:
        return lm_eval.simple_evaluate(
            model,
            tasks=names,
            num_fewshot=None if few_shot < 0 else few_shot,
            limit=limit or None,
            apply_chat_template=chat,
            task_manager=manager,
            log_samples=False,
        )
    # as every error of the network, and of `datasets` for what is not there
    except OSError as error:
        raise UserError(f"the data of {', '.join(tasks)} cannot be had: {error}") from error


class HarnessModel(TemplateLM):
    """A model with the methods that the harness calls. Requests are sorted by length, so that few
    shapes are compiled.
    """

    def __init__(self, trained: Trained, batch: int):
        super().__init__()
        self.trained = trained
        self.folder, self.text, self.batch = trained.folder, require_tokenizer(trained), batch
        self.max_length, self.stop = trained.config.model.max_seq_len, stop_ids(trained, chat=True)
        self.special = special_tokens(self.folder / TOKENIZER)
        self.generator = trained.generator

    @cached_property
    def writer(self) -> ConversationWriter:
        return self.trained.writer()

    @property
    def eot_token_id(self) -> int:
        return self._special_id("eos_token", "bos_token")

    @property
    def prefix_token_id(self) -> int:
        """The token that a text without context comes after: the begin of text, or the end of one,
        or a line's end.
        """
        return self._special_id("bos_token", "eos_token")

    def _special_id(self, *names: str) -> int:
        given = [self.text.encode(self.special[name]) for name in names if name in self.special]
        ids = [int(ids[0]) for ids in given if len(ids) == 1]
        ids += [id for id in (self.text.end_of_text, *self.stop) if id is not None]
        if ids:
            return ids[0]
        return int(self.text.encode("\n")[0])

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **_: Any
    ) -> list[int]:
        begun = "bos_token" in self.special and string.startswith(self.special["bos_token"])
        special = not begun if add_special_tokens is None else add_special_tokens
        return encode_text(self.trained, string, special)

    def _loglikelihood_tokens(
        self,
        requests: Sequence[Any],
        **_: Any,
    ) -> list[tuple[float, bool]]:
        """Score the continuation of each request: (its texts, the context's ids, the continuation's
        ids).
        """
        longest = max((len(after) for _, _, after in requests), default=0)
        if longest > self.max_length:
            raise UserError(
                f"a task's answer has {longest} tokens, and the model's context {self.max_length}"
            )
        cut = [
            ((before + after)[-self.max_length - 1 :], len(after)) for _, before, after in requests
        ]
        order = sorted(
            range(len(cut)),
            key=lambda i: -len(cut[i][0]),
        )
        found: dict[int, tuple[float, bool]] = {}
        for first in range(0, len(order), self.batch):
            some = order[first : first + self.batch]
            filled = [cut[i] for i in (some * self.batch)[: self.batch]]  # always as many rows
            scores = self.generator.score(
                [ids for ids, _ in filled], [count for _, count in filled]
            )
            found |= zip(some, scores, strict=False)
        for i, (texts, _, _) in enumerate(requests):
            if texts is not None:
                self.cache_hook.add_partial("loglikelihood", texts, found[i])
        return [found[i] for i in range(len(cut))]

    def loglikelihood_rolling(
        self, requests: Sequence[Any], disable_tqdm: bool = False
    ) -> list[float]:
        """Score whole texts, cut into windows of the context's length, each token once."""
        windows = []
        owners = []
        for owner, request in enumerate(requests):
            (text,) = request.args
            cut = utils.get_rolling_token_windows(
                self.tok_encode(text), self.prefix_token_id, self.max_length, 1
            )
            windows += [(None, *utils.make_disjoint_window(window)) for window in cut]
            owners += [owner] * (len(windows) - len(owners))
        totals = [0.0] * len(requests)
        for owner, (total, _) in zip(
            owners,
            self._loglikelihood_tokens(windows),
            strict=True,
        ):
            totals[owner] += total
        return totals

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Continue contexts until one of their stop strings; a context that is too long loses its
        beginning.

        There are never more new tokens than half the model's context.
        """
        groups: dict[str, list[int]] = {}
        for i, request in enumerate(requests):
            groups.setdefault(repr(request.args[1]), []).append(i)
        found: dict[int, str] = {}
        for group in groups.values():
            asked = models.normalize_gen_kwargs(requests[group[0]].args[1])
            new = min(asked["max_gen_toks"], self.max_length // 2)
            contexts = {
                i: self.tok_encode(requests[i].args[0])[new - self.max_length :] for i in group
            }
            order = sorted(group, key=lambda i: -len(contexts[i]))
            for first in range(0, len(order), self.batch):
                some = order[first : first + self.batch]
                texts = self._until(
                    [contexts[i] for i in some], new, _sampling(asked), asked["until"], first
                )
                found |= zip(some, texts, strict=True)
        return [found[i] for i in range(len(requests))]

    def _until(
        self, prompts: list[list[int]], new: int, sampling: Sampling, until: list[str], first: int
    ) -> list[str]:
        texts: list[str] = []
        for ids in self.generator.stream(
            prompts, new, sampling, self.stop, _CHUNK, first, self.batch
        ):
            texts = [self.text.decode(row) for row in ids]
            if until and all(any(word in text for word in until if word) for text in texts):
                break
        return [models.postprocess_generated_text(text, until, None) for text in texts]

    @property
    def tokenizer_name(self) -> str:
        return self.folder.name

    def chat_template(self, chat_template: bool | str = False) -> str:
        if chat_template:
            return self.writer.template.text
        return ""

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """Write a conversation; without a generation prompt its last turn, the beginning of an
        answer, stays open.
        """
        if add_generation_prompt:
            return self.writer.prompt(Conversation(list(chat_history), {})).text
        *before, last = chat_history
        opened = Conversation(
            [*before, last | {"content": last["content"] + _OPEN}],
            {},
        )
        text, _, rest = self.writer.answers(opened, find=False).text.rpartition(_OPEN[:-1])
        # a template that strips a turn has stripped the mark
        if rest.startswith(" "):
            return text
        return text.rstrip()


def _sampling(asked: dict[str, Any]) -> Sampling:
    if not asked.get("do_sample") or not asked.get("temperature"):
        return Sampling()
    return Sampling(
        asked["temperature"],
        asked.get("top_k", 0),
        asked.get("top_p", 1.0),
    )
