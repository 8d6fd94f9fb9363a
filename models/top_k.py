"""What a model finds most likely: a teacher's answers, with no array of all scores."""

from __future__ import annotations

from jaxpar.base.errors import UserError
from jaxpar.base.plan import Plan
from jaxpar.models.model import Batch, Model
from jaxpar.models.parts import Params
from jaxpar.parallel import TopK
from jaxpar.parallel.token_order import in_natural_order, in_order


def top_k(model: Model, params: Params, batch: Batch, plan: Plan, k: int) -> TopK:
    """Find the k most likely next entries for each token of a batch.

    Args:
      model: the model; it is run without dropout.
      params: its parameters, in the layout of the plan, which has no stages.
      batch: int32 arrays [B, S]: `tokens`, and for packed documents `positions` and `segments`.
      plan: says how it runs on several devices.
      k: how many entries.

    Returns:
      The entries and their log-probabilities [B, S, k], in the tokens' own order.

    Raises:
      UserError: the sequence or the arrays do not fit the plan, k is more than the vocabulary, or
        the model's scores have a bias.
    """
    order = (plan.context.strategy, plan.overlap.cuts_sequence)
    x_BSD, _ = model.hidden_states(params, in_order(batch, plan, *order), plan)
    head = model.head(params, x_BSD, plan)
    sizes = model.config
    if head.bias_V is not None:
        raise UserError(
            f"model.family={sizes.family} adds a bias to its scores, as models of masked tokens "
            "do: a teacher predicts the next token"
        )
    found = model.ops(plan).linear_top_k(
        head.x_BSD, head.table_VD, k, sizes.vocab_size, sizes.logit_softcap
    )
    return TopK(*(in_natural_order(x, plan, *order) for x in found))
