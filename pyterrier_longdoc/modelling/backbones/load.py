"""Loads a Hugging Face checkpoint and splits it into encoder, representation step and final layer.

A cross-encoder checkpoint (`...ForSequenceClassification`) is a backbone, a *representation step* (BERT:
dense layer and tanh; the others: their classification head without its last layer) and a final linear layer.
With these separated, every head can start from scores that make sense before any training.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
    PretrainedConfig,
)

from ...common.hub import find_file, reachable, refuse_pointer
from ...common.language import check_tokenizer, load_tokenizer
from ...common.packaged import encoder_folder
from ..devices import in_own_memory
from ..templates import TEMPLATES, Template, known_checkpoint, names_roles, template_of_roles
from .alibi import AlibiConfig, is_published_layout
from .architectures import quiet, use_attention
from .backbone import Backbone
from .classifiers import (
    alibi_parts,
    build_alibi,
    is_classifier,
    one_logit,
    relevant_label,
    scaled,
    split_classifier,
    take_answers,
    without_pooler,
)
from .families import FAMILIES, Family, family_of
from .modules import check_transformer, load_head
from .published import bidirectional_llama, gte_config, gte_weights
from .sentence_transformers_files import CrossEncoderFiles, check_lower_case, cross_encoder_files, kind_of, read_json
from .steps import RepresentationSteps
from .t5 import FirstStep

logger = logging.getLogger(__name__)

DEFAULT_BACKBONE = "cross-encoder/ms-marco-MiniLM-L6-v2"
"""A public MS MARCO passage cross-encoder with one logit (22.7M parameters)."""

SAVED_FORMAT = "pyterrier_longdoc"
"""The `format` entry of the config.json of models that this package saves."""

_MONO_T5 = "'monot5' for monoT5, which answers true or false, but not for rankers of mT5, which answer yes or no"


def load_backbone(
    name: str,
    *,
    trust_remote_code: bool = False,
    pairs: bool = True,
    pooling: str | None = None,
    template: Template | None = None,
    attn_implementation: str | None = None,
    **options: Any,
) -> Backbone:
    """Load a checkpoint in fp32, whatever its stored precision.

    Args:
        name: a model on the Hugging Face hub, a folder, or `"longdoc:minilm-l6"`.
        trust_remote_code: run the modelling code of the checkpoint.
        pairs: whether it encodes a query and a text together; False for single texts.
        pooling: `"cls"`, `"mean"` or `"last"`, of the last layer's states as they are; None for the checkpoint's
            pooling and representation step.
        template: the words around query and text; None for the template of the checkpoint's files or of a known name,
            else the tokenizer's layout for two texts.
        attn_implementation: see `use_attention`.
        options: those of the checkpoint's family, see `Family.options` and `LongP`; None for the checkpoint's own.

    Raises:
        ValueError: if the checkpoint cannot be used with these options.
        OSError: if there is no such checkpoint, or the hub cannot be reached.
    """
    given, name = name, reachable(encoder_folder(name))
    config_json = checkpoint_config(name)
    layout = "" if trust_remote_code else _layout(config_json)
    if layout in _LOADERS:
        _check_options(FAMILIES[layout], options, template)
        backbone = _LOADERS[layout](name, config_json)
        use_attention(backbone.model, attn_implementation)
        template = None if template is None else template.in_chat(backbone.tokenizer)
        return _pooled(replace(backbone, template=template), pooling)
    if layout == "llama_bidirec":
        config = bidirectional_llama(config_json)
    else:
        config = AutoConfig.from_pretrained(name, trust_remote_code=trust_remote_code)
    _check_options(family_of(config), options, template, has_code="auto_map" in config_json)
    if config.is_encoder_decoder:
        _check_encoder_decoder(name, family_of(config), template, pairs=pairs and pooling is None)
    if not hasattr(config, "hidden_size"):
        raise ValueError(
            f"checkpoint {name!r} ({config.model_type}) reads more than text, such as images: here only models of text "
            f"alone can be used"
        )
    if pairs and "JinaForRanking" in (config.architectures or ()):
        raise ValueError(
            f"checkpoint {given!r} reads the documents of a query together: use ld.ListReranker({given!r})"
        )
    _set_options(config, options)
    files = _files_for_pairs(name) if pairs else None
    tokenizer = load_fast_tokenizer(name, trust_remote_code=trust_remote_code, untyped=layout == "llama_bidirec")
    check_lower_case(name, tokenizer)
    prompt = ""
    if pairs:
        known, longest = known_checkpoint(given, config_json.get("_name_or_path") or "")
        if longest is not None:
            config.longest_input = min(longest, config.max_position_embeddings)
        template = _template(config, tokenizer, files, template, known)
        prompt = "" if files is None or template is not None else files.prompt
    loading: dict[str, Any] = {"trust_remote_code": trust_remote_code}
    if attn_implementation is not None:
        loading["attn_implementation"] = attn_implementation
    parts = _load_parts(name, config, tokenizer, files, template, loading)
    reading = {"template": template, "prompt": prompt, "global_attention": options.get("global_attention", "query")}
    return _pooled(_with_tokenizer(parts, tokenizer, **reading), pooling)


def _load_parts(
    name: str,
    config: Any,
    tokenizer: Any,
    files: CrossEncoderFiles | None,
    template: Template | None,
    loading: dict[str, Any],
) -> Backbone:
    """Load a model and take it apart; its score comes from its head, its modules, or the words of its answers."""
    modules = () if files is None else files.modules
    answers = None if template is None else template.answers
    classifies = is_classifier(config) and family_of(config).head is not None
    if is_classifier(config):
        _check_labels(name, config.num_labels, config.id2label if classifies else None)
    if answers is not None and not classifies and not modules:
        auto_class: Any = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
        return take_answers(load_pretrained(auto_class, name, config, **loading), tokenizer, answers)
    auto_class = AutoModelForSequenceClassification if classifies else AutoModel
    model = load_pretrained(auto_class, name, config, **loading)
    if files is not None and modules:
        steps, scores, pooling = load_head(name, modules, files.prompt)
        _check_labels(name, scores.out_features, {})
        return Backbone(without_pooler(model), representation=steps, final=one_logit(scores), pooling=pooling)
    parts = split_classifier(model)
    if is_classifier(config) and parts.final is None:
        logger.warning(
            "%r: the classification head of %s is left out, and the model must be trained: only the heads of %s and of "
            "language models with one linear layer, 'score', can be used",
            name,
            config.model_type,
            ", ".join(row.name for row in FAMILIES.values() if row.head),
        )
    return parts


def load_encoder(name: str, *, trust_remote_code: bool = False) -> Backbone:
    """Load a checkpoint that encodes single texts; see `load_backbone`."""
    return load_backbone(name, trust_remote_code=trust_remote_code, pairs=False)


def encoder_of(folder: str, module: Any, path: str, *, trust_remote_code: bool = False) -> Backbone:
    """Return the encoder of a sentence-transformers model; its weights are loaded again, and none may be missing.

    Args:
        folder: the checkpoint's folder.
        module: the model's first module.
        path: the module's folder in the checkpoint.
        trust_remote_code: use the model class of the checkpoint's code.
    """
    transformer, place = check_transformer(folder, module), str(Path(folder, path))
    config_json, made, tokenizer = checkpoint_config(place), transformer.model, transformer.tokenizer
    transformer.model = None  # so that weights are in memory once
    if is_published_layout(config_json) and not trust_remote_code:
        backbone = _load_alibi(place, config_json)
    else:
        kind, config = type(made), made.config
        del made
        model = load_pretrained(kind, place, config, trust_remote_code=trust_remote_code)
        if not transformer.do_lower_case:  # the tokenizer itself may keep upper case
            check_tokenizer(place, tokenizer)
        backbone = _with_tokenizer(Backbone(without_pooler(model), pooling="mean"), _fast(folder, tokenizer))
    transformer.model = backbone.model
    return backbone


def _check_options(
    family: Family, options: Mapping[str, Any], template: Template | None, *, has_code: bool = False
) -> None:
    """Raise ValueError for options that a family does not have, before anything large is loaded."""
    for option, value in options.items():
        if option not in family.options and value not in (None, "query"):
            owner = next(row.name for row in FAMILIES.values() if option in row.options)
            raise ValueError(f"{option}={value!r} would have no effect: it is for {owner}, not for {family.name}")
    if options.get("global_attention") == "sentences" and template is not None:
        raise ValueError("global_attention='sentences' marks sentences in [CLS] query [SEP] text [SEP]: omit template")
    # For remote code, nothing shows whether it answers.
    if template is not None and template.answers is not None and not (family.is_language_model or has_code):
        raise ValueError(f"a template with answers={template.answers!r} is for language models, not for {family.name}")


def _set_options(config: Any, options: Mapping[str, Any]) -> None:
    """Write options of a family into a configuration, which describes the backbone from now on."""
    window, kind = options.get("attention_window"), options.get("attention_type")
    if window is not None:
        config.attention_window = [window] * config.num_hidden_layers
    if kind is not None:
        config.attention_type = kind


def _check_encoder_decoder(name: str, family: Family, template: Template | None, *, pairs: bool) -> None:
    without_answers = template is not None and template.answers is None
    if not pairs or family.name not in FAMILIES or without_answers:
        known = ", ".join(row.name for row in FAMILIES.values() if row.kind == family.kind)
        raise ValueError(
            f"checkpoint {name!r} ({family.name}) is an encoder-decoder: only {known} can score a query and a text, by "
            f"their answer. Use a template with answers, such as {_MONO_T5}, and omit pooling"
        )


def load_pretrained(auto_class: Any, name: str, config: Any, **options: Any) -> Any:
    """Load the model of a checkpoint; ValueError if weights are missing, except those of an unused pooler."""
    for file in Path(name).glob("model*.safetensors"):
        refuse_pointer(file)
    with quiet():
        model, report = auto_class.from_pretrained(
            name,
            config=config,
            dtype=torch.float32,
            use_safetensors=True,  # loading a pickle may run code
            output_loading_info=True,
            **options,
        )
    needs_pooler = auto_class is AutoModelForSequenceClassification
    missing = [key for key in report["missing_keys"] if "pooler" not in key or needs_pooler]
    if missing:
        raise ValueError(f"checkpoint {name!r} lacks {len(missing)} weights, among them {sorted(missing)[:3]}")
    in_own_memory(model)
    return model


def _files_for_pairs(name: str) -> CrossEncoderFiles | None:
    if kind_of(name) == "MultiVectorEncoder":
        logger.warning(
            "%r is a late-interaction model for MaxSim: here only its encoder is used, which must be trained", name
        )
    return cross_encoder_files(name)


def _template(
    config: Any, tokenizer: Any, files: CrossEncoderFiles | None, choice: Template | None, known: Template | None
) -> Template | None:
    """Return the words around query and text; None for two plain texts.

    They are the chosen ones, else those in the checkpoint's files, else those that its name tells.
    """
    if choice is not None:
        return choice.in_chat(tokenizer)
    if files is not None and files.chat is not None:
        return replace(template_of_roles(tokenizer, prompt=files.prompt, **files.chat), answers=files.answers or None)
    family = family_of(config)
    separates = family.kind != "encoder-decoder" and _separates(tokenizer)
    if files is not None:
        # Sentence-transformers encodes two texts, in the tokenizer's layout or concatenated.
        if not files.answers and (separates or family.kind != "decoder"):
            return None
        certain = not separates
        guess: Template | None = Template((f"{files.prompt}{{query}}", "{text}"), answers=files.answers or None)
    elif not family.is_language_model:
        return None
    elif names_roles(tokenizer, "query", "document"):
        # Without other files, sentence-transformers compares "yes" and "no".
        return replace(template_of_roles(tokenizer), answers=None if is_classifier(config) else ("yes", "no"))
    elif known is not None:
        return known
    else:
        # A trained head was trained with a prompt, whatever the tokenizer puts between two texts.
        certain = family.kind != "encoder-decoder" and tokenizer.chat_template is None and not is_classifier(config)
        guess = None if separates else TEMPLATES["plain"]
    if not certain:
        kind = (config.architectures or [config.model_type])[0]
        raise ValueError(
            f"the checkpoint does not specify the prompt of this {kind}: set template= to one of the "
            f"templates {', '.join(TEMPLATES)} ({_MONO_T5}, 'qwen3-reranker' for Qwen3-Reranker and its conversions, "
            f"'yes-no' to ask a chat model, 'plain' to train one), or ld.Template('query: {{query}} "
            f"text: {{text}}', answers=('yes', 'no'))"
        )
    return guess


def _separates(tokenizer: Any) -> bool:
    """Return whether a tokenizer puts special tokens between two texts, as Llama's does."""
    sides = tokenizer("a", "b").sequence_ids()
    return sides.index(1) > len(sides) - sides[::-1].index(0)


def _layout(config_json: Mapping[str, Any]) -> str:
    """Return the published layout of a checkpoint that transformers only loads with remote code; "" for others."""
    if is_published_layout(config_json):
        return AlibiConfig.model_type
    return {"new": "gte", "llama_bidirec": "llama_bidirec"}.get(config_json.get("model_type", ""), "")


def _weights_of(name: str, config_json: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Return the weights of a checkpoint in one file; ValueError for a classifier with other labels than a reranker."""
    file = find_file(name, "model.safetensors")
    if file is None:
        raise ValueError(f"checkpoint {name!r} has no model.safetensors")
    refuse_pointer(file)
    state = {key: value.float() for key, value in load_file(file).items()}
    if "classifier.weight" in state:
        _check_labels(name, len(state["classifier.weight"]), config_json.get("id2label") or {})
    return state


def _load_gte(name: str, config_json: dict[str, Any]) -> Backbone:
    """Load a checkpoint of Alibaba's `new` without running its code."""
    config = gte_config(config_json)
    model = (AutoModelForSequenceClassification if is_classifier(config) else AutoModel).from_config(config)
    model.load_state_dict(gte_weights(_weights_of(name, config_json)))
    return _with_tokenizer(split_classifier(model.eval()), load_fast_tokenizer(name, untyped=True))


def _load_alibi(name: str, config_json: dict[str, Any]) -> Backbone:
    """Load a JINA-v2 or MosaicBERT checkpoint without running its code."""
    state = _weights_of(name, config_json)
    parts = alibi_parts(state, config_json)
    files = ("tokenizer.json", "tokenizer_config.json", "vocab.txt")
    if "alibi_starting_size" in config_json and not any(find_file(name, file) for file in files):
        # MosaicBERT uses BERT's tokenizer.
        name = reachable("google-bert/bert-base-uncased")
    return _with_tokenizer(parts, load_fast_tokenizer(name))


_LOADERS = {AlibiConfig.model_type: _load_alibi, "gte": _load_gte}
"""Loaders of published layouts, by the name of their family."""


def build_backbone(description: dict[str, Any], tokenizer: Any) -> Backbone:
    """Return the modules that `Backbone.describe` described, with random weights, for strict loading afterwards."""
    # How attention is computed depends on the machine, not on the weights; by a name of the hub it would be code there.
    values = {name: value for name, value in description["config"].items() if "attn_implementation" not in name}
    family, classifies, modular = values.pop("model_type"), description["cross_encoder"], description.get("modular")
    if family == AlibiConfig.model_type:
        parts = build_alibi(AlibiConfig(**values), classifies)
    else:
        config = AutoConfig.for_model(family, **values)
        config.dtype = torch.float32
        model = (AutoModelForSequenceClassification if classifies else AutoModel).from_config(config)
        if config.is_encoder_decoder:
            parts = Backbone(FirstStep(model), pooling="cls")
        elif modular is not None:
            steps = RepresentationSteps(modular["steps"], int(config.hidden_size))
            parts = Backbone(without_pooler(model), representation=steps, pooling=modular["pooling"])
        else:
            parts = split_classifier(model)
    options = description.get("options", {})
    template = options.get("template")
    backbone = _with_tokenizer(
        parts,
        tokenizer,
        template=None if template is None else Template(**template),
        prompt=options.get("prompt", ""),
        global_attention=options.get("global_attention", "query"),
    )
    return _pooled(backbone, options.get("pooling"))


def _with_tokenizer(backbone: Backbone, tokenizer: Any, **reading: Any) -> Backbone:
    if tokenizer is not None:
        check_embeddings(backbone.model, tokenizer)
    return replace(backbone, tokenizer=tokenizer, **reading)


def _pooled(backbone: Backbone, pooling: str | None) -> Backbone:
    """Return a backbone with another pooling; None keeps its own, with the layers that were trained on it.

    Its last layer gets the scale of the template.
    """
    if backbone.template is not None and backbone.final is not None:
        scaled(backbone.final, backbone.template.scale)
    if pooling is None or (pooling == backbone.pooling and backbone.representation is None):
        return backbone
    return replace(backbone, representation=None, final=None, pooling=pooling)


def check_embeddings(model: Any, tokenizer: Any) -> None:
    """Raise ValueError if a tokenizer can produce a token, including added ones, that has no embedding."""
    tokens, embeddings = max(tokenizer.get_vocab().values()) + 1, len(model.get_input_embeddings().weight)
    if tokens > embeddings:
        raise ValueError(
            f"the tokenizer of {tokenizer.name_or_path!r} has {tokens} tokens, but its model has embeddings of "
            f"{embeddings}: use the tokenizer with which it was trained, or call resize_token_embeddings({tokens}) on "
            f"the model, train it and save it"
        )


def load_fast_tokenizer(name: str, *, trust_remote_code: bool = False, untyped: bool = False) -> Any:
    """Load the fast tokenizer of a checkpoint, the source of character offsets and pair layouts.

    With `untyped`, transformers does not read the checkpoint's type of model: it would warn of one that it lacks.
    """
    config = PretrainedConfig() if untyped else None
    return _fast(name, load_tokenizer(name, trust_remote_code=trust_remote_code, config=config))


def _fast(name: str, tokenizer: Any) -> Any:
    if not tokenizer.is_fast:
        raise ValueError(f"checkpoint {name!r} has no fast tokenizer: it needs a tokenizer.json")
    return tokenizer


def _check_labels(name: str, labels: int, names: Mapping[Any, Any] | None) -> None:
    if labels > 2:
        raise ValueError(f"checkpoint {name!r} is a classifier with {labels} labels, but a reranker has one or two")
    if labels == 2 and names is not None:  # of a head that is used
        relevant = relevant_label(names)
        if relevant is None:
            raise ValueError(
                f"checkpoint {name!r} has two labels, {' and '.join(map(repr, names.values()))}, which do not show "
                f"which one is relevant: name them 'irrelevant' and 'relevant' in id2label of its config.json"
            )
        logger.warning("%r has two labels: its score is logit[%d] - logit[%d]", name, relevant, 1 - relevant)


def checkpoint_config(name: str) -> dict[str, Any]:
    """Return the config.json of a Hugging Face checkpoint; ValueError for an adapter, or if this package saved it."""
    config, _ = PretrainedConfig.get_config_dict(name)
    adapter = read_json(name, "adapter_config.json")
    if adapter is not None:
        raise ValueError(
            f"checkpoint {name!r} is a LoRA adapter of {adapter.get('base_model_name_or_path')!r}: merge it first, "
            f"with peft.AutoPeftModelForSequenceClassification.from_pretrained({name!r}).merge_and_unload()"
            f".save_pretrained(folder), save the tokenizer there as well, and use that folder"
        )
    if config.get("format") == SAVED_FORMAT:
        cure = f"restore it with {config['class']}.load({name!r})"
        raise ValueError(f"{name!r} holds a model saved by this package: {cure}")
    if "jina-reranker-v3.5" in f"{name} {config.get('_name_or_path')}".lower():
        raise ValueError(
            f"checkpoint {name!r} is not supported: its prompt and its projection are not those of jina-reranker-v3"
        )
    return config
