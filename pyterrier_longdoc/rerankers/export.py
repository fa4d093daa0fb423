"""Export of trained models as standard checkpoints, which other libraries load without this package."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer
from transformers.tokenization_utils_base import VERY_LARGE_INTEGER

from ..common.arguments import changed
from ..common.files import MARKER, full_path, replacing_files
from ..common.packaged import ENCODER
from ..modelling.backbones.architectures import quiet
from ..modelling.backbones.backbone import values_of
from ..modelling.backbones.classifiers import split_classifier
from ..modelling.backbones.modules import TOKENS, library
from ..modelling.backbones.steps import RepresentationSteps
from ..modelling.layout import InputLayout, resolve_layout
from ..modelling.saved import PLACEHOLDER_NAME

_SMALL = 2.0**-12
"""For such a small t, `tanh(t x) / t` is x to float32 precision: an error of x^3 t^2 / 3."""

_CLOSE = 1e-3
"""Scores that differ by more are other ones."""

_LONG = 512
"""Tokens of the longest window that is compared if nothing limits windows."""

_CARD = "README.md"

_Scores = Callable[[str, list[str], list[str]], np.ndarray]
"""`(folder, queries, texts) -> scores` of a checkpoint, by the library that loads it; all queries are equal."""

_CLASSIFIER_CARD = """# {name}

A cross-encoder that scores a query and a passage. Its one output is a logit: the higher, the more relevant.

```python
from sentence_transformers import CrossEncoder

scores = CrossEncoder("{its_name}").predict([("a query", "a passage")])
```

It was trained as `{name}` of pyterrier_longdoc, which scores a long document by its passages:

```python
import pyterrier_longdoc as ld

reranker = ld.{name}("{its_name}"{arguments})
```

This checkpoint does not truncate queries. In training, pyterrier_longdoc truncated them to {query} tokens.
"""

_VECTORS_CARD = """# {name}

A late-interaction model: each token of a query is compared with each token of a passage.

```python
from sentence_transformers import MultiVectorEncoder

model = MultiVectorEncoder("{its_name}")
scores = model.similarity(model.encode_query(["a query"]), model.encode_document(["a passage"]))
```

For long documents, read in windows:

```python
import pyterrier_longdoc as ld

reranker = ld.MaxSim("{its_name}"{arguments})
```
"""


@contextmanager
def _exporting(reranker: Any, folder: str | Path, card: str, scores: _Scores) -> Iterator[Path]:
    """Yield an empty folder whose checkpoint becomes `folder` if `scores` computes the model's scores with it.

    An interrupted export leaves no model card, and can be repeated.
    """
    if reranker.model.origin == "random":
        raise ValueError(f"{reranker!r} has random weights: train it before you export it")
    folder = Path(full_path(folder))
    if (folder / _CARD).is_file():
        raise ValueError(f"{str(folder)!r} is not empty: export to a new folder")
    with replacing_files(folder, last=_CARD) as new:
        yield new
        _finish(reranker, new, card)
        with quiet(), changed(reranker, device="cpu", dtype="float32", runtime="torch"):
            queries, texts = _longest_and_shortest(reranker.model)
            expected, found = reranker.model.score(queries, texts).scores, scores(str(new), queries, texts)
        if not np.allclose(found, expected, rtol=_CLOSE, atol=_CLOSE):
            raise ValueError(
                f"{type(reranker).__name__} cannot be exported: of windows of different lengths, the exported "
                f"checkpoint gives the scores {found.tolist()} instead of {expected.tolist()}"
            )
    (folder / MARKER).unlink()  # `save` must not replace it


def _longest_and_shortest(model: Any) -> tuple[list[str], list[str]]:
    """Return a query, twice, and texts of a longest window and of one word."""
    words = sorted({token.lstrip("Ġ▁") for token in model.tokenizer.get_vocab()})
    words = [word for word in words if word.isascii() and word.isalpha()] or ["a"]
    size = model.reader.windows.largest or model.reader.longest or _LONG
    text = " ".join(Random(0).choices(words, k=2 * size))
    [pair] = model.read([words[0]], [text], offsets=True)
    return [words[0]] * 2, [pair.text.input_text(pair.spans[0]), words[-1]]


def _logits(folder: str, queries: list[str], texts: list[str]) -> np.ndarray:
    model, tokenizer = AutoModelForSequenceClassification.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    with torch.inference_mode():
        inputs = tokenizer(queries, texts, padding=True, truncation=True, return_tensors="pt")
        return model.eval()(**inputs).logits.squeeze(1).double().numpy()


def _similarities(folder: str, queries: list[str], texts: list[str]) -> np.ndarray:
    from sentence_transformers import MultiVectorEncoder

    encoder = MultiVectorEncoder(folder, device="cpu")
    found = encoder.similarity(encoder.encode_query(queries[:1]), encoder.encode_document(texts))
    return found[0].double().cpu().numpy()


def export_classifier(reranker: Any, folder: str | Path) -> None:
    """Write a reranker as a checkpoint of `AutoModelForSequenceClassification`; see `CrossEncoder.export`."""
    reranker.require_weights("exported")
    why = _obstacle(reranker)
    if why:
        raise ValueError(f"{type(reranker).__name__} cannot be exported as a sequence classifier: {why}")
    with _exporting(reranker, folder, _CLASSIFIER_CARD, _logits) as new:
        with quiet():
            _classifier(reranker.model).save_pretrained(new)
        reranker.model.tokenizer.save_pretrained(new)


def _obstacle(reranker: Any) -> str:
    """Return what a sequence classifier cannot express of a model; "" if nothing."""
    model, backbone = reranker.model, reranker.model.backbone
    head, family, step = type(model.head).__name__, backbone.family, backbone.representation
    if not model.head.from_scores:
        return f"{head} combines vectors of several windows, and a classifier scores one window"
    if backbone.template is not None or backbone.prompt:
        return "its template or prompt would be missing"
    if resolve_layout(reranker.layout) != InputLayout():
        return f"layout={reranker.layout!r} is not the layout of the tokenizer"
    if not family.supports_export or reranker.trust_remote_code:
        return f"its backbone ({family.name}) is not a plain classifier of transformers"
    if isinstance(step, RepresentationSteps):
        return "its checkpoint consists of modules of sentence-transformers"
    # Then `final(tanh(dense(x)))` of the first token's state x can express a layer on x.
    if step is None and not (backbone.pooling == "cls" and family.head.activation == "tanh"):
        return f"the classification head of {family.name} is not a layer on the state with pooling={backbone.pooling!r}"
    return ""


@torch.no_grad()
def _classifier(model: Any) -> Any:
    """Return a classifier of transformers with the weights of a model."""
    backbone, encoder, final = model.backbone, model.encoder, model.head.final
    values = values_of(backbone.model.config)
    labels = ("id2label", "label2id", "num_labels", "architectures")  # of the backbone's own checkpoint
    values = {name: value for name, value in values.items() if name not in labels}
    config = AutoConfig.for_model(values.pop("model_type"), **values, num_labels=1)
    config.dtype = torch.float32
    classifier = AutoModelForSequenceClassification.from_config(config)
    config = classifier.config
    config.architectures = [type(classifier).__name__]
    # Without it a CrossEncoder applies a sigmoid to a single label.
    config.sentence_transformers = {"activation_fn": "torch.nn.modules.linear.Identity"}
    pooler = getattr(classifier.base_model, "pooler", None)
    parts: Any = split_classifier(classifier)
    parts.model.load_state_dict(encoder.backbone.state_dict())
    parts.final.load_state_dict(final.state_dict())
    if backbone.representation is not None:
        parts.representation.load_state_dict(encoder.representation.state_dict())
    else:
        nn.init.eye_(parts.representation.dense.weight).mul_(_SMALL)
        nn.init.zeros_(parts.representation.dense.bias)
        parts.final.weight.div_(_SMALL)
    if isinstance(pooler, nn.Module):
        classifier.base_model.pooler = pooler  # which `split_classifier` has removed
    return classifier.eval()


def export_vectors(reranker: Any, folder: str | Path) -> None:
    """Write a late-interaction model as a checkpoint of sentence-transformers; see `MaxSim.export`."""
    reranker.require_weights("exported")
    library(str(folder))
    from sentence_transformers import MultiVectorEncoder
    from sentence_transformers.base.modules import Dense, Normalize, Transformer
    from sentence_transformers.multi_vector_encoder.modules import HierarchicalTokenPooling, MultiVectorMask

    model, encoder = reranker.model, reranker.model.encoder
    rules, words = encoder.vector_rules, model.tokenizer.convert_ids_to_tokens
    reading: dict[str, Any] = {"document_length": rules.document_length, "query_length": rules.query_length}
    if rules.document_length is not None and model.reader.windows.largest is not None:
        reading["document_length"] = model.reader.windows.largest + model.reader.special_tokens()
    if rules.expand_to:
        strategy = "fixed" if rules.query_length == rules.expand_to else "min"
        filler = {"token": words(rules.expand_with), "length": rules.expand_to, "attend": rules.attends}
        reading["query_expansion"] = {"strategy": strategy, **filler}
    tokens: dict[str, Any] = {"module_input_name": TOKENS}
    exporting = _exporting(reranker, folder, _VECTORS_CARD, _similarities)
    with exporting as new, quiet(), tempfile.TemporaryDirectory() as backbone:
        encoder.backbone.save_pretrained(backbone)
        model.tokenizer.save_pretrained(backbone)
        modules: list[Any] = [Transformer(backbone, **reading)]
        for step, layer in zip(encoder.representation.description, encoder.representation, strict=True):
            activation = layer.activation
            shape = {"bias": step["bias"], "activation_function": activation, "use_residual": step["residual"]}
            modules.append(Dense(step["inputs"], step["outputs"], **shape, **tokens))
            modules[-1].load_state_dict(layer.state_dict())
        if rules.skipped or rules.expand_to:
            modules.append(MultiVectorMask(list(map(words, rules.skipped)), skiplist_tasks=list(rules.skips_in)))
        if rules.normalize:
            modules.append(Normalize(**tokens))
        if rules.pooling > 1:
            pooling: dict[str, Any] = {
                "num_protected_tokens": rules.protected,
                "normalize_embeddings": rules.pooling_normalizes,
            }
            modules.append(HierarchicalTokenPooling(rules.pooling, **pooling))
        MultiVectorEncoder(
            modules=modules,
            prompts={"query": rules.query_prefix, "document": rules.document_prefix},
            similarity_fn_name="meanmaxsim" if rules.mean else "maxsim",
            device="cpu",
        ).save_pretrained(str(new), create_model_card=False)


def _finish(reranker: Any, folder: Path, card: str) -> None:
    """Write how this package reads (its longest input, with padding on the right) and the model card."""
    model, settings = reranker.model, folder / "tokenizer_config.json"
    values = json.loads(settings.read_text(encoding="utf-8"))
    values |= {"model_max_length": model.backbone.longest_input or VERY_LARGE_INTEGER, "padding_side": "right"}
    settings.write_text(json.dumps(values, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    base = str(reranker.backbone)
    base = {ENCODER: "sentence-transformers/all-MiniLM-L6-v2"}.get(base, base)
    front = ["library_name: sentence-transformers", "pipeline_tag: text-ranking"]
    front += [] if Path(base).exists() else [f"base_model: {base}"]
    named = {name: getattr(reranker, name) for name in ("window_size", "stride") if getattr(reranker, name, None)}
    text = card.format(
        name=type(reranker).__name__,
        its_name=PLACEHOLDER_NAME,
        arguments="".join(f", {name}={value}" for name, value in named.items()),
        query=reranker.max_query_len,
    )
    training = "" if reranker.trained_on is None else f"\nTraining data: {reranker.trained_on}.\n"
    validated = [row["validation"] for row in model.history if row.get("validation") is not None]
    if validated:
        training += f"\nValidation: {(model.recipe or {}).get('metric')} {max(validated):.4f}.\n"
    header = "\n".join(["---", *front, "---", ""])
    (folder / _CARD).write_text(header + text + training, encoding="utf-8")
