"""Positions of encoders whose table of positions was stretched for longer inputs, as E5-4K's.

D. Zhu et al., "LongEmbed: Extending Embedding Models for Long Context Retrieval", EMNLP 2024: position `i` of the
original 512 became position `8 i` of 4,096, with new ones in between. Inputs of up to 512 tokens keep the positions
that the model was trained with, longer ones use all of them.
"""

from __future__ import annotations

from dataclasses import replace

from .backbones import Backbone
from .batching import PairLayout


def spread_positions(layout: PairLayout, backbone: Backbone, step: int) -> PairLayout:
    """The layout, with positions `0, step, 2 step, ...` for inputs that are short enough for them.

    Each input is judged by its own number of tokens, special ones included. Differs from the LongEmbed code, which
    judges whole batches, so that a short text's embedding depends on what it is batched with.

    Args:
        layout: how a text becomes an input.
        backbone: the encoder.
        step: 8 for E5-4K; 1 changes nothing.

    Raises:
        ValueError: if the encoder has no table of positions that could be used so.
    """
    if step == 1:
        return layout
    kind, longest = backbone.model.config.model_type, backbone.max_length
    if kind != "bert" or longest is None or longest < step:
        raise ValueError(
            f"position_step={step} needs a BERT with a stretched table of positions, such as E5-4K; this backbone is "
            f"of type {kind!r} and takes {longest} tokens: leave position_step at 1"
        )
    return replace(layout, spread=(longest // step, step))
