"""Scorers put together by hand."""

from __future__ import annotations

import numpy as np

from pyterrier_longdoc.common.coverage import Explanation
from pyterrier_longdoc.modelling.backbones.load import Backbone
from pyterrier_longdoc.modelling.encoder import WindowEncoder
from pyterrier_longdoc.modelling.scorer import LongDocScorer
from pyterrier_longdoc.modelling.settings import Settings
from pyterrier_longdoc.modelling.windows import Windows


def scorer_of(backbone: Backbone, windows: Windows, head, *, encoder=WindowEncoder, **settings) -> LongDocScorer:
    """A scorer in evaluation mode."""
    return LongDocScorer(encoder(backbone), backbone.tokenizer, head, Settings(windows, **settings)).eval()


def explained(scorer: LongDocScorer, queries, texts) -> tuple[np.ndarray, list[Explanation]]:
    """Scores, and how windows contributed."""
    scored = scorer.score(queries, texts, explain=True)
    return scored.scores, scored.explanations
