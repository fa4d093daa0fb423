"""Presets of the papers' models: backbone, windows, pooling and lengths of Boytsov et al. 2025, with published figures.

The backbones are those of the authors' configurations, e.g. an MS MARCO cross-encoder for ELECTRA. All models read
queries of 32 tokens (E5-4K: including special tokens). FirstP reads 477 document tokens, all others 1,431 = 3 x 477.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import pandas as pd

from ..common.names import did_you_mean
from ..listwise.schedules import BackToFront

MEASURES = ("dev RR", "DL nDCG@10", "title nDCG@20", "description nDCG@20")
"""MS MARCO documents dev; TREC DL 2019-2021 pooled; Robust04 with title and with description queries."""
FAR_MEASURES = ("far RR, zero-shot", "far RR, fine-tuned")
"""MS MARCO FarRelevant, with the MS MARCO model and after another epoch on FarRelevant."""

BERT = "google-bert/bert-base-uncased"
ELECTRA = "cross-encoder/ms-marco-electra-base"
DEBERTA = "microsoft/deberta-v3-base"
LONGFORMER = "allenai/longformer-base-4096"
BIGBIRD = "google/bigbird-roberta-base"
JINA = "jinaai/jina-embeddings-v2-base-en"
MOSAIC = "mosaicml/mosaic-bert-base-seqlen-2048"
TINYLLAMA = "TinyLlama/TinyLlama-1.1B-intermediate-step-1431k-3T"
E5 = "dwzhu/e5-base-4k"
MINILM = "cross-encoder/ms-marco-MiniLM-L6-v2"

FIRST = 477
"""Document tokens of FirstP: 512 - 32 - 3."""
WHOLE = 1431
"""Document tokens of all other models: 3 x 477."""

_LAYOUTS = {
    BERT: "padded", ELECTRA: "padded", DEBERTA: "padded-lowercase", BIGBIRD: "padded-lowercase",
    LONGFORMER: "longformer", JINA: "shared", MOSAIC: "shared", TINYLLAMA: "shared-lowercase",
}  # fmt: skip
"""Input layouts by backbone, as in FlexNeuART, whose export lower-cases texts."""
_LOWER = "reads lower-cased text, as in the paper's experiments"
_SHARED = "query and document share 3 + 32 + 477 (or 1431) tokens, as in the paper's experiments"
_LAYOUT_NOTES = {
    "padded-lowercase": _LOWER,
    "longformer": f"{_LOWER}; position ids skip the padding of queries",
    "shared": _SHARED,
    "shared-lowercase": f"{_LOWER}; {_SHARED}",
}


@dataclass(frozen=True, repr=False)
class Preset:
    """The configuration of a model in a paper. Call it to create a transformer.

    Attributes:
        row: the name of the model in the paper's table.
        transformer: the name of its class in this package.
        arguments: the arguments of the constructor.
        published: the published figures by measure: means over three seeds; zero-shot for E5-4K and RankGPT.
        partner: the preset of its FirstP; None for a FirstP.
        source: the table with the figures.
        epochs: the number of epochs on MS MARCO; None without training.
        note: differences from the published model, details of its input, and points on which sources disagree.
    """

    row: str
    transformer: str
    arguments: Mapping[str, Any] = field(hash=False)
    published: Mapping[str, float] = field(default_factory=dict, hash=False)
    partner: str | None = None
    source: str = "Boytsov et al. 2025, Table 1"
    epochs: int | None = 1
    note: str = ""

    def __repr__(self) -> str:
        arguments = ", ".join(f"{name}={value!r}" for name, value in self.arguments.items())
        return f"Preset({self.row}: {self.transformer}({arguments}))"

    def __call__(self, *, as_published: bool = False, **changes: Any) -> Any:
        """Create a transformer with the paper's recipe. It is untrained; only the zero-shot systems need no `fit`.

        Args:
            as_published: also read windows that only contain padding, as for the published figures (`FixedGrid`).
                Scores then depend on `max_doc_len`. This has no effect on models with a single window. `windows` and
                `layout` cannot be changed.
            **changes: constructor arguments to add or change, e.g. `text_field=("title", "body")`.
        """
        package = importlib.import_module("pyterrier_longdoc")
        arguments = {**self.arguments, **changes}
        if as_published and self.row in _NOT_AS_PUBLISHED:
            raise ValueError(f"as_published=True is not available for {self.row}: {_NOT_AS_PUBLISHED[self.row]}")
        for name in ("windows", "layout"):
            if as_published and name in changes and changes[name] != self.arguments.get(name):
                raise ValueError(f"{name}={changes[name]!r} must not be changed with as_published=True")
        if as_published and "stride" in arguments:  # otherwise, the model has a single window
            size, stride = arguments.pop("window_size"), arguments.pop("stride")
            arguments["windows"] = package.FixedGrid(size, stride, arguments["max_doc_len"])
        model = getattr(package, self.transformer)(**arguments)
        if self.epochs not in (None, 1) and "training" not in arguments:
            recipe = package.TrainingArgs.preset("boytsov2025", epochs=self.epochs)
            # The learning rates are others if the head is pre-trained.
            model.training = replace(recipe, learning_rates=model.recipe.learning_rates)
        return model


_CEDR = "its code also matches padding, and averages the vectors of chunks like AvgP"
_PROMPT = "its prompt, its number of documents per call and the truncation of texts were not published"
_NOT_AS_PUBLISHED = {
    "AvgP": "its code adds the vectors of three chunks, also of padding, and divides by the number of chunks with text",
    "CEDR-DRMM": _CEDR,
    "CEDR-KNRM": _CEDR,
    "CEDR-PACRR": _CEDR,
    "Neural Model1": "its code was not published",
    "LongP (E5-4K) zero-shot": "its code makes the position ids of a text depend on the longest text of the batch",
    "FirstP RankGPT (GPT-4o-mini)": _PROMPT,
    "LongP RankGPT (GPT-4o-mini)": _PROMPT,
}
"""Why a row cannot be reproduced, for its `note`."""


class Presets(dict[str, Preset]):
    """The presets by name; `table()` lists them all.

    Example:
        >>> presets["parade-attn-electra"].published["dev RR"]
        0.431
    """

    def __repr__(self) -> str:
        return f"Presets({', '.join(self)})"

    def __missing__(self, name: str) -> Preset:
        raise KeyError(f"preset {name!r} must be one of {', '.join(self)}{did_you_mean(str(name).lower(), self)}")

    def _repr_html_(self) -> str:
        return self.table().to_html(index=False, na_rep="")

    def table(self) -> pd.DataFrame:
        """Return one row per preset: row of the paper, class, backbone, partner, epochs, note and published figures."""
        rows = []
        for name, preset in self.items():
            backbone = preset.arguments.get("backbone", preset.arguments.get("llm"))
            model = {"name": name, "row": preset.row, "transformer": preset.transformer, "backbone": backbone}
            others = {"partner": preset.partner, "epochs": preset.epochs, "note": preset.note}
            figures = {measure: preset.published.get(measure) for measure in (*MEASURES, *FAR_MEASURES)}
            rows.append({**model, **others, **figures})
        return pd.DataFrame(rows)


Figures = tuple[float | None, ...]
"""MS MARCO dev; TREC DL; Robust04 title and description; FarRelevant zero-shot and fine-tuned."""


def _firstp(backbone: str, **options: Any) -> dict[str, Any]:
    """Return the arguments of a model that reads the beginning of a document."""
    return {"backbone": backbone, "window_size": FIRST, "layout": _LAYOUTS[backbone], **options}


def _splitp(backbone: str, **options: Any) -> dict[str, Any]:
    """Return the arguments of a model over windows."""
    return {"backbone": backbone, "max_doc_len": WHOLE, "layout": _LAYOUTS[backbone], **options}


def _longp(backbone: str, length: int, pooling: str = "cls") -> dict[str, Any]:
    """Return the arguments of a model that reads the document in one window."""
    return {"backbone": backbone, "max_doc_len": length, "pooling": pooling, "layout": _LAYOUTS[backbone]}


_CHUNKS = {"window_size": 477}
_BY_100 = {"window_size": 150, "stride": 100}
_BY_75 = {"window_size": 150, "stride": 75}
_ATTN = {"aggregation": "attn", "attention": "elementwise"}
_RANDOM_L2 = {"aggregation": "transformer", "layers": 2}
_PRETRAINED = {"aggregation": "transformer", "aggregator": MINILM}
_E5 = {"backbone": E5, "query_prefix": "", "passage_prefix": "", "aggregation": "first", "position_step": 8,
       "max_query_len": 30}  # fmt: skip
_GPT = {"llm": "gpt-4o-mini", "schedule": BackToFront(window=20, stride=10)}

_TABLE_1: tuple[tuple[str, str, str, str | None, dict[str, Any], Figures], ...] = (
    # name, row, transformer, its FirstP, arguments, figures
    ("firstp", "FirstP (BERT)", "FirstP", None, _firstp(BERT),
     (0.394, 0.632, 0.475, 0.527, 0.016, 0.090)),
    ("firstp-longformer", "FirstP (Longformer)", "LongP", None, _longp(LONGFORMER, FIRST),
     (0.404, 0.643, 0.483, 0.540, 0.017, 0.091)),
    ("firstp-electra", "FirstP (ELECTRA)", "FirstP", None, _firstp(ELECTRA, pooling="cls"),
     (0.417, 0.662, 0.492, 0.552, 0.019, 0.089)),
    ("firstp-deberta", "FirstP (DEBERTA)", "FirstP", None, _firstp(DEBERTA),
     (0.415, 0.672, 0.534, 0.596, None, None)),
    ("firstp-bigbird", "FirstP (Big-Bird)", "LongP", None, _longp(BIGBIRD, FIRST),
     (0.408, 0.656, 0.507, 0.560, 0.021, 0.089)),
    ("firstp-jina", "FirstP (JINA)", "LongP", None, _longp(JINA, FIRST, "mean"),
     (0.422, 0.654, 0.488, 0.532, 0.018, 0.088)),
    ("firstp-mosaic", "FirstP (MOSAIC)", "LongP", None, _longp(MOSAIC, FIRST),
     (0.423, 0.643, 0.453, 0.538, 0.018, 0.089)),
    ("firstp-tinyllama", "FirstP (TinyLLAMA)", "LongP", None, _longp(TINYLLAMA, FIRST, "mean"),
     (0.395, 0.615, 0.431, 0.473, 0.020, 0.079)),
    ("firstp-e5-4k", "FirstP (E5-4K) zero-shot", "BiEncoder", None, {**_E5, "window_size": FIRST - 2},
     (0.380, 0.641, 0.438, 0.429, 0.015, None)),
    ("firstp-rankgpt", "FirstP RankGPT (GPT-4o-mini)", "RankGPT", None, {**_GPT, "max_doc_len": 512},
     (None, 0.708, None, 0.562, None, None)),
    ("avgp", "AvgP", "AvgP", "firstp", _splitp(BERT, **_CHUNKS), (0.389, 0.642, 0.478, 0.531, 0.154, 0.365)),
    ("maxp", "MaxP", "MaxP", "firstp", _splitp(BERT, **_BY_100), (0.392, 0.644, 0.488, 0.544, 0.297, 0.328)),
    ("maxp-electra", "MaxP (ELECTRA)", "MaxP", "firstp-electra", _splitp(ELECTRA, pooling="cls", **_BY_100),
     (0.414, 0.659, 0.502, 0.563, 0.328, 0.349)),
    ("maxp-deberta", "MaxP (DEBERTA)", "MaxP", "firstp-deberta", _splitp(DEBERTA, **_BY_100),
     (0.402, 0.671, 0.535, 0.609, 0.298, 0.332)),
    ("sump", "SumP", "SumP", "firstp", _splitp(BERT, **_BY_100), (0.390, 0.639, 0.486, 0.538, 0.211, 0.327)),
    ("cedr-drmm", "CEDR-DRMM", "CEDR", "firstp", _splitp(BERT, aggregation="drmm", **_CHUNKS),
     (0.385, 0.629, 0.466, 0.533, 0.157, 0.372)),
    ("cedr-knrm", "CEDR-KNRM", "CEDR", "firstp", _splitp(BERT, aggregation="knrm", **_CHUNKS),
     (0.379, 0.630, 0.483, 0.535, 0.055, 0.382)),
    ("cedr-pacrr", "CEDR-PACRR", "CEDR", "firstp", _splitp(BERT, aggregation="pacrr", **_CHUNKS),
     (0.395, 0.643, 0.496, 0.549, 0.209, 0.393)),
    ("model1", "Neural Model1", "NeuralModel1", "firstp", _splitp(BERT, **_CHUNKS),
     (0.398, 0.650, 0.484, 0.537, 0.085, 0.396)),
    ("parade-attn", "PARADE Attn", "PARADE", "firstp", _splitp(BERT, **_ATTN, **_BY_100),
     (0.416, 0.652, 0.503, 0.556, 0.300, 0.337)),
    ("parade-attn-electra", "PARADE Attn (ELECTRA)", "PARADE", "firstp-electra",
     _splitp(ELECTRA, pooling="cls", **_ATTN, **_BY_100), (0.431, 0.680, 0.523, 0.581, 0.338, 0.354)),
    ("parade-attn-deberta", "PARADE Attn (DEBERTA)", "PARADE", "firstp-deberta",
     _splitp(DEBERTA, **_ATTN, **_BY_75), (0.422, 0.688, 0.549, 0.615, 0.307, 0.343)),
    ("parade-avg", "PARADE Avg", "PARADE", "firstp", _splitp(BERT, aggregation="avg", **_BY_100),
     (0.392, 0.646, 0.483, 0.534, 0.274, 0.322)),
    ("parade-max", "PARADE Max", "PARADE", "firstp", _splitp(BERT, aggregation="max", **_BY_100),
     (0.405, 0.655, 0.489, 0.548, 0.291, 0.330)),
    ("parade-rand-l2", "PARADE Transf-RAND-L2", "PARADE", "firstp", _splitp(BERT, **_RANDOM_L2, **_BY_100),
     (0.419, 0.655, 0.488, 0.548, 0.243, 0.419)),
    ("parade-rand-l2-electra", "PARADE Transf-RAND-L2 (ELECTRA)", "PARADE", "firstp-electra",
     _splitp(ELECTRA, pooling="cls", **_RANDOM_L2, **_BY_100), (0.433, 0.670, 0.523, 0.574, 0.229, 0.432)),
    ("parade-pretr-l6", "PARADE Transf-PRETR-L6", "PARADE", "firstp", _splitp(BERT, **_PRETRAINED, **_BY_75),
     (0.402, 0.643, 0.494, 0.554, 0.267, 0.413)),
    ("longp-longformer", "LongP (Longformer)", "LongP", "firstp-longformer", _longp(LONGFORMER, WHOLE),
     (0.412, 0.668, 0.500, 0.568, 0.233, 0.399)),
    ("longp-bigbird", "LongP (Big-Bird)", "LongP", "firstp-bigbird", _longp(BIGBIRD, WHOLE),
     (0.397, 0.651, 0.452, 0.477, 0.126, 0.401)),
    ("longp-jina", "LongP (JINA)", "LongP", "firstp-jina", _longp(JINA, WHOLE, "mean"),
     (0.416, 0.665, 0.503, 0.558, 0.069, 0.372)),
    ("longp-mosaic", "LongP (MOSAIC)", "LongP", "firstp-mosaic", _longp(MOSAIC, WHOLE),
     (0.421, 0.664, 0.456, 0.570, 0.120, 0.397)),
    ("longp-tinyllama", "LongP (TinyLLAMA)", "LongP", "firstp-tinyllama", _longp(TINYLLAMA, WHOLE, "mean"),
     (0.402, 0.608, 0.452, 0.505, 0.078, 0.397)),
    ("longp-e5-4k", "LongP (E5-4K) zero-shot", "BiEncoder", "firstp-e5-4k", {**_E5, "window_size": WHOLE - 2},
     (0.353, 0.649, 0.439, 0.434, 0.057, None)),
    ("longp-rankgpt", "LongP RankGPT (GPT-4o-mini)", "RankGPT", "firstp-rankgpt", {**_GPT, "max_doc_len": None},
     (None, 0.706, None, 0.562, 0.043, None)),
)  # fmt: skip

_OTHERS: tuple[tuple[str, str, str, str | None, dict[str, Any], Figures, str], ...] = (
    ("parade-lateir-l6", "PARADE Transf-PRETR-LATEIR-L6", "LateIR", "firstp", _splitp(BERT, **_BY_75),
     (0.398, 0.626, 0.450, 0.501, 0.244, 0.358), "Boytsov et al. 2025, appendix"),
    ("parade-pretr-q-l6", "PARADE Transf-PRETR-Q-L6", "PARADE", "firstp",
     _splitp(BERT, **_PRETRAINED, **_BY_100, query_states=True, separators=False),
     (0.408, 0.650, 0.498, 0.561, None, None), "Boytsov et al. 2022, Table 4"),
)  # fmt: skip


_EPOCHS: dict[str, int | None] = {
    # All others: one epoch. For JINA and MOSAIC, the authors kept the better one of the two epochs.
    "firstp-jina": 2, "longp-jina": 2, "firstp-mosaic": 2, "longp-mosaic": 2, "parade-rand-l2": 2,
    "parade-rand-l2-electra": 2, "parade-lateir-l6": 3,
    "firstp-e5-4k": None, "longp-e5-4k": None, "firstp-rankgpt": None, "longp-rankgpt": None,
}  # fmt: skip

_TABLE_8 = "these are the figures for 150/100 in Table 8 of Boytsov et al. 2022; the configuration says 150/75"
_AS_ATTN = (
    "its figures do not reveal the stride; 150/100 as for PARADE Attn in the same paper (the configuration says 150/75)"
)
_RETRAINED = "150/75 by its configuration; trained again for the 2025 paper, so Table 8 of 2022 does not apply"
_RANKGPT = (
    "the paper does not give its prompt, the number of documents per call or the tokenizer of its 512 tokens; this "
    "preset uses the prompt of this package and the window of RankGPT (20, stride 10), without truncation at 300 words"
)
_TWO_EPOCHS = (
    "two epochs, as in the authors' {scripts}; the paper says one for all models but Transf-RAND-L2 and "
    "Transf-PRETR-LATEIR-L6"
)
_NOTES = {
    **dict.fromkeys(("firstp-jina", "longp-jina"), _TWO_EPOCHS.format(scripts="training scripts")),
    **dict.fromkeys(("firstp-mosaic", "longp-mosaic"), _TWO_EPOCHS.format(scripts="training script of LongP")),
    "parade-attn": _TABLE_8,
    "parade-attn-electra": _AS_ATTN,
    "parade-attn-deberta": "150/75 by its only configuration",
    "parade-avg": _AS_ATTN,
    "parade-max": _AS_ATTN,
    "parade-rand-l2": "150/100 by its configuration",
    "parade-rand-l2-electra": "150/100 by its last configuration; an earlier one has 150/75",
    "parade-pretr-l6": _RETRAINED,
    "parade-lateir-l6": "150/75 by its configuration",
    "parade-pretr-q-l6": f"{_TABLE_8}; without separators, as in the code of 2022",
    "firstp-rankgpt": _RANKGPT,
    "longp-rankgpt": _RANKGPT,
}
"""Notes on the figures of a model, by name; window size and stride are in tokens."""


def _presets() -> dict[str, Preset]:
    rows = [(*row, Preset.source) for row in _TABLE_1] + list(_OTHERS)
    result = {}
    for name, row, transformer, partner, arguments, figures, source in rows:
        by_measure = zip((*MEASURES, *FAR_MEASURES), figures, strict=True)
        published = {measure: value for measure, value in by_measure if value is not None}
        note = "; ".join(filter(None, (_NOTES.get(name), _LAYOUT_NOTES.get(arguments.get("layout", "")))))
        epochs = _EPOCHS.get(name, 1)
        result[name] = Preset(row, transformer, arguments, published, partner, source, epochs, note)
    return result


presets = Presets(_presets())
"""All rows of Table 1 of Boytsov et al. 2025, and two other models of the two papers."""
