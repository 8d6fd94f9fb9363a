"""The fewest layers and microbatches that keep what a pipeline does."""

from __future__ import annotations

from dataclasses import replace

from jaxpar.base.config import Config
from jaxpar.base.layout.plan import Pipeline
from jaxpar.parallel.pipeline import layers_of, microbatches
from jaxpar.verify.of_config.sizes import AxisSizes, multiple_of, pieces

_FEW = 4
"""The most virtual stages that have two layers each; if there are more, each has one."""


def few_layers(config: Config, sizes: AxisSizes, asked: AxisSizes) -> tuple[int, Pipeline]:
    """Return the fewest layers and microbatches that keep what a pipeline does.

    An odd number of layers stays odd, stages with unequal numbers of layers stay unequal, and every
    slot of a buffer that is used at all is used twice.
    """
    model = config.model
    if pieces("stage", config.rules, asked) == 1:
        # an odd number of whole periods stays odd, and a rest stays a rest
        kinds = len(few_masks(model.masks))
        periods = 2 + model.layers // model.kinds % 2
        whole = kinds * periods + bool(model.layers % model.kinds)
        return multiple_of(whole, pieces("layers", config.rules, sizes)), config.pipeline
    layers = _layers_of_parts(config, sizes, asked)
    few = _few_microbatches(config, sizes, asked)
    return sum(layers), replace(config.pipeline, microbatches=few, layers=layers)


def _layers_of_parts(config: Config, sizes: AxisSizes, asked: AxisSizes) -> tuple[int, ...]:
    """Count the layers of each virtual stage: one or two periods of the kinds of layers, unequal
    where the model's are.
    """
    model = config.model
    stages_asked = pieces("stage", config.rules, asked)
    counts = layers_of(model.layers, stages_asked, config.pipeline).counts
    parts = pieces("stage", config.rules, sizes) * config.pipeline.virtual
    if max(counts) == min(counts):
        each = 2 if parts <= _FEW else 1
        periods = (each,) * parts
    elif len(counts) == parts:
        periods = tuple(1 + (count > min(counts)) for count in counts)
    else:
        periods = (1, 2, *[1] * (parts - 2))
    kinds = len(few_masks(model.masks))
    layers = tuple(kinds * count for count in periods)
    if model.layers % model.kinds:
        return (*layers[:-1], layers[-1] - 1)
    return layers


def _few_microbatches(config: Config, sizes: AxisSizes, asked: AxisSizes) -> int:
    """Count about three microbatches a stage; fewer than stages stay fewer, and a rest stays a
    rest.
    """
    stages_asked = pieces("stage", config.rules, asked)
    stages = pieces("stage", config.rules, sizes)
    count = microbatches(config, asked)
    if count < stages_asked:
        return min(count, max(stages - 1, 1))
    over = count % stages_asked
    if stages != stages_asked:  # one more will do
        over = min(over, 1)
    return min(count, 3 * stages + over)


def few_masks(masks: tuple[str, ...]) -> tuple[str, ...]:
    """Leave out the masks that equal the mask before, so that each is there and they still take
    turns.
    """
    return tuple(word for i, word in enumerate(masks) if i == 0 or word != masks[i - 1])
