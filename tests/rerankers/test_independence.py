"""A score depends on nothing but its query and document: neither on other rows and their order nor on padding, batches
or the implementation of attention. One test goes over all systems, one over backbones and ways of reading.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

import pyterrier_longdoc as ld
from pyterrier_longdoc.modelling.backbones.architectures import EqualLengthRules
from pyterrier_longdoc.modelling.backbones.families import FAMILIES
from pyterrier_longdoc.modelling.layout import LAYOUTS

from ..support import tiny, tiny_answers, tiny_long
from ..support.invariance import assert_independent
from ..support.sentence_transformers import LATE_INTERACTION
from ..support.systems import CONTRACT, QUIET, SELECTORS, SYSTEMS, longp, make, scores, slow_but

pytestmark = QUIET

FRAME = tiny.longer_results()[2:11].assign(title="a red fish")
TITLED = {"text_field": ("title", "text"), "repeat": "title", "repeat_tokens": 10}
SHORT_AND_EMPTY = pd.concat([tiny_long.texts().assign(query=""), tiny_long.texts()], ignore_index=True)


@pytest.mark.parametrize("name", slow_but(CONTRACT, SYSTEMS), indirect=True)
def test_scores_of_every_system_only_depend_on_query_and_document(loaded):
    assert_independent(loaded, FRAME, tolerance=1e-5)
    twice = scores(loaded, pd.concat([FRAME, FRAME]))
    np.testing.assert_array_equal(*np.split(twice, 2))  # equal rows have equal scores


def on(checkpoint: Callable[..., str], *named: str, **sizes: Any) -> Callable[..., Callable[[Path], Any]]:
    """A maker of makers of systems over a checkpoint."""
    return lambda name, **arguments: lambda folder: make(name, checkpoint(folder, *named, **sizes), **arguments)


def cased_roberta(folder: Path) -> str:
    return tiny.cased(tiny.checkpoint(folder, "roberta"))


def mono_t5(folder: Path) -> str:
    return tiny_answers.checkpoint(folder, "t5", tiny_answers.tokenizer(end=True))[1]


ON_BERT = on(lambda folder: tiny.encoder())
ON_DECODER = on(tiny_long.decoder, "qwen3")
OTHER_LONG = [kind for kind in tiny_long.LONG if not kind.endswith("cross-encoder")]
LEAKY = [name for name, family in FAMILIES.items() if family.rules is EqualLengthRules]
KINDS: dict[str, Callable[[Path], Any]] = {
    **{
        kind: lambda folder, kind=kind: longp(kind, tiny_long.make(kind, folder))
        for kind in [*OTHER_LONG, "modernbert cross-encoder"]
    },
    "longformer, sentence marks": lambda folder: ld.LongP(
        tiny_long.encoder(folder, "longformer", labels=1),
        global_attention="sentences",
        attention_window=8,
        max_query_len=8,
    ),
    **{family: on(tiny.checkpoint, family, labels=None)("MaxP") for family in LEAKY},
    "t5": on(mono_t5)("MaxP", template="monot5", window_size=12, stride=8),
    "BiEncoder on qwen3": ON_DECODER("BiEncoder-max"),
    "LateIR on qwen3": ON_DECODER("LateIR", aggregator=None),
    "LongP on qwen3, mean": ON_DECODER("LongP", template="{query}{text}", pooling="mean"),
    **{f"FirstP, {layout}": on(cased_roberta)("FirstP", layout=layout, max_query_len=4) for layout in LAYOUTS},
    "LateIR, padded": on(cased_roberta)("LateIR", layout="padded", max_query_len=4),
    **{f"{name}, titles": ON_BERT(name, **TITLED) for name in ("MaxP", "CEDR-knrm")},
    **{
        f"MaxSim of {name}": lambda _, name=name: ld.MaxSim(LATE_INTERACTION / name, window_size=30)
        for name in ("st-fixed", "st-min", "pylate-modernbert", "colbert")
    },
    **{f"PARADE, {name}": lambda _, name=name: make("PARADE-attn", preselect=SELECTORS[name](2)) for name in SELECTORS},
}
FAST = (
    *("longformer, sentence marks", "fnet", "t5", "MaxP, titles"),
    *(f"FirstP, {layout}" for layout in LAYOUTS),
    *("MaxSim of st-fixed", *(f"PARADE, {name}" for name in SELECTORS)),
)


@pytest.mark.parametrize("kind", slow_but(FAST, KINDS))
def test_scores_of_every_backbone_and_reading_only_depend_on_query_and_document(kind, tmp_path):
    model = KINDS[kind](tmp_path / "checkpoint")
    if kind in tiny_long.LONG or "qwen3" in kind or kind == "t5":
        assert_independent(model, SHORT_AND_EMPTY, tolerance=5e-5)
    else:
        assert_independent(model, FRAME, tolerance=1e-5)
    if kind in tiny_long.LONG:
        expected, model.dtype = scores(model, SHORT_AND_EMPTY), "bfloat16"
        np.testing.assert_allclose(scores(model, SHORT_AND_EMPTY), expected, rtol=0.1, atol=0.1)
