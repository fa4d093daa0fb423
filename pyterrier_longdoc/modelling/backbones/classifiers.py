"""Splits checkpoints with a classification head into encoder, representation step and final layer."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from transformers.activations import get_activation

from .alibi import AlibiBert, AlibiConfig, weights_of
from .backbone import Backbone
from .families import family_of
from .t5 import FirstStep


class Representation(nn.Sequential):
    """The layers of a cross-encoder between its pooled state and its final layer: `norm(act(dense(dropout(x))))`.

    Maps `(V, H)` pooled states to `(V, H)` representations.
    """

    def __init__(self, dense: nn.Module, activation: str, dropout: float = 0.0, norm: nn.Module | None = None) -> None:
        steps = {"dropout": nn.Dropout(dropout), "dense": dense, "activation": get_activation(activation), "norm": norm}
        super().__init__(OrderedDict((name, step or nn.Identity()) for name, step in steps.items()))


def is_classifier(config: Any) -> bool:
    """Return whether a configuration names a classification head."""
    return any(name.endswith("ForSequenceClassification") for name in config.architectures or [])


def split_classifier(model: Any) -> Backbone:
    """Return the parts of a classifier with a known head, or of a plain encoder."""
    config = model.config
    family = family_of(config)
    head = family.head
    final = None if head is None else _part(model, head.final)
    if head is None or not isinstance(final, nn.Linear):
        if family.kind == "decoder":
            return Backbone(without_pooler(model.base_model), pooling="mean")
        return Backbone(without_pooler(model), pooling="cls")
    representation = None
    if head.dense:
        dropout, norm = (_part(model, place) if place else None for place in (head.dropout, head.norm))
        activation = getattr(config, head.activation, head.activation)
        representation = Representation(_part(model, head.dense), activation, getattr(dropout, "p", 0.0), norm)
    pooling = getattr(config, "classifier_pooling", family.pooling)
    pooling = {"bos": "cls"}.get(pooling, pooling)
    final = scaled(one_logit(final, config.id2label), 1 / getattr(config, "classifier_temperature", 1.0))
    return Backbone(without_pooler(model.base_model), representation=representation, final=final, pooling=pooling)


def _part(model: Any, place: str) -> Any:
    """Return the module at a place such as `"classifier.dense"`; None if there is none."""
    for name in place.split("."):
        model = getattr(model, name, None)
    return model


def take_answers(model: Any, tokenizer: Any, answers: tuple[str | int, ...]) -> Backbone:
    """Return the parts of a language model whose score is the logit of one token, minus that of a second one if given.

    The first token is the answer for a relevant document; the sigmoid of the difference is its probability among both.
    """
    tokens = [_token(tokenizer, answer) for answer in answers]
    if len(set(tokens)) < len(tokens):
        raise ValueError(f"answers={answers!r} are the same token for this backbone: all scores would be 0")
    ids = torch.tensor([[*tokens, *tokens[::-1]]])
    words = model.get_output_embeddings()
    logits, final = _logits(model, ids), _margin(words, *tokens)
    encoder, pooling = (FirstStep(model), "cls") if model.config.is_encoder_decoder else (model.base_model, "last")
    with torch.no_grad():
        linear = words(encoder(input_ids=ids).last_hidden_state[0, -1])
        # Logits may be scaled, as in T5, Granite and Cohere.
        scale = float(linear @ logits / linear.square().sum())
        is_linear = scale > 0 and bool((scale * linear - logits).norm() <= 1e-3 * logits.norm())
    scaled(final, scale)
    if not is_linear or getattr(model.config, "final_logit_softcapping", None) is not None:
        raise ValueError(
            f"the logits of {type(model).__name__} are not a linear function of its last state, so a head cannot "
            f"use them: give a template without answers, and train the model"
        )
    return Backbone(encoder, final=final, pooling=pooling)


def _token(tokenizer: Any, answer: str | int) -> int:
    ids = [answer] if isinstance(answer, int) else tokenizer(answer, add_special_tokens=False)["input_ids"]
    is_unknown = isinstance(answer, str) and tokenizer.unk_token_id in ids
    if len(ids) != 1 or is_unknown or not 0 <= ids[0] < len(tokenizer):
        raise ValueError(f"answer {answer!r} must be a single known token of this backbone, but is {ids}")
    return int(ids[0])


@torch.no_grad()
def _logits(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """Return the `(words,)` logits of a language model for the token that follows an input `(1, T)`."""
    inputs = {"input_ids": ids}
    if model.config.is_encoder_decoder:
        inputs["decoder_input_ids"] = torch.tensor([[model.config.decoder_start_token_id]])
    was_training = model.training
    logits: torch.Tensor = model.eval()(**inputs, use_cache=False).logits[0, -1]
    model.train(was_training)
    return logits


def alibi_parts(state: Mapping[str, torch.Tensor], config_json: Mapping[str, Any]) -> Backbone:
    """Return the parts of a JINA-v2 or MosaicBERT checkpoint with these weights and this config.json."""
    config = AlibiConfig.from_published(config_json, qk_norm=any("layer_norm_q" in name for name in state))
    parts = build_alibi(config, "classifier.weight" in state)
    parts.model.load_state_dict(weights_of(state))
    if parts.representation is None:
        # JINA's embeddings are means of states; MosaicBERT is a masked language model.
        return replace(parts, pooling="mean" if config_json.get("emb_pooler") == "mean" else "cls")
    weights = {name.removeprefix("bert."): tensor for name, tensor in state.items()}
    final = nn.Linear(config.hidden_size, len(weights["classifier.weight"]))
    layers: tuple[tuple[Any, str], ...] = ((parts.representation.dense, "pooler.dense"), (final, "classifier"))
    for layer, name in layers:
        layer.load_state_dict({kind: weights[f"{name}.{kind}"] for kind in ("weight", "bias")})
    return replace(parts, final=one_logit(final, config_json.get("id2label") or {}))


def build_alibi(config: AlibiConfig, classifier: bool) -> Backbone:
    """Return the same parts with random weights; with BERT's classification head if `classifier`."""
    dense = Representation(nn.Linear(config.hidden_size, config.hidden_size), "tanh") if classifier else None
    return Backbone(AlibiBert(config), representation=dense, pooling="cls")


def without_pooler(encoder: Any) -> Any:
    """Return the encoder without its unused pooler, which would get no gradient and enlarge checkpoints."""
    if isinstance(getattr(encoder, "pooler", None), nn.Module):
        encoder.pooler = None
    return encoder


_OPPOSITES = {"yes": "no", "true": "false", "positive": "negative", "pos": "neg", "label1": "label0", "1": "0"}
_NEGATIONS = ("not", "non", "no", "ir", "un", "in")


def relevant_label(names: Mapping[Any, Any]) -> int | None:
    """Return which of two labels is the positive one, by their names; None if they do not show it.

    It is the second one without names, and with the default names of transformers, "LABEL_0" and "LABEL_1".

    Example:
        >>> relevant_label({0: "relevant", 1: "not relevant"})
        0
    """
    ordered = [name for _, name in sorted(names.items())] if len(names) == 2 else ["0", "1"]
    words = ["".join(filter(str.isalnum, str(name).lower())) for name in ordered]
    for label, word in enumerate(words):
        if words[1 - label] in (_OPPOSITES.get(word), *(negation + word for negation in _NEGATIONS)):
            return label
    return None


def one_logit(final: nn.Linear, names: Mapping[Any, Any] | None = None) -> nn.Linear:
    """Return `Linear(H, 1)` with a bias; of two logits the relevant label's minus the other, as log p(relevant) ranks.

    `names` are the labels' names, see `relevant_label`.
    """
    if final.out_features == 2:
        relevant = relevant_label(names or {}) or 0
        return _margin(final, relevant, 1 - relevant)
    if final.bias is None:
        final.bias = nn.Parameter(torch.zeros(1))
    return final


@torch.no_grad()
def scaled(final: nn.Linear, scale: float) -> nn.Linear:
    """Multiply the weights of a final layer, and with them its scores, by a factor; return the layer."""
    final.weight.mul_(scale)
    final.bias.mul_(scale)
    return final


def _margin(logits: nn.Linear, yes: int, no: int | None = None) -> nn.Linear:
    """Return `Linear(H, 1)`: one logit, minus another one if given."""
    margin = nn.Linear(logits.in_features, 1)
    bias = torch.zeros(logits.out_features) if logits.bias is None else logits.bias
    with torch.no_grad():
        margin.weight.copy_(logits.weight[yes : yes + 1])
        margin.bias.copy_(bias[yes])
        if no is not None:
            margin.weight.sub_(logits.weight[no : no + 1])
            margin.bias.sub_(bias[no])
    return margin
