"""Small encoders made of other ones: with fewer layers, or with Longformer's attention."""

from __future__ import annotations

import copy
from typing import Any

import torch


def first_layers(encoder: Any, layers: int) -> Any:
    """A copy of a BERT with its first layers alone."""
    shorter = copy.deepcopy(encoder)
    shorter.encoder.layer = shorter.encoder.layer[:layers]
    shorter.config.num_hidden_layers = layers
    return shorter


def as_longformer(encoder: Any, window: int) -> Any:
    """A Longformer with the weights of a BERT, as Longformer itself was begun (Beltagy et al. 2020, section 5).

    Its second attention, of tokens that see all others, begins as a copy of the first.

    Args:
        encoder: a `BertModel`.
        window: tokens that a token attends to, half of them on either side.
    """
    from transformers import LongformerConfig, LongformerModel

    bert = encoder.config
    shared = (
        "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "hidden_act",
        "hidden_dropout_prob", "attention_probs_dropout_prob", "type_vocab_size", "layer_norm_eps", "pad_token_id",
    )  # fmt: skip
    before = bert.pad_token_id + 1  # positions that Longformer counts no token by
    config = LongformerConfig(
        **{name: getattr(bert, name) for name in shared},
        attention_window=[window] * bert.num_hidden_layers,
        max_position_embeddings=bert.max_position_embeddings + before,
    )
    longformer = LongformerModel(config, add_pooling_layer=False)
    own, weights = longformer.state_dict(), {}
    for name, value in encoder.state_dict().items():
        if name.endswith("position_embeddings.weight"):
            value = torch.cat([value.new_zeros(before, value.shape[1]), value])
        *path, layer, kind = name.split(".")
        for each in (layer, f"{layer}_global"):
            if (key := ".".join([*path, each, kind])) in own:
                weights[key] = value
    longformer.load_state_dict(weights)
    return longformer
