"""The papers' protocols by name.

All settings are those of Boytsov et al. 2025: topics, folds and corpora of section 3.1, seeds and measures of 3.2,
candidates, depth, recipe and lengths of appendix A.1, significance levels of its tables.
"""

from __future__ import annotations

import pandas as pd

from .named import Named
from .protocol import Protocol
from .protocol_data import TopicSet


class Protocols(Named[Protocol]):
    """The protocols by name; `table()` shows them all.

    Example:
        >>> protocols["robust04-title"].recipe, protocols["robust04-title"].start
        ('robust04', 'msmarco-document')
    """

    kind = "protocol"

    def table(self) -> pd.DataFrame:
        """One row for each protocol, a column for each setting."""
        rows = [
            {
                "name": name,
                "train": protocol.train.dataset if protocol.train else f"{len(protocol.folds)} folds",
                "test": ", ".join(part.dataset for part in protocol.test),
                "depth": protocol.depth,
                "recipe": protocol.recipe,
                "start": protocol.start,
                "metrics": ", ".join(protocol.metrics),
                "alpha": protocol.alpha,
                "note": protocol.note,
            }
            for name, protocol in self._entries.items()
        ]
        return pd.DataFrame(rows)


_MSMARCO = TopicSet("irds:msmarco-document/train")
_MSMARCO_FIELDS = ("url", "title", "body")
_DL = {
    2019: TopicSet("irds:msmarco-document/trec-dl-2019/judged"),
    2020: TopicSet("irds:msmarco-document/trec-dl-2020/judged"),
    2021: TopicSet("irds:msmarco-document-v2/trec-dl-2021/judged"),
}
_ROBUST04 = "irds:disks45/nocr/trec-robust-2004"
_FAR = "far-relevant"


def _deep_learning(*years: int) -> Protocol:
    return Protocol(
        test=tuple(_DL[year] for year in years),
        fields=_MSMARCO_FIELDS,
        metrics=("nDCG@10", "P@10", "AP"),
        train=_MSMARCO,
        published="DL nDCG@10" if len(years) == len(_DL) else None,
        note="trained on MS MARCO v1, also for 2021; the paper's candidates are ANCE's, for 2021 mixed with BM25",
    )


def _robust04(part: str) -> Protocol:
    return Protocol(
        test=(TopicSet(_ROBUST04, part),),
        fields=("title", "body"),
        metrics=("nDCG@20", "P@20", "AP"),
        folds=tuple(f"{_ROBUST04}/fold{number}" for number in range(1, 6)),
        start="msmarco-document",
        recipe="robust04",
        depth=1000,
        published=f"{part} nDCG@20",
        note="negatives come from BM25's best 1000; the depth of reranking is not stated",
    )


protocols = Protocols(
    {
        "msmarco-document": Protocol(
            test=(TopicSet("irds:msmarco-document/dev"),),
            fields=_MSMARCO_FIELDS,
            metrics=("RR@100",),
            train=_MSMARCO,
            alpha=0.01,
            published="dev RR",
            note="the paper's candidates are BM25's on documents expanded by doc2query",
        ),
        "trec-dl": _deep_learning(2019, 2020, 2021),
        "trec-dl-2019": _deep_learning(2019),
        "trec-dl-2020": _deep_learning(2020),
        "trec-dl-2021": _deep_learning(2021),
        "robust04-title": _robust04("title"),
        "robust04-description": _robust04("description"),
        "far-relevant": Protocol(
            test=(TopicSet(_FAR, "dev_official_sample1K", "dev_official_sample1K"),),
            fields=("text",),
            metrics=("RR@100",),
            train=TopicSet(_FAR, "bitext", "bitext"),
            start="msmarco-document",
            max_train_queries=50_000,
            alpha=0.01,
            published="far RR, fine-tuned",
            note="give the data as datasets={'far-relevant': ld.read_far_relevant(folder)}; candidates are BM25's",
        ),
    }
)
"""MS MARCO documents v1 (dev set), TREC DL 2019 to 2021 each and pooled, Robust04 by title and by description with the
five folds of Huston & Croft 2014 (from ir_datasets), and MS MARCO FarRelevant."""
