"""The configurations of Boytsov et al. 2025 by name, with the figures that were published for them.

`ld.presets["parade-attn-electra"]()` is the model; the module is not called presets because a package's module would
hide the mapping of that name.

Source: Boytsov et al., Positional Bias in Long-Document Ranking (2025), Table 1 (MS MARCO dev MRR, TREC DL 2019-2021
NDCG@10, Robust04 title and description NDCG@20) and Table 4 (MS MARCO FarRelevant MRR, trained on MS MARCO, and then
fine-tuned). Window sizes, strides and lengths are those of the published model configurations.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import pandas as pd

FIGURES = ("MS MARCO dev", "TREC DL", "Robust04 title", "Robust04 description", "FarRelevant", "FarRelevant tuned")
"""What the figures of a preset are, in their order; all are MRR or NDCG as the module says."""

BERT = "google-bert/bert-base-uncased"
ELECTRA = "cross-encoder/ms-marco-electra-base"
DEBERTA = "microsoft/deberta-v3-base"
LONGFORMER = "allenai/longformer-base-4096"
BIGBIRD = "google/bigbird-roberta-base"
JINA = "jinaai/jina-embeddings-v2-base-en"
MOSAIC = "mosaicml/mosaic-bert-base-seqlen-2048"
TINYLLAMA = "TinyLlama/TinyLlama-1.1B-intermediate-step-1431k-3T"
E5 = "dwzhu/e5-base-4k"

FIRST = 477
"""Document tokens of FirstP: 512 - 32 query tokens - 3 special ones."""
WHOLE = 3 * FIRST


@dataclass(frozen=True)
class Preset:
    """A row of the paper's tables.

    Attributes:
        row: what the paper calls it.
        model: name of the class in this package.
        arguments: of its constructor; `backbone` first.
        figures: as `FIGURES`; None where none was published.
        epochs: on MS MARCO; None for models that are not trained.
        note: where our model differs from the measured one.
    """

    row: str
    model: str
    arguments: Mapping[str, Any]
    figures: tuple[float | None, ...]
    epochs: int | None = 1
    note: str = ""

    def __call__(self, *args: Any, **changes: Any) -> Any:
        """The transformer.

        Args:
            *args: for `RankGPT`: the language model.
            **changes: other constructor arguments, or other values.
        """
        arguments = {**self.arguments, **changes}
        if self.epochs not in (None, 1) and "training" not in arguments:
            training = importlib.import_module(".training", __package__)
            arguments["training"] = training.TrainingArgs(epochs=self.epochs)
        return getattr(importlib.import_module(__package__), self.model)(*args, **arguments)


@dataclass(frozen=True, repr=False)
class Presets(Mapping[str, Preset]):
    """Presets by name."""

    _by_name: dict[str, Preset] = field(default_factory=dict)

    def __getitem__(self, name: str) -> Preset:
        if name not in self._by_name:
            raise KeyError(f"no preset {name!r}; known are {', '.join(self._by_name)}")
        return self._by_name[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._by_name)

    def __len__(self) -> int:
        return len(self._by_name)

    def __repr__(self) -> str:
        return f"Presets({', '.join(self._by_name)})"

    def table(self) -> pd.DataFrame:
        """One row per preset: `name`, the paper's `row`, `model`, `backbone`, the published figures and `note`."""
        rows = [
            {
                "name": name,
                "row": preset.row,
                "model": preset.model,
                "backbone": preset.arguments.get("backbone"),
                **dict(zip(FIGURES, preset.figures, strict=True)),
                "note": preset.note,
            }
            for name, preset in self._by_name.items()
        ]
        return pd.DataFrame(rows)


_ELECTRA_HEAD = "starts from the checkpoint's own head, which the paper discards"
_COMMON = {"max_doc_len": WHOLE, "pad_query": True}
_FIRST = {"max_doc_len": FIRST, "pad_query": True}
_SLIDING = {**_COMMON, "window_size": 150, "stride": 100}
_PARADE = {**_COMMON, "window_size": 150, "stride": 75}
# Boytsov et al. 2025 measured an attention with weights per window and feature.
_ATTN = {**_PARADE, "aggregation": "attn", "attention": "elementwise"}
_RAND = {**_COMMON, "window_size": 150, "stride": 100, "aggregation": "transformer", "layers": 2}
_MINILM = "cross-encoder/ms-marco-MiniLM-L6-v2"
_E5 = {"backbone": E5, "pooling": "mean", "query_prefix": "query: ", "passage_prefix": "passage: "}
_E5_NOTE = "with the prefixes that the model was trained with, which the paper's script leaves out"


presets = Presets(
    {
        "firstp-bert": Preset(
            "FirstP (BERT)", "FirstP", {"backbone": BERT, **_FIRST}, (0.394, 0.632, 0.475, 0.527, 0.016, 0.090)
        ),
        "firstp-longformer": Preset(
            "FirstP (Longformer)",
            "LongP",
            {"backbone": LONGFORMER, **_FIRST},
            (0.404, 0.643, 0.483, 0.540, 0.017, 0.091),
        ),
        "firstp-electra": Preset(
            "FirstP (ELECTRA)",
            "FirstP",
            {"backbone": ELECTRA, **_FIRST},
            (0.417, 0.662, 0.492, 0.552, 0.019, 0.089),
            note=_ELECTRA_HEAD,
        ),
        "firstp-deberta": Preset(
            "FirstP (DEBERTA)", "FirstP", {"backbone": DEBERTA, **_FIRST}, (0.415, 0.672, 0.534, 0.596, None, None)
        ),
        "firstp-bigbird": Preset(
            "FirstP (Big-Bird)", "LongP", {"backbone": BIGBIRD, **_FIRST}, (0.408, 0.656, 0.507, 0.560, 0.021, 0.089)
        ),
        "firstp-jina": Preset(
            "FirstP (JINA)",
            "LongP",
            {"backbone": JINA, "max_doc_len": FIRST, "pooling": "mean"},
            (0.422, 0.654, 0.488, 0.532, 0.018, 0.088),
            epochs=2,
        ),
        "firstp-mosaic": Preset(
            "FirstP (MOSAIC)",
            "LongP",
            {"backbone": MOSAIC, "max_doc_len": FIRST, "pooling": "cls"},
            (0.423, 0.643, 0.453, 0.538, 0.018, 0.089),
            epochs=2,
        ),
        "firstp-tinyllama": Preset(
            "FirstP (TinyLLAMA)",
            "LongP",
            {"backbone": TINYLLAMA, "max_doc_len": FIRST, "pooling": "mean"},
            (0.395, 0.615, 0.431, 0.473, 0.020, 0.079),
        ),
        "firstp-e5-4k": Preset(
            "FirstP (E5-4K) zero-shot",
            "BiEncoder",
            {**_E5, "aggregation": "first", "window_size": FIRST, "max_doc_len": FIRST},
            (0.380, 0.641, 0.438, 0.429, 0.015, None),
            epochs=None,
            note=_E5_NOTE,
        ),
        "firstp-rankgpt": Preset(
            "FirstP RankGPT (GPT-4o-mini)",
            "RankGPT",
            {"max_doc_tokens": 512},
            (None, 0.708, None, 0.562, None, None),
            epochs=None,
        ),
        "avgp": Preset(
            "AvgP",
            "AvgP",
            {"backbone": BERT, **_COMMON, "window_size": FIRST},
            (0.389, 0.642, 0.478, 0.531, 0.154, 0.365),
        ),
        "maxp": Preset("MaxP", "MaxP", {"backbone": BERT, **_SLIDING}, (0.392, 0.644, 0.488, 0.544, 0.297, 0.328)),
        "maxp-electra": Preset(
            "MaxP (ELECTRA)",
            "MaxP",
            {"backbone": ELECTRA, **_SLIDING},
            (0.414, 0.659, 0.502, 0.563, 0.328, 0.349),
            note=_ELECTRA_HEAD,
        ),
        "maxp-deberta": Preset(
            "MaxP (DEBERTA)", "MaxP", {"backbone": DEBERTA, **_SLIDING}, (0.402, 0.671, 0.535, 0.609, 0.298, 0.332)
        ),
        "sump": Preset("SumP", "SumP", {"backbone": BERT, **_SLIDING}, (0.390, 0.639, 0.486, 0.538, 0.211, 0.327)),
        "cedr-drmm": Preset(
            "CEDR-DRMM",
            "CEDR",
            {"backbone": BERT, **_COMMON, "head": "drmm", "window_size": FIRST},
            (0.385, 0.629, 0.466, 0.533, 0.157, 0.372),
        ),
        "cedr-knrm": Preset(
            "CEDR-KNRM",
            "CEDR",
            {"backbone": BERT, **_COMMON, "head": "knrm", "window_size": FIRST},
            (0.379, 0.630, 0.483, 0.535, 0.055, 0.382),
        ),
        "cedr-pacrr": Preset(
            "CEDR-PACRR",
            "CEDR",
            {"backbone": BERT, **_COMMON, "head": "pacrr", "window_size": FIRST},
            (0.395, 0.643, 0.496, 0.549, 0.209, 0.393),
        ),
        "neural-model1": Preset(
            "Neural Model1",
            "NeuralModel1",
            {"backbone": BERT, **_COMMON, "window_size": FIRST},
            (0.398, 0.650, 0.484, 0.537, 0.085, 0.396),
        ),
        "parade-attn": Preset(
            "PARADE Attn", "PARADE", {"backbone": BERT, **_ATTN}, (0.416, 0.652, 0.503, 0.556, 0.300, 0.337)
        ),
        "parade-attn-electra": Preset(
            "PARADE Attn (ELECTRA)",
            "PARADE",
            {"backbone": ELECTRA, **_ATTN},
            (0.431, 0.680, 0.523, 0.581, 0.338, 0.354),
            note=_ELECTRA_HEAD,
        ),
        "parade-attn-deberta": Preset(
            "PARADE Attn (DEBERTA)",
            "PARADE",
            {"backbone": DEBERTA, **_ATTN},
            (0.422, 0.688, 0.549, 0.615, 0.307, 0.343),
        ),
        "parade-avg": Preset(
            "PARADE Avg",
            "PARADE",
            {"backbone": BERT, **_PARADE, "aggregation": "avg"},
            (0.392, 0.646, 0.483, 0.534, 0.274, 0.322),
        ),
        "parade-max": Preset(
            "PARADE Max",
            "PARADE",
            {"backbone": BERT, **_PARADE, "aggregation": "max"},
            (0.405, 0.655, 0.489, 0.548, 0.291, 0.330),
        ),
        "parade-rand-l2": Preset(
            "PARADE Transf-RAND-L2",
            "PARADE",
            {"backbone": BERT, **_RAND},
            (0.419, 0.655, 0.488, 0.548, 0.243, 0.419),
            epochs=2,
        ),
        "parade-rand-l2-electra": Preset(
            "PARADE Transf-RAND-L2 (ELECTRA)",
            "PARADE",
            {"backbone": ELECTRA, **_RAND},
            (0.433, 0.670, 0.523, 0.574, 0.229, 0.432),
            epochs=2,
            note=_ELECTRA_HEAD,
        ),
        "parade-pretr-l6": Preset(
            "PARADE Transf-PRETR-L6",
            "PARADE",
            {"backbone": BERT, **_PARADE, "aggregation": "transformer", "aggregator": _MINILM},
            (0.402, 0.643, 0.494, 0.554, 0.267, 0.413),
        ),
        "parade-lateir-l6": Preset(
            "PARADE Transf-PRETR-LATEIR-L6",
            "LateIR",
            {"backbone": BERT, "max_doc_len": WHOLE, "window_size": 150, "stride": 75, "aggregator": _MINILM},
            (0.398, 0.626, 0.450, 0.501, 0.244, 0.358),
            note="not in Table 1: Tables 4, 9 and 10; trains for three epochs by itself",
        ),
        "longp-longformer": Preset(
            "LongP (Longformer)",
            "LongP",
            {"backbone": LONGFORMER, **_COMMON},
            (0.412, 0.668, 0.500, 0.568, 0.233, 0.399),
        ),
        "longp-bigbird": Preset(
            "LongP (Big-Bird)", "LongP", {"backbone": BIGBIRD, **_COMMON}, (0.397, 0.651, 0.452, 0.477, 0.126, 0.401)
        ),
        "longp-jina": Preset(
            "LongP (JINA)",
            "LongP",
            {"backbone": JINA, "max_doc_len": WHOLE, "pooling": "mean"},
            (0.416, 0.665, 0.503, 0.558, 0.069, 0.372),
            epochs=2,
        ),
        "longp-mosaic": Preset(
            "LongP (MOSAIC)",
            "LongP",
            {"backbone": MOSAIC, "max_doc_len": WHOLE, "pooling": "cls"},
            (0.421, 0.664, 0.456, 0.570, 0.120, 0.397),
            epochs=2,
        ),
        "longp-tinyllama": Preset(
            "LongP (TinyLLAMA)",
            "LongP",
            {"backbone": TINYLLAMA, "max_doc_len": WHOLE, "pooling": "mean"},
            (0.402, 0.608, 0.452, 0.505, 0.078, 0.397),
        ),
        "longp-e5-4k": Preset(
            "LongP (E5-4K) zero-shot",
            "BiEncoder",
            {**_E5, "aggregation": "first", "window_size": WHOLE, "max_doc_len": WHOLE},
            (0.353, 0.649, 0.439, 0.434, 0.057, None),
            epochs=None,
            note=_E5_NOTE,
        ),
        "longp-rankgpt": Preset(
            "LongP RankGPT (GPT-4o-mini)",
            "RankGPT",
            {"max_doc_tokens": None},
            (None, 0.706, None, 0.562, 0.043, None),
            epochs=None,
        ),
    }
)
"""The rows of Table 1, and LateIR's, by name."""
