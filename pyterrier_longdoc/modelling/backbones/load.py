"""Loads a Hugging Face checkpoint and takes it apart into encoder, representation step and final layer.

A cross-encoder checkpoint (`...ForSequenceClassification`) is a backbone, a *representation step* (BERT:
dense layer and tanh; the others: their classification head without its last layer) and a final linear layer.
Kept apart, the three let every head start from scores that make sense before any training.
"""

from __future__ import annotations

import logging
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file
from torch import nn
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PretrainedConfig,
)

from ...common.hub import find_file, has_file, reachable
from ...common.packaged import encoder_folder
from ..batching import PairLayout
from ..devices import in_own_memory
from .alibi import AlibiConfig, is_published_layout
from .architectures import BackboneOptions, InputRules, is_decoder, is_language_model, quiet, rules_for, use_attention
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
from .first_step import FAMILIES as ENCODER_DECODERS
from .first_step import FirstStep
from .modular import CrossEncoderFiles, Steps, cross_encoder_files, load_layers
from .templates import TEMPLATES, Template, names_roles, seams_around, template_layout, template_of_roles

logger = logging.getLogger(__name__)

DEFAULT_BACKBONE = "cross-encoder/ms-marco-MiniLM-L6-v2"
"""A public MS MARCO passage cross-encoder with one logit (22.7M parameters)."""

FORMAT = "pyterrier_longdoc"
"""The `format` entry of the config.json of models that this package saves."""

PICKLES = ("pytorch_model.bin", "pytorch_model.bin.index.json")
"""Weights as PyTorch writes them by itself."""

_POSITIONS_FROM_IDS = {
    "camembert", "data2vec-text", "esm", "ibert", "layoutlmv3", "lilt", "longformer", "luke", "markuplm", "mpnet",
    "roberta", "roberta-prelayernorm", "xlm-roberta", "xlm-roberta-xl", "xmod",
}  # fmt: skip
"""Families that number positions from `pad_token_id + 1`, counting real tokens alone."""


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
        return self.representation.width if isinstance(self.representation, Steps) else self.state_size

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
    def _vector(self) -> str | None:
        """The pooling to ask for: None for that of the cross-encoder's own head, which is the configuration's."""
        return None if self.representation is not None else self.pooling

    @property
    def _first_position(self) -> int | None:
        """The first position id; None where the model numbers positions from 0 by itself."""
        return self.model.config.pad_token_id + 1 if self.family in _POSITIONS_FROM_IDS else None

    def describe(self) -> dict[str, Any]:
        """JSON-able description from which `build_backbone` makes the same modules."""
        template = None if self.template is None else asdict(self.template)
        steps = self.representation.description if isinstance(self.representation, Steps) else None
        return {
            "config": values_of(self.model.config),
            "cross_encoder": self.representation is not None and steps is None,
            "modular": None if steps is None else {"steps": steps, "pooling": self.pooling},
            "options": {**asdict(self.options), "pooling": self._vector, "template": template},
        }

    def pair_layout(self) -> PairLayout:
        """The template's layout for a pair of texts, or without a template the tokenizer's own."""
        if self.template is not None:
            return template_layout(self.tokenizer, self.template)
        encoded = self.tokenizer("a", "b")
        ids, sides, types = encoded["input_ids"], encoded.sequence_ids(), encoded.get("token_type_ids")
        first, between, second, after = sides.index(0), _past(sides, 0), sides.index(1), _past(sides, 1)
        prompt, lead = self._prefix_ids(self.options.prompt) if self.options.prompt else ([], "")
        has_segments = types is not None and getattr(self.model.config, "type_vocab_size", 0) > 1
        return PairLayout(
            prefix=(*ids[:first], *prompt),
            middle=tuple(ids[between:second]),
            suffix=tuple(ids[after:]),
            types=(types[0], types[first], types[between], types[second], types[-1]) if has_segments else None,
            pad_id=self.tokenizer.pad_token_id or 0,
            position_offset=self._first_position,
            marks_sentences=self.options.global_attention == "sentences",
            query_lead=lead,
        )

    def text_layout(self, prefix: str = "") -> tuple[PairLayout, str]:
        """The tokenizer's own layout for a single text, with `prefix` before it; the query part stays empty.

        Returns:
            The layout, and what must be put before a text that is tokenised apart from the prefix, so that together
            they are the tokens of `prefix + text`.
        """
        encoded = self.tokenizer("a")
        ids, sides = encoded["input_ids"], encoded.sequence_ids()
        prefix_ids, lead = self._prefix_ids(prefix) if prefix else ([], "")
        has_segments = "token_type_ids" in encoded and getattr(self.model.config, "type_vocab_size", 0) > 1
        layout = PairLayout(
            prefix=(*ids[: sides.index(0)], *prefix_ids),
            middle=(),
            suffix=tuple(ids[_past(sides, 0) :]),
            types=(0,) * 5 if has_segments else None,
            pad_id=self.tokenizer.pad_token_id or 0,
        )
        return layout, lead

    def _prefix_ids(self, prefix: str) -> tuple[list[int], str]:
        """Tokens of a prefix, and what a text after it must begin with."""
        seams = seams_around(self.tokenizer, prefix, "")
        if not seams.exact:
            logger.warning("prefix %r and the text after it are tokenized apart: end it with a space", prefix)
        return seams.before, seams.lead


def _past(sides: list[int | None], side: int) -> int:
    """One past the last token of a side."""
    return len(sides) - sides[::-1].index(side)


def values_of(config: Any) -> dict[str, Any]:
    """A Hugging Face configuration as JSON-able values, without the place on this machine that it came from."""
    return {name: value for name, value in config.to_dict().items() if name != "_name_or_path"}


def load_backbone(name: str, *, trust_remote_code: bool = False, options: BackboneOptions | None = None) -> Backbone:
    """Loads a checkpoint that reads a query and a text together, in fp32, whatever the precision it is stored in.

    Args:
        name: a model on the Hugging Face hub, a folder, or `"longdoc:minilm-l6"`.
        trust_remote_code: run modelling code that the checkpoint brings along.
        options: how it is used where it leaves a choice.

    Raises:
        ValueError: for a folder that is no checkpoint, a checkpoint of this package (which has `load` for that),
            an architecture that the installed transformers does not have, a classifier with more than two labels, or a
            checkpoint with missing weights, with pickles for weights or without a fast tokenizer; for a language model
            of which is not known in which words it reads query and text; for options that do not fit the checkpoint,
            and what its configuration asks for and cannot be followed.
        OSError: if the hub cannot be asked and there is no copy of the checkpoint on this machine.
    """
    options = options or BackboneOptions()
    name, published, config = _opened(name, trust_remote_code=trust_remote_code)
    if config is None:
        return _load_alibi(name, published, options)
    if options.attention_window is not None and config.model_type == "longformer":
        config.attention_window = [options.attention_window] * config.num_hidden_layers
    rules_for(config, options)  # before anything large is loaded
    if config.is_encoder_decoder:
        _check_encoder_decoder(name, config.model_type, options)
    files = cross_encoder_files(name)
    classifier = _classifies(name, config)
    tokenizer = load_tokenizer(name, trust_remote_code=trust_remote_code)
    template = _template(config, tokenizer, files, options.template)
    options = replace(options, template=template, prompt="" if files is None or template is not None else files.prompt)
    has_head = classifier or (files is not None and files.is_modular)
    answers = None if template is None or has_head else template.answers
    auto: Any = AutoModel
    if answers is not None:
        auto = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
    elif classifier:
        auto = AutoModelForSequenceClassification
    model = _load_model(auto, name, config, options.attn_implementation, trust_remote_code=trust_remote_code)
    if answers is not None:
        parts = take_answers(model, tokenizer, answers)
    elif files is not None and files.is_modular:
        steps, scores = load_layers(name, files, int(config.hidden_size))
        _check_labels(name, config.model_type, scores.out_features, supported=True)
        parts = Parts(without_pooler(model), steps, one_logit(scores), str(files.pooling))
    else:
        parts = take_apart(model)
    return _assemble(parts, tokenizer, options)


def load_encoder(name: str, *, trust_remote_code: bool = False) -> Backbone:
    """Loads a checkpoint that is to read texts one by one, in fp32; how it reads two together is not asked.

    Args:
        name: a model on the Hugging Face hub, a folder, or `"longdoc:minilm-l6"`.
        trust_remote_code: run modelling code that the checkpoint brings along.

    Raises:
        ValueError: as `load_backbone`, and for an encoder-decoder.
        OSError: if the hub cannot be asked and there is no copy of the checkpoint on this machine.
    """
    name, published, config = _opened(name, trust_remote_code=trust_remote_code)
    if config is None:
        return _load_alibi(name, published, BackboneOptions())
    if config.is_encoder_decoder:
        raise ValueError(f"checkpoint {name!r} ({config.model_type}) is an encoder-decoder; an encoder is needed")
    auto = AutoModelForSequenceClassification if _classifies(name, config) else AutoModel
    model = _load_model(auto, name, config, None, trust_remote_code=trust_remote_code)
    return _assemble(take_apart(model), load_tokenizer(name, trust_remote_code=trust_remote_code), BackboneOptions())


def _opened(name: str, *, trust_remote_code: bool) -> tuple[str, dict[str, Any], Any]:
    """Where a checkpoint is, its config.json, and that as transformers reads it; None for JINA-v2 and MosaicBERT."""
    name = reachable(encoder_folder(name))
    published = checkpoint_config(name)
    if is_published_layout(published) and not trust_remote_code:
        return name, published, None
    if "auto_map" not in published:  # which names code that the checkpoint brings along
        _check_architecture(f"checkpoint {name!r}", published.get("model_type"))
    return name, published, AutoConfig.from_pretrained(name, trust_remote_code=trust_remote_code)


def _classifies(name: str, config: Any) -> bool:
    """Whether a checkpoint has a classification head that can be taken over."""
    known: bool = has_known_head(config)
    if is_classifier(config):
        _check_labels(name, config.model_type, config.num_labels, supported=known)
    return known


def _check_encoder_decoder(name: str, family: str, options: BackboneOptions) -> None:
    if family not in ENCODER_DECODERS:
        known = ", ".join(ENCODER_DECODERS)
        raise ValueError(
            f"checkpoint {name!r} ({family}) is an encoder-decoder, of which only {known} can be backbones"
        )
    without_answers = options.template is not None and options.template.answers is None
    if without_answers or options.pooling is not None:
        raise ValueError(
            f"checkpoint {name!r} ({family}) is an encoder-decoder, whose answer is scored: the template needs "
            f"answers, as template='monot5' has them, and pooling= must be left out"
        )


def _load_model(auto: Any, name: str, config: Any, attention: str | None, *, trust_remote_code: bool) -> Any:
    """The model of a checkpoint, none of whose weights may be missing but those of a pooler that nothing uses."""
    chosen = {} if attention is None else {"attn_implementation": attention}
    try:
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
    except OSError:
        if not any(has_file(name, file) for file in PICKLES):
            raise
        raise ValueError(
            f"the weights of checkpoint {name!r} are pickles ({PICKLES[0]}), which may run code as they are read: here "
            f"safetensors alone are. If you trust them, convert them once, with {auto.__name__}.from_pretrained("
            f"{name!r}).save_pretrained('folder') and AutoTokenizer.from_pretrained({name!r}).save_pretrained('folder')"
            f", and give that folder"
        ) from None
    pooled = auto is AutoModelForSequenceClassification
    missing = [key for key in report["missing_keys"] if "pooler" not in key or pooled]
    if missing:
        raise ValueError(f"checkpoint {name!r} lacks {len(missing)} weights, among them {sorted(missing)[:3]}")
    in_own_memory(model)
    return model


def _template(config: Any, tokenizer: Any, files: CrossEncoderFiles | None, given: Template | None) -> Template | None:
    """The words around query and text: the given ones, those that the checkpoint names, or None for two texts.

    Raises:
        ValueError: if it evidently was trained with some that nothing in it names.
    """
    if given is not None:
        return given.within(tokenizer)
    if files is not None:
        if files.chat is None:
            return _two_texts(config, tokenizer, files)
        return replace(template_of_roles(tokenizer, prompt=files.prompt, **files.chat), answers=files.answers or None)
    if not is_language_model(config):
        return None
    if names_roles(tokenizer):
        # Without further files sentence-transformers compares "yes" and "no".
        return replace(template_of_roles(tokenizer), answers=None if is_classifier(config) else ("yes", "no"))
    separates = not config.is_encoder_decoder and _separates(tokenizer)
    kind = (config.architectures or [config.model_type])[0]
    known = (
        f"Known are {', '.join(TEMPLATES)}; another one is template=ld.Template.of('query: {{query}} text: {{text}}'"
    )
    if config.is_encoder_decoder:
        raise ValueError(
            f"this {kind} is an encoder-decoder, and nothing in the checkpoint tells in which words it reads query and "
            f"text, and what it answers: say template='monot5' for monoT5. {known}, answers=('yes', 'no'))"
        )
    if is_classifier(config) and (tokenizer.chat_template is not None or not separates):
        raise ValueError(
            f"this {kind} is a language model with a classification head, and nothing in the checkpoint tells in which "
            f"words it reads query and text: say template='qwen3-reranker' for a conversion of Qwen3-Reranker. {known})"
        )
    if tokenizer.chat_template is not None:
        raise ValueError(
            f"this {kind} is a chat model, and nothing in the checkpoint tells in which words it was trained to judge "
            f"a text: say template='yes-no' to ask it, template='qwen3-reranker' for Qwen3-Reranker, or "
            f"template='plain' to train it. {known}, answers=('yes', 'no'))"
        )
    return None if separates else TEMPLATES["plain"]


def _two_texts(config: Any, tokenizer: Any, files: CrossEncoderFiles) -> Template | None:
    """What sentence-transformers makes of two texts: the tokenizer's own layout, or one after the other."""
    if not files.answers and (not is_decoder(config) or _separates(tokenizer)):
        return None
    if _separates(tokenizer):
        raise ValueError(
            "the checkpoint answers to two texts between which its tokenizer puts special tokens: say how, by "
            "template=ld.Template(...)"
        )
    return Template(query=f"{files.prompt}{{query}}", answers=files.answers or None, apart=True)


def _separates(tokenizer: Any) -> bool:
    """Whether a tokenizer puts something between two texts, as Llama's does."""
    sides = tokenizer("a", "b").sequence_ids()
    return sides.index(1) > _past(sides, 0)


def _load_alibi(name: str, published: dict[str, Any], options: BackboneOptions) -> Backbone:
    """A JINA-v2 or MosaicBERT checkpoint, whose own code is not run."""
    path = find_file(name, "model.safetensors")
    if path is None:
        raise ValueError(
            f"checkpoint {name!r} has no model.safetensors: save its weights in that format with "
            f"safetensors.torch.save_file, or pass trust_remote_code=True to run the checkpoint's own code"
        )
    state = load_file(path)
    if "classifier.weight" in state:
        _check_labels(name, AlibiConfig.model_type, len(state["classifier.weight"]), supported=True)
    parts = alibi_parts(state, published)
    if "alibi_starting_size" in published and not _has_tokenizer(name):
        # MosaicBERT was published without a tokenizer, to be used with BERT's.
        name = reachable("google-bert/bert-base-uncased")
    tokenizer = load_tokenizer(name)
    if options.template is not None:
        options = replace(options, template=options.template.within(tokenizer))
    return _assemble(parts, tokenizer, options)


def build_backbone(description: dict[str, Any], tokenizer: Any) -> Backbone:
    """The modules that `Backbone.describe` described, with random weights, for strict loading afterwards."""
    values = dict(description["config"])
    # How attention is computed is a matter of the machine, not of the weights.
    options = replace(BackboneOptions(**description.get("options", {})), attn_implementation=None)
    if isinstance(options.template, dict):
        options = replace(options, template=Template(**options.template))
    family = values.pop("model_type")
    if family == AlibiConfig.model_type:
        return _assemble(build_alibi(AlibiConfig(**values), description["cross_encoder"]), tokenizer, options)
    _check_architecture("the saved model", family)
    config = AutoConfig.for_model(family, **values)
    config.dtype = torch.float32
    auto = AutoModelForSequenceClassification if description["cross_encoder"] else AutoModel
    model, modular = auto.from_config(config), description.get("modular")
    if config.is_encoder_decoder:
        parts = Parts(FirstStep(model), None, None, "cls")
    elif modular is not None:
        steps = Steps(modular["steps"], int(config.hidden_size))
        parts = Parts(without_pooler(model), steps, None, modular["pooling"])
    else:
        parts = take_apart(model)
    return _assemble(parts, tokenizer, options)


def _check_architecture(what: str, family: str | None) -> None:
    if family is not None and family not in CONFIG_MAPPING:
        raise ValueError(
            f"{what} is of the architecture {family!r}, which transformers {transformers.__version__} does not have; "
            f"a newer one may: pip install --upgrade transformers"
        )


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
    """The fast tokenizer of a checkpoint.

    Raises:
        ValueError: if there is none, or no fast one; character offsets and pair layouts come from it.
    """
    try:
        tokenizer = AutoTokenizer.from_pretrained(name, use_fast=True, trust_remote_code=trust_remote_code)
    except Exception as error:  # of damaged files the tokenizers library raises no kinder one
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


def _has_tokenizer(name: str) -> bool:
    files = ("tokenizer.json", "tokenizer_config.json", "vocab.txt")
    return any(find_file(name, file) for file in files)


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


def checkpoint_config(name: str) -> dict[str, Any]:
    """The config.json of a Hugging Face checkpoint.

    Args:
        name: a model on the Hugging Face hub, or a folder.

    Raises:
        ValueError: for a folder without it, a name that no model can have, or a model that this package has saved.
    """
    folder = Path(name)
    if not folder.is_dir() and not could_be_hub_id(name):
        raise ValueError(f"backbone {name!r} is neither a folder nor the id of a model on the Hugging Face hub")
    if folder.is_dir() and not (folder / "config.json").is_file():
        raise ValueError(
            f"folder {name!r} is no checkpoint: it has no config.json (a Hugging Face checkpoint has config.json, "
            f"model.safetensors and tokenizer files)"
        )
    config, _ = PretrainedConfig.get_config_dict(name)
    if config.get("format") == FORMAT:
        raise ValueError(f"{name!r} holds a model saved by this package: restore it with its class's load({name!r})")
    return config


def could_be_hub_id(name: str) -> bool:
    """Whether a model on the Hugging Face hub may be called so: `name` or `user/name`."""
    return name.count("/") <= 1 and not name.startswith((".", "/", "~"))
