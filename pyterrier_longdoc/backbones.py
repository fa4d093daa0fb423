"""Loads a Hugging Face checkpoint and takes it apart into encoder, representation step and final layer.

A cross-encoder checkpoint (`...ForSequenceClassification`) is a backbone, a *representation step* (BERT:
dense layer and tanh; the others: their classification head without its last layer) and a final linear layer.
Kept apart, the three let every head start from scores that make sense before any training.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModel, AutoModelForSequenceClassification, AutoTokenizer
from transformers.activations import get_activation
from transformers.utils import logging as transformers_logging

from .batching import PairLayout

logger = logging.getLogger(__name__)

DEFAULT_BACKBONE = "cross-encoder/ms-marco-MiniLM-L6-v2"
"""A public MS MARCO passage cross-encoder with one logit (22.7M parameters)."""

FORMAT = "pyterrier_longdoc"
"""The `format` entry of the config.json of models that this package saves."""

_POSITIONS_FROM_IDS = {
    "camembert", "data2vec-text", "ibert", "longformer", "mpnet", "roberta", "roberta-prelayernorm", "xlm-roberta",
    "xlm-roberta-xl",
}  # fmt: skip
"""Families that number positions from `pad_token_id + 1`, counting real tokens alone."""


class Representation(nn.Module):
    """The step of a cross-encoder between its pooled state and its final layer: `norm(act(dense(dropout(x))))`."""

    def __init__(
        self,
        dense: nn.Module,
        activation: Callable[[torch.Tensor], torch.Tensor],
        dropout: float = 0.0,
        norm: nn.Module | None = None,
    ) -> None:
        super().__init__()
        self.dropout = nn.Dropout(dropout)
        self.dense = dense
        self.activation = activation
        self.norm = norm if norm is not None else nn.Identity()

    def forward(self, pooled: torch.Tensor) -> torch.Tensor:
        """`(V, H)` pooled states to `(V, H)` representations."""
        return self.norm(self.activation(self.dense(self.dropout(pooled))))


@dataclass(eq=False)
class Backbone:
    """A pre-trained encoder and what came with it.

    Attributes:
        model: the encoder without pooler or head.
        tokenizer: its fast tokenizer; None for an encoder built from a stored description.
        representation: the cross-encoder's representation step; None for a plain encoder.
        final: the cross-encoder's last layer, `Linear(H, 1)`; None for a plain encoder.
        pooling: `"cls"` or `"mean"`, how states become one vector.
    """

    model: Any
    tokenizer: Any
    representation: Representation | None
    final: nn.Linear | None
    pooling: str

    @property
    def hidden_size(self) -> int:
        """H, the width of the last layer's states."""
        return int(self.model.config.hidden_size)

    @property
    def channels(self) -> int:
        """Layers whose states can be looked at, the embedding layer included."""
        return int(self.model.config.num_hidden_layers) + 1

    @property
    def max_length(self) -> int | None:
        """Most tokens in one input, special tokens included; None where nothing limits it."""
        config = self.model.config
        positions = getattr(config, "max_position_embeddings", None)
        if positions is None or positions <= 0:
            return None
        if config.model_type in _POSITIONS_FROM_IDS:
            # RoBERTa numbers its positions from pad_token_id + 1.
            return int(positions - config.pad_token_id - 1)
        return int(positions)

    def describe(self) -> dict[str, Any]:
        """JSON-able description from which `build_backbone` makes the same modules."""
        return {"config": self.model.config.to_dict(), "cross_encoder": self.final is not None}

    def pair_layout(self) -> PairLayout:
        """The tokenizer's own layout for a pair of texts."""
        config = self.model.config
        encoded = self.tokenizer("a", "b")
        sides = encoded.sequence_ids()
        first, second = sides.index(0), sides.index(1)
        last_first = len(sides) - 1 - sides[::-1].index(0)
        last_second = len(sides) - 1 - sides[::-1].index(1)
        ids = encoded["input_ids"]
        types = encoded.get("token_type_ids")
        if types is None or getattr(config, "type_vocab_size", 0) < 2:
            segments = None
        else:
            segments = (types[0], types[first], types[last_first + 1], types[second], types[-1])
        pad_id = self.tokenizer.pad_token_id
        return PairLayout(
            prefix=tuple(ids[:first]),
            middle=tuple(ids[last_first + 1 : second]),
            suffix=tuple(ids[last_second + 1 :]),
            types=segments,
            pad_id=0 if pad_id is None else pad_id,
            position_offset=config.pad_token_id + 1 if config.model_type in _POSITIONS_FROM_IDS else None,
        )

    def text_layout(self, prefix: str = "") -> tuple[PairLayout, str]:
        """The tokenizer's own layout for a single text, with `prefix` before it; the query part stays empty.

        Returns:
            The layout, and what must be put before a text that is tokenised apart from the prefix, so that together
            they are the tokens of `prefix + text`.
        """
        encoded = self.tokenizer("a")
        sides = encoded.sequence_ids()
        first, last = sides.index(0), len(sides) - 1 - sides[::-1].index(0)
        ids = encoded["input_ids"]
        prefix_ids, lead = self._prefix_ids(prefix) if prefix else ([], "")
        types = (
            (0,) * 5 if getattr(self.model.config, "type_vocab_size", 0) > 1 and "token_type_ids" in encoded else None
        )
        pad_id = self.tokenizer.pad_token_id
        layout = PairLayout(
            prefix=(*ids[:first], *prefix_ids),
            middle=(),
            suffix=tuple(ids[last + 1 :]),
            types=types,
            pad_id=0 if pad_id is None else pad_id,
        )
        return layout, lead

    def _prefix_ids(self, prefix: str) -> tuple[list[int], str]:
        """Tokens of a prefix, and what a text after it must begin with.

        A space between prefix and text is dropped (WordPiece), or belongs to the text's first token, which either
        brings it along (SentencePiece) or must be given it (byte-level BPE).
        """

        def ids(text: str) -> list[int]:
            return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

        before, together = ids(prefix.rstrip()), ids(prefix + "a")
        for lead in ("", " "):
            if before + ids(lead + "a") == together:
                return before, lead
        return ids(prefix), ""


def load_backbone(name: str, *, trust_remote_code: bool = False) -> Backbone:
    """Loads a checkpoint in fp32, whatever the precision it is stored in.

    Args:
        name: a model on the Hugging Face hub, or a folder.
        trust_remote_code: run modelling code that the checkpoint brings along.

    Raises:
        ValueError: for a folder that is no checkpoint, a checkpoint of this package (which has `load` for that),
            a classifier with more than two labels, or a checkpoint with missing weights or no fast tokenizer.
    """
    _check_folder(name)
    config = AutoConfig.from_pretrained(name, trust_remote_code=trust_remote_code)
    if config.is_encoder_decoder:
        raise ValueError(f"checkpoint {name!r} ({config.model_type}) is an encoder-decoder; an encoder is needed")
    classifier = _is_cross_encoder(config)
    if _is_classifier(config):
        _check_labels(name, config, supported=classifier)
    auto = AutoModelForSequenceClassification if classifier else AutoModel
    with _quiet_loading():
        model, report = auto.from_pretrained(
            name,
            config=config,
            dtype=torch.float32,
            use_safetensors=True,
            trust_remote_code=trust_remote_code,
            output_loading_info=True,
        )
    missing = [key for key in report["missing_keys"] if "pooler" not in key or classifier]
    if missing:
        raise ValueError(f"checkpoint {name!r} lacks {len(missing)} weights, among them {sorted(missing)[:3]}")
    return _take_apart(model, load_tokenizer(name, trust_remote_code=trust_remote_code))


def load_tokenizer(name: str, *, trust_remote_code: bool = False) -> Any:
    """The fast tokenizer of a checkpoint.

    Raises:
        ValueError: if there is no fast one; character offsets and pair layouts come from it.
    """
    tokenizer = AutoTokenizer.from_pretrained(name, use_fast=True, trust_remote_code=trust_remote_code)
    if not tokenizer.is_fast:
        raise ValueError(f"checkpoint {name!r} has no fast tokenizer (tokenizer.json), which this package needs")
    return tokenizer


def build_backbone(description: dict[str, Any], tokenizer: Any) -> Backbone:
    """The modules that `Backbone.describe` described, with random weights, for strict loading afterwards."""
    fields = dict(description["config"])
    config = AutoConfig.for_model(fields.pop("model_type"), **fields)
    config.dtype = torch.float32
    auto = AutoModelForSequenceClassification if description["cross_encoder"] else AutoModel
    return _take_apart(auto.from_config(config), tokenizer)


def _take_apart(model: Any, tokenizer: Any) -> Backbone:
    config = model.config
    if not _is_cross_encoder(config) or not hasattr(model, "classifier"):
        if isinstance(getattr(model, "pooler", None), nn.Module):
            # Never used in forward: it would only receive no gradient and inflate checkpoints.
            model.pooler = None
        return Backbone(model, tokenizer, None, None, "cls")
    representation, final = _CLASSIFIERS[config.model_type](model)
    encoder = model.base_model
    if isinstance(getattr(encoder, "pooler", None), nn.Module):
        encoder.pooler = None
    pooling = getattr(config, "classifier_pooling", "cls") if config.model_type == "modernbert" else "cls"
    return Backbone(encoder, tokenizer, representation, _one_logit(final), pooling)


def _one_logit(final: nn.Linear) -> nn.Linear:
    """`Linear(H, 1)`; of two logits, the margin logit[1] - logit[0], which ranks as log p(relevant) does."""
    if final.out_features == 1:
        return final
    margin = nn.Linear(final.in_features, 1)
    with torch.no_grad():
        margin.weight.copy_(final.weight[1:2] - final.weight[0:1])
        margin.bias.copy_(final.bias[1:2] - final.bias[0:1])
    return margin


def _bert(model: Any) -> tuple[Representation, nn.Linear]:
    return Representation(model.bert.pooler.dense, nn.Tanh()), model.classifier


def _dense_out_proj(activation: str) -> Callable[[Any], tuple[Representation, nn.Linear]]:
    def parts(model: Any) -> tuple[Representation, nn.Linear]:
        head = model.classifier
        return Representation(head.dense, get_activation(activation), dropout=head.dropout.p), head.out_proj

    return parts


def _distilbert(model: Any) -> tuple[Representation, nn.Linear]:
    return Representation(model.pre_classifier, nn.ReLU()), model.classifier


def _deberta(model: Any) -> tuple[Representation, nn.Linear]:
    pooler = model.pooler
    activation = get_activation(model.config.pooler_hidden_act)
    return Representation(pooler.dense, activation, dropout=float(model.config.pooler_dropout)), model.classifier


def _modernbert(model: Any) -> tuple[Representation, nn.Linear]:
    return Representation(model.head.dense, model.head.act, norm=model.head.norm), model.classifier


_CLASSIFIERS: dict[str, Callable[[Any], tuple[Representation, nn.Linear]]] = {
    "bert": _bert,
    "electra": _dense_out_proj("gelu"),
    "roberta": _dense_out_proj("tanh"),
    "xlm-roberta": _dense_out_proj("tanh"),
    "camembert": _dense_out_proj("tanh"),
    "deberta": _deberta,
    "deberta-v2": _deberta,
    "distilbert": _distilbert,
    "modernbert": _modernbert,
}


def _is_cross_encoder(config: Any) -> bool:
    return config.model_type in _CLASSIFIERS and _is_classifier(config)


def _is_classifier(config: Any) -> bool:
    return any(name.endswith("ForSequenceClassification") for name in config.architectures or [])


def _check_labels(name: str, config: Any, *, supported: bool) -> None:
    if config.num_labels > 2:
        raise ValueError(
            f"checkpoint {name!r} is a classifier with {config.num_labels} labels; a cross-encoder for ranking has "
            f"one (a score) or two (not relevant, relevant)"
        )
    if not supported:
        logger.warning(
            "%r: the classification head of %s is not among those that can be taken over (%s): it is left out, and the "
            "model must be trained",
            name,
            config.model_type,
            ", ".join(_CLASSIFIERS),
        )
    elif config.num_labels == 2:
        logger.warning("%r has two labels: its score is logit[1] - logit[0]", name)


def _check_folder(name: str) -> None:
    folder = Path(name)
    if not folder.is_dir():
        if not could_be_hub_id(name):
            raise ValueError(f"backbone {name!r} is neither a folder nor the id of a model on the Hugging Face hub")
        return
    if not (folder / "config.json").is_file():
        raise ValueError(
            f"folder {name!r} is no checkpoint: it has no config.json (a Hugging Face checkpoint has config.json, "
            f"model.safetensors and tokenizer files)"
        )
    if json.loads((folder / "config.json").read_text(encoding="utf-8")).get("format") == FORMAT:
        raise ValueError(f"{name!r} holds a model saved by this package: restore it with its class's load({name!r})")


def could_be_hub_id(name: str) -> bool:
    """Whether a model on the Hugging Face hub may be called so: `name` or `user/name`."""
    return name.count("/") <= 1 and not name.startswith((".", "/", "~"))


@contextmanager
def _quiet_loading() -> Iterator[None]:
    """No report of unused heads while loading: what matters of it is checked and raised."""
    verbosity = transformers_logging.get_verbosity()
    shows_bars = transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(verbosity)
        if shows_bars:
            transformers_logging.enable_progress_bar()
