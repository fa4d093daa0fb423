"""Loads a Hugging Face checkpoint and takes it apart into encoder, representation step and final layer.

A cross-encoder checkpoint (`...ForSequenceClassification`) is a backbone, a *representation step* (BERT:
dense layer and tanh; the others: their classification head without its last layer) and a final linear layer.
Kept apart, the three let every head start from scores that make sense before any training.
"""

from __future__ import annotations

import logging
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from torch import nn
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PretrainedConfig,
)

from ...common.hub import find_file, reachable
from ...common.packaged import encoder_folder
from ..devices import in_own_memory
from ..inputs import InputFormat
from ..templates import TEMPLATES, Template, names_roles, seams, template_of_roles, wording
from .alibi import AlibiConfig, is_published_layout
from .architectures import (
    POSITIONS_FROM_IDS,
    BackboneOptions,
    InputRules,
    is_decoder,
    is_language_model,
    quiet,
    rules_for,
    use_attention,
)
from .classifiers import (
    CLASSIFIERS,
    Parts,
    alibi_parts,
    build_alibi,
    has_known_head,
    is_classifier,
    one_logit,
    take_answers,
    take_apart,
    without_pooler,
)
from .sentence_transformers_files import (
    CrossEncoderFiles,
    RepresentationSteps,
    cross_encoder_files,
    load_layers,
    read_weights,
)
from .t5 import ENCODER_DECODERS, FirstStep

logger = logging.getLogger(__name__)

DEFAULT_BACKBONE = "cross-encoder/ms-marco-MiniLM-L6-v2"
"""A public MS MARCO passage cross-encoder with one logit (22.7M parameters)."""

SAVED_FORMAT = "pyterrier_longdoc"
"""The `format` entry of the config.json of models that this package saves."""


@dataclass(eq=False)
class Backbone:
    """A pre-trained encoder and what came with it.

    Attributes:
        model: the encoder without pooler or head.
        tokenizer: its fast tokenizer; None for an encoder built from a stored description.
        representation: the cross-encoder's representation step; None for a plain encoder.
        final: the cross-encoder's last layer, `Linear(H, 1)`; None for a plain encoder.
        pooling: `"cls"`, `"mean"` or `"last"`, how states become one vector.
        template: the words around query and text; None for the tokenizer's pair layout.
        rules: what the architecture needs beyond ids and mask.
        options: what was asked for.
    """

    model: Any
    tokenizer: Any
    representation: nn.Module | None
    final: nn.Linear | None
    pooling: str
    template: Template | None = field(default=None, kw_only=True)
    rules: InputRules = field(default_factory=InputRules, kw_only=True)
    options: BackboneOptions = field(default_factory=BackboneOptions, kw_only=True)

    @property
    def family(self) -> str:
        """The architecture, as transformers calls it."""
        return str(self.model.config.model_type)

    @property
    def hidden_size(self) -> int:
        """H, the width of a window's vector: of the last layer's states, unless a representation step changes it."""
        return self.representation.width if isinstance(self.representation, RepresentationSteps) else self.state_size

    @property
    def state_size(self) -> int:
        """The width of the last layer's states."""
        return int(self.model.config.hidden_size)

    @property
    def channels(self) -> int:
        """Layers whose states can be looked at, the embedding layer included."""
        return int(self.model.config.num_hidden_layers) + 1

    @property
    def longest_input(self) -> int | None:
        """Most tokens in one input, special tokens included; None where nothing limits it."""
        positions = getattr(self.model.config, "max_position_embeddings", None)
        if positions is None or positions <= 0:
            return None
        return self.rules.longest(int(positions) - (self._first_position or 0))

    @property
    def _first_position(self) -> int | None:
        """The first position id; None where the model numbers positions from 0 by itself."""
        return self.model.config.pad_token_id + 1 if self.family in POSITIONS_FROM_IDS else None

    def describe(self) -> dict[str, Any]:
        """Return a JSON-able description from which `build_backbone` makes the same modules."""
        template = None if self.template is None else asdict(self.template)
        steps = self.representation.description if isinstance(self.representation, RepresentationSteps) else None
        pooling = None if self.representation is not None else self.pooling  # with a head it is the configuration's
        return {
            "config": values_of(self.model.config),
            "cross_encoder": self.representation is not None and steps is None,
            "modular": None if steps is None else {"steps": steps, "pooling": self.pooling},
            "options": {**asdict(self.options), "pooling": pooling, "template": template},
        }

    def pair_format(self) -> InputFormat:
        """Return the template's layout for a pair of texts, or without a template the tokenizer's own."""
        pad_id = self.tokenizer.pad_token_id or 0
        if self.template is not None:
            return InputFormat(types=None, pad_id=pad_id, **wording(self.tokenizer, self.template)._asdict())
        encoded = self.tokenizer("a", "b")
        ids, sides, types = encoded["input_ids"], encoded.sequence_ids(), encoded.get("token_type_ids")
        first, between, second, after = sides.index(0), _past(sides, 0), sides.index(1), _past(sides, 1)
        prompt, lead = self._prefix_ids(self.options.prompt) if self.options.prompt else ((), "")
        return InputFormat(
            prefix=(*ids[:first], *prompt),
            middle=tuple(ids[between:second]),
            suffix=tuple(ids[after:]),
            types=(types[0], types[first], types[between], types[second], types[-1]) if self._segments(types) else None,
            pad_id=pad_id,
            position_offset=self._first_position,
            marks_sentences=self.options.global_attention == "sentences",
            query_lead=lead,
        )

    def text_format(self, prefix: str = "") -> tuple[InputFormat, str]:
        """Return the form of a single text with a prefix, and what a text tokenised apart from it must begin with."""
        encoded = self.tokenizer("a")
        ids, sides = encoded["input_ids"], encoded.sequence_ids()
        prefix_ids, lead = self._prefix_ids(prefix) if prefix else ((), "")
        layout = InputFormat(
            prefix=(*ids[: sides.index(0)], *prefix_ids),
            middle=(),
            suffix=tuple(ids[_past(sides, 0) :]),
            types=(0,) * 5 if self._segments(encoded.get("token_type_ids")) else None,
            pad_id=self.tokenizer.pad_token_id or 0,
        )
        return layout, lead

    def _segments(self, types: list[int] | None) -> bool:
        return types is not None and getattr(self.model.config, "type_vocab_size", 0) > 1

    def _prefix_ids(self, prefix: str) -> tuple[tuple[int, ...], str]:
        """Return the tokens of a prefix, and what a text after it must begin with."""
        found = seams(self.tokenizer, prefix, "")
        if found.leads[0] is None:
            logger.warning("prefix %r and the text after it are tokenized apart: end it with a space", prefix)
        return found.around[0], found.leads[0] or ""


def _past(sides: list[int | None], side: int) -> int:
    """Return one past the last token of a side."""
    return len(sides) - sides[::-1].index(side)


def values_of(config: Any) -> dict[str, Any]:
    """Return a Hugging Face configuration as JSON-able values, without its place on this machine."""
    return {name: value for name, value in config.to_dict().items() if name != "_name_or_path"}


def load_backbone(
    name: str, *, trust_remote_code: bool = False, options: BackboneOptions | None = None, pairs: bool = True
) -> Backbone:
    """Load a checkpoint in fp32, whatever the precision it is stored in.

    Args:
        name: a model on the Hugging Face hub, a folder, or `"longdoc:minilm-l6"`.
        trust_remote_code: run modelling code that the checkpoint brings along.
        options: how it is used where it leaves a choice.
        pairs: it is to read a query and a text together; False for texts one by one.

    Raises:
        ValueError: for a checkpoint that cannot be used, or not so.
        OSError: if there is no such checkpoint, or it cannot be asked for.
    """
    options = options or BackboneOptions()
    name = reachable(encoder_folder(name))
    published = checkpoint_config(name)
    if is_published_layout(published) and not trust_remote_code:
        return _load_alibi(name, published, options)
    config = AutoConfig.from_pretrained(name, trust_remote_code=trust_remote_code)
    if options.attention_window is not None and config.model_type == "longformer":
        config.attention_window = [options.attention_window] * config.num_hidden_layers
    rules_for(config, options)  # before anything large is loaded
    if config.is_encoder_decoder:
        _check_encoder_decoder(name, config.model_type, options, pairs=pairs)
    files = cross_encoder_files(name) if pairs else None
    layers = () if files is None else files.layers
    classifies = has_known_head(config)
    if is_classifier(config):
        _check_labels(name, config.model_type, config.num_labels, supported=classifies)
    tokenizer = load_tokenizer(name, trust_remote_code=trust_remote_code)
    if pairs:
        template = _template(config, tokenizer, files, options.template)
        prompt = "" if files is None or template is not None else files.prompt
        options = replace(options, template=template, prompt=prompt)
    answers = None if options.template is None else options.template.answers
    auto: Any = AutoModelForSequenceClassification if classifies else AutoModel
    if classifies or layers:
        answers = None
    elif answers is not None:
        auto = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
    attention = {} if options.attn_implementation is None else {"attn_implementation": options.attn_implementation}
    model = load_pretrained(auto, name, config, trust_remote_code=trust_remote_code, **attention)
    if answers is not None:
        parts = take_answers(model, tokenizer, answers)
    elif files is not None and layers:
        steps, scores = load_layers(name, layers, int(config.hidden_size))
        _check_labels(name, config.model_type, scores.out_features, supported=True)
        parts = Parts(without_pooler(model), steps, one_logit(scores), str(files.pooling))
    else:
        parts = take_apart(model)
    return _assemble(parts, tokenizer, options)


def load_encoder(name: str, *, trust_remote_code: bool = False) -> Backbone:
    """Load a checkpoint that is to read texts one by one; see `load_backbone`."""
    return load_backbone(name, trust_remote_code=trust_remote_code, pairs=False)


def _check_encoder_decoder(name: str, family: str, options: BackboneOptions, *, pairs: bool) -> None:
    without_answers = options.template is not None and options.template.answers is None
    if not pairs or family not in ENCODER_DECODERS or without_answers or options.pooling is not None:
        raise ValueError(
            f"checkpoint {name!r} ({family}) is an encoder-decoder: of these only {', '.join(ENCODER_DECODERS)} can "
            f"score a query and a text, by their answer. The template needs answers, as 'monot5' has, and no pooling="
        )


def load_pretrained(auto: Any, name: str, config: Any, **options: Any) -> Any:
    """Load the model of a checkpoint, of which no weights may be missing but those of a pooler that nothing uses."""
    with quiet():
        model, report = auto.from_pretrained(
            name,
            config=config,
            dtype=torch.float32,
            use_safetensors=True,  # pickles may run code as they are read
            output_loading_info=True,
            **options,
        )
    pooled = auto is AutoModelForSequenceClassification
    missing = [key for key in report["missing_keys"] if "pooler" not in key or pooled]
    if missing:
        raise ValueError(f"checkpoint {name!r} lacks {len(missing)} weights, among them {sorted(missing)[:3]}")
    in_own_memory(model)
    return model


def _template(config: Any, tokenizer: Any, files: CrossEncoderFiles | None, given: Template | None) -> Template | None:
    """Return the words around query and text: those given, those that the checkpoint names, or None for two texts."""
    if given is not None:
        return given.within(tokenizer)
    if files is not None and files.chat is not None:
        return replace(template_of_roles(tokenizer, prompt=files.prompt, **files.chat), answers=files.answers or None)
    separates = not config.is_encoder_decoder and _separates(tokenizer)
    if files is not None:
        # Sentence-transformers reads two texts: in the tokenizer's own layout, or one after the other.
        if not files.answers and (separates or not is_decoder(config)):
            return None
        known = not separates
        guess: Template | None = Template(query=f"{files.prompt}{{query}}", answers=files.answers or None, apart=True)
    elif not is_language_model(config):
        return None
    elif names_roles(tokenizer):
        # Without further files sentence-transformers compares "yes" and "no".
        return replace(template_of_roles(tokenizer), answers=None if is_classifier(config) else ("yes", "no"))
    else:
        known = not config.is_encoder_decoder and tokenizer.chat_template is None
        known = known and (separates or not is_classifier(config))
        guess = None if separates else TEMPLATES["plain"]
    if not known:
        kind = (config.architectures or [config.model_type])[0]
        raise ValueError(
            f"nothing in the checkpoint tells in which words this {kind} reads query and text: give one of the "
            f"templates {', '.join(TEMPLATES)} ('monot5' for monoT5, 'qwen3-reranker' for Qwen3-Reranker and its "
            f"conversions, 'yes-no' to ask a chat model, 'plain' to train one), or ld.Template.of('query: {{query}} "
            f"text: {{text}}', answers=('yes', 'no'))"
        )
    return guess


def _separates(tokenizer: Any) -> bool:
    """Tell whether a tokenizer puts something between two texts, as Llama's does."""
    sides = tokenizer("a", "b").sequence_ids()
    return sides.index(1) > _past(sides, 0)


def _load_alibi(name: str, published: dict[str, Any], options: BackboneOptions) -> Backbone:
    """Load a JINA-v2 or MosaicBERT checkpoint, whose own code is not run."""
    state = read_weights(name, "model.safetensors")
    if "classifier.weight" in state:
        _check_labels(name, AlibiConfig.model_type, len(state["classifier.weight"]), supported=True)
    parts = alibi_parts(state, published)
    files = ("tokenizer.json", "tokenizer_config.json", "vocab.txt")
    if "alibi_starting_size" in published and not any(find_file(name, file) for file in files):
        # MosaicBERT was published without a tokenizer, to be used with BERT's.
        name = reachable("google-bert/bert-base-uncased")
    tokenizer = load_tokenizer(name)
    if options.template is not None:
        options = replace(options, template=options.template.within(tokenizer))
    return _assemble(parts, tokenizer, options)


def build_backbone(description: dict[str, Any], tokenizer: Any) -> Backbone:
    """Return the modules that `Backbone.describe` described, with random weights, for strict loading afterwards."""
    values = dict(description["config"])
    # How attention is computed is a matter of the machine, not of the weights.
    options = replace(BackboneOptions(**description.get("options", {})), attn_implementation=None)
    if isinstance(options.template, dict):
        options = replace(options, template=Template(**options.template))
    family, classifies = values.pop("model_type"), description["cross_encoder"]
    if family == AlibiConfig.model_type:
        return _assemble(build_alibi(AlibiConfig(**values), classifies), tokenizer, options)
    config = AutoConfig.for_model(family, **values)
    config.dtype = torch.float32
    auto = AutoModelForSequenceClassification if classifies else AutoModel
    model, modular = auto.from_config(config), description.get("modular")
    if config.is_encoder_decoder:
        parts = Parts(FirstStep(model), None, None, "cls")
    elif modular is not None:
        steps = RepresentationSteps(modular["steps"], int(config.hidden_size))
        parts = Parts(without_pooler(model), steps, None, modular["pooling"])
    else:
        parts = take_apart(model)
    return _assemble(parts, tokenizer, options)


def _assemble(parts: Parts, tokenizer: Any, options: BackboneOptions) -> Backbone:
    use_attention(parts.encoder, options.attn_implementation)
    if options.pooling is not None and (options.pooling != parts.pooling or parts.representation is not None):
        # The last layer was not trained for that vector.
        parts = Parts(parts.encoder, None, None, options.pooling)
    return Backbone(
        parts.encoder,
        tokenizer,
        parts.representation,
        parts.final,
        parts.pooling,
        template=options.template,
        rules=rules_for(parts.encoder.config, options),
        options=options,
    )


def load_tokenizer(name: str, *, trust_remote_code: bool = False) -> Any:
    """Load the fast tokenizer of a checkpoint, from which character offsets and pair layouts come."""
    try:
        tokenizer = AutoTokenizer.from_pretrained(name, use_fast=True, trust_remote_code=trust_remote_code)
    except Exception as error:  # of damaged files the tokenizers library raises no kinder one
        raise ValueError(f"the tokenizer of checkpoint {name!r} cannot be loaded: {error}") from error
    # Without its files transformers makes a tokenizer that knows special tokens alone, and all words are [UNK].
    if not tokenizer.is_fast or set(tokenizer.get_vocab()) <= set(tokenizer.all_special_tokens):
        raise ValueError(f"checkpoint {name!r} has no fast tokenizer: it needs a tokenizer.json")
    return tokenizer


def _check_labels(name: str, family: str, labels: int, *, supported: bool) -> None:
    if labels > 2:
        raise ValueError(
            f"checkpoint {name!r} is a classifier with {labels} labels, of which a reranker has one or two"
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


def checkpoint_config(name: str) -> dict[str, Any]:
    """Return the config.json of a Hugging Face checkpoint; ValueError if this package has saved the model."""
    config, _ = PretrainedConfig.get_config_dict(name)
    if config.get("format") == SAVED_FORMAT:
        raise ValueError(f"{name!r} holds a model saved by this package: restore it with its class's load({name!r})")
    return config
