"""The table of architectures: what this package knows about each family of backbones.

A family is an architecture of transformers, named by the `model_type` of its configurations. A new one is a row here,
and a configuration in `tests/support/tiny.py` for the tests of all rows. The configuration of a checkpoint itself has
its longest input and its number of segments, and transformers its implementations of attention.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, MODEL_FOR_MASKED_LM_MAPPING_NAMES

from .architectures import BigBirdRules, EqualLengthRules, InputRules, LongformerRules


@dataclass(frozen=True)
class Head:
    """The classification head of a family: `final(norm(activation(dense(dropout(pooled state)))))`.

    Attributes:
        final: the place of the last layer in the classifier.
        dense: the place of the layer before it; `""` if the last layer is the only one.
        activation: the name of the function after `dense`, or of the configuration's entry with this name.
        dropout: the place of the dropout before `dense`; `""` for none.
        norm: the place of the normalization after the activation; `""` for none.
    """

    final: str = "classifier"
    dense: str = ""
    activation: str = ""
    dropout: str = ""
    norm: str = ""


@dataclass(frozen=True)
class Family:
    """What an architecture can do, and what its passes need.

    Attributes:
        name: its `model_type`.
        head: its classification head; None if scores cannot be taken from it.
        pooling: how the head turns states into one vector, unless a configuration has `classifier_pooling`: `"cls"`,
            `"mean"` or `"last"`.
        kind: `"encoder"`, `"decoder"` (a language model) or `"encoder-decoder"`.
        positions: how it knows them: `"learned"` (added to the words, and nowhere else), `"rotary"`, `"relative"`,
            `"linear biases"`, or `""` if nothing here depends on it.
        counts_from_padding: whether learned positions begin at `pad_token_id + 1` and skip padding.
        rules: its rule of padding, and other needs of its passes.
        arguments: the backbone's arguments in every pass.
        options: arguments of `LongP` that only this family has.
        in_transformers: whether transformers has it.
        supports_openvino: whether exports to OpenVINO are tested. Those of Longformer and BigBird are wrong at lengths
            other than that of the export (huggingface/optimum issues 505 and 776).
        papers: keys of `references.bib`.
    """

    name: str
    head: Head | None = None
    pooling: str = "cls"
    kind: str = "encoder"
    positions: str = ""
    counts_from_padding: bool = False
    rules: type[InputRules] = InputRules
    arguments: Mapping[str, Any] = field(default_factory=dict)
    options: tuple[str, ...] = ()
    in_transformers: bool = True
    supports_openvino: bool = False
    papers: tuple[str, ...] = ()

    @property
    def is_language_model(self) -> bool:
        """Whether it generates text, so that its score can be the logit of a word."""
        return self.kind != "encoder"

    @property
    def is_plain(self) -> bool:
        """Whether it is an encoder of transformers that needs no more than ids and a mask."""
        return self.kind == "encoder" and self.rules is InputRules and self.in_transformers

    @property
    def supports_export(self) -> bool:
        """Whether a model with one score per window can be written as a classifier of transformers."""
        return self.is_plain and self.head is not None


_BERT = Head(dense="base_model.pooler.dense", activation="tanh")
_ROBERTA = Head("classifier.out_proj", "classifier.dense", "tanh", "classifier.dropout")
_DEBERTA = Head(dense="pooler.dense", activation="pooler_hidden_act", dropout="pooler.dropout")
_FROM_PADDING: dict[str, Any] = {"positions": "learned", "counts_from_padding": True}

DECODER = Family("decoder", Head("score"), pooling="last", kind="decoder", arguments={"use_cache": False})
"""All left-to-right language models without a row of their own (Llama, Mistral, Qwen, Gemma, Phi, OLMo, OPT, ...): only
the last token attends to the whole input, and only generation needs a cache."""

BIDIRECTIONAL = replace(
    DECODER, name="bidirectional", pooling="mean", arguments={**DECODER.arguments, "is_causal": False}
)
"""Language models with `is_causal: false` in their configuration, in which all tokens attend to all."""

_ROWS = (
    Family("bert", _BERT, positions="learned", supports_openvino=True),
    Family("electra", replace(_ROBERTA, activation="gelu"), positions="learned", supports_openvino=True),
    Family("roberta", _ROBERTA, **_FROM_PADDING, supports_openvino=True),
    Family("xlm-roberta", _ROBERTA, **_FROM_PADDING, supports_openvino=True),
    Family("camembert", _ROBERTA, **_FROM_PADDING),
    Family("distilbert", Head(dense="pre_classifier", activation="relu"), supports_openvino=True),
    Family("deberta", _DEBERTA, positions="relative"),
    Family("deberta-v2", _DEBERTA, positions="relative"),
    Family(
        "modernbert",
        Head(dense="head.dense", activation="classifier_activation", norm="head.norm"),
        positions="rotary",
        supports_openvino=True,
        papers=("warner-2025-smarter",),
    ),
    Family("nomic_bert", _BERT, positions="rotary", papers=("nussbaum-2025-nomic",)),
    Family("gte", _BERT, positions="rotary"),
    Family("eurobert", Head(dense="dense", activation="gelu"), positions="rotary", papers=("boizard-2025-eurobert",)),
    Family(
        "longformer",
        _ROBERTA,
        **_FROM_PADDING,
        rules=LongformerRules,
        options=("global_attention", "attention_window"),
        papers=("beltagy-2020-longformer",),
    ),
    Family(
        "big_bird",
        replace(_ROBERTA, activation="hidden_act"),
        positions="learned",
        rules=BigBirdRules,
        options=("attention_type",),
        papers=("zaheer-2020-big",),
    ),
    # JINA-v2 and MosaicBERT, see `alibi.py`.
    Family("alibi-bert", _BERT, positions="linear biases", in_transformers=False, papers=("press-2022-train",)),
    *(Family(name, kind="encoder-decoder", positions="relative") for name in ("t5", "mt5", "umt5")),
    # Encoders without a head that can be used; see `counts_from_padding`.
    *(
        Family(name, counts_from_padding=True)
        for name in (
            *("data2vec-text", "esm", "ibert", "layoutlmv3", "lilt", "luke", "markuplm", "mpnet"),
            *("roberta-prelayernorm", "xlm-roberta-xl", "xmod"),
        )
    ),
    # Their masks do not apply to every step (convolutions, Fourier transforms).
    *(Family(name, rules=EqualLengthRules) for name in ("convbert", "fnet", "nystromformer")),
)

FAMILIES: Mapping[str, Family] = MappingProxyType({family.name: family for family in _ROWS})
"""The rows by name."""


def family_of(config: Any) -> Family:
    """Return the row of a configuration; for an architecture without one, what transformers tells about it."""
    name = str(config.model_type)
    if name in FAMILIES:
        return FAMILIES[name]
    if name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES and name not in MODEL_FOR_MASKED_LM_MAPPING_NAMES:
        return replace(DECODER if getattr(config, "is_causal", True) else BIDIRECTIONAL, name=name)
    return Family(name, kind="encoder-decoder" if getattr(config, "is_encoder_decoder", False) else "encoder")


_PAPERS_OF_CHECKPOINTS = {
    "jina-embeddings-v2": "gunther-2023-jina",
    "jina-bert": "gunther-2023-jina",
    "mosaic-bert": "portes-2023-mosaicbert",
    "tinyllama": "zhang-2024-tinyllama",
}
"""From a part of the lower-cased name of a checkpoint, whose family has others, too, to a key of `references.bib`."""


def papers_of(name: str, family: Family | None) -> list[str]:
    """Return the papers of a checkpoint: of its family, if it is known, and those that its name tells."""
    named = [paper for part, paper in _PAPERS_OF_CHECKPOINTS.items() if part in name.lower()]
    return [*(() if family is None else family.papers), *named]
