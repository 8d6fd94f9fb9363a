"""What a teacher shows of a batch: the entries that it finds most likely, with no array of all
scores, and its hidden states.

Shapes: B batch, S sequence, k entries of a token, P hidden states of a token, T their width.
"""

from __future__ import annotations

from typing import NamedTuple

from jaxtyping import Array, Float

from jaxpar.base.errors import UserError
from jaxpar.base.layout.plan import Plan
from jaxpar.models.hidden import normed_states
from jaxpar.models.model import Batch, Model
from jaxpar.models.parts import Params
from jaxpar.parallel import TopK
from jaxpar.parallel.padding import with_text
from jaxpar.parallel.zigzag import in_natural_order, in_order


class TeacherAnswer(NamedTuple):
    """What a teacher shows of a batch.

    Attributes:
      top: the most likely next entries of each token and their log-probabilities [B, S, k].
      hidden: its hidden states, as `normed_states` makes them; None where none are asked for.
    """

    top: TopK
    hidden: Float[Array, "B S P T"] | None


def teacher_answer(
    model: Model,
    params: Params,
    batch: Batch,
    plan: Plan,
    k: int,
    after: tuple[int, ...] = (),
    dtype: str = "float32",
) -> TeacherAnswer:
    """Find the k most likely next entries for each token of a batch, and the hidden states after
    some layers.

    Args:
      model: the model; it is run without dropout.
      params: its parameters, in the layout of the plan, which has no stages.
      batch: int32 arrays [B, S]: `tokens`, and for packed documents `positions` and `segments`; a
        model with experts tells padding from text by the `labels`, as its loss does.
      plan: says how it runs on several devices.
      k: how many entries.
      after: after how many layers there is a hidden state, each at least 1.
      dtype: that of the hidden states.

    Returns:
      What it shows, in the tokens' own order.

    Raises:
      UserError: the sequence or the arrays do not fit the plan, k is more than the vocabulary, or
        the model's scores have a bias.
    """
    order = (plan.context.strategy, plan.overlap.cuts_sequence)
    told = with_text(batch) if model.config.experts else batch
    streams = model.streams(params, in_order(told, plan, *order), plan, after=after)
    head = model.head(params, streams.last, plan)
    family = model.config.family
    if head.bias_V is not None:
        raise UserError(
            f"model.family={family} adds a bias to its scores, as models of masked tokens "
            "do: a teacher predicts the next token"
        )
    found = model.ops(plan).linear_top_k(head.scores(model.config), k)
    top = TopK(*(in_natural_order(x, plan, *order) for x in found))
    if not after:
        return TeacherAnswer(top, None)
    hidden_BSPT = normed_states(streams.after).astype(dtype)
    return TeacherAnswer(top, in_natural_order(hidden_BSPT, plan, *order))
