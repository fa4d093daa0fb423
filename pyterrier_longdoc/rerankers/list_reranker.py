"""List-wise reranking by an encoder: the documents of a query are read together."""

# Without `from __future__ import annotations`: modules of subclasses need the types of the fields, too.
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from math import inf
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pandas as pd

from ..common.arguments import Without, argument
from ..common.frames import Question, as_strings, first_stage_order, validated
from ..common.warnings import warn_once
from ..modelling.backbones.backbone import Backbone
from ..modelling.encoder import WindowEncoder
from ..modelling.inputs import Settings
from ..modelling.list_encoder import ListEncoder, ListQuery, ListSettings, load_list_backbone
from ..modelling.weights import HeadSpec
from ..modelling.windows import SELECTIONS, SentenceWindows, WholeText, Windows
from ..training import TrainingArgs
from .cross_encoder import CrossEncoder

DEFAULT_LIST_ENCODER = "jinaai/jina-reranker-v3"
"""A public list-wise encoder (0.6B parameters, contexts of 131,072 tokens); its licence is CC BY-NC 4.0."""


@dataclass(eq=False, repr=False)
class ListReranker(CrossEncoder):
    """Reads a query and its candidates in one context of a language model, as jina-reranker-v3 (Wang et al. 2025).

    `score = cos(q, d)`, where `q` and `d` are projected states of the tokens that end the query and the document in
    `query, instruction, documents, query`. One pass scores up to `block_size` documents, and each document also sees
    the query and the documents before it. So a score depends on the other candidates and on their order, which is that
    of the first stage: by descending `score`, ascending `rank` and `docno` (as text: `"d10"` before `"d2"`). Without
    the columns `score` and `rank`, `docno` alone orders them. The order of rows counts only where all of these are
    equal. Rows of a query with equal texts are one document.

    A query's candidates are only divided by the published rule: a context is full when it has `block_size` documents,
    or when the maximum input length of the backbone, minus the tokens of its documents and twice those of the query, is
    at most `max_doc_len`. This does not count the prompt, the marks of documents and the instruction. If a context
    would exceed the maximum with them, it ends earlier, with as many documents as fit; a document that does not even
    fit alone is an error. Documents are compared with the mean of the query's vectors in all contexts, weighted by
    `(1 + s) / 2` for the best cosine s in each. Keep all candidates of a query in one frame, as `ld.distributed` and
    `ld.rerank_to_disk` do. Batches of rows, such as those of `pt.apply.generic(..., batch_size=...)`, may cut a query
    apart, which a warning reports if the ranks show it. Cutoffs are possible before (`bm25 % 100`) and after.

    The weights of jina-reranker-v3 are licensed under CC BY-NC 4.0, which excludes commercial use.

    Args:
        backbone: `"jinaai/jina-reranker-v3"` or a checkpoint of the same kind, without its remote code; or any other
            language model that reads from left to right (Qwen3, Llama, ...), which gets two marker tokens and a random
            projection, and must be trained.
        block_size: the maximum number of documents in a context. Lower it if memory runs out.
        instruction: an instruction in the prompt; empty for none.
        max_doc_len: the maximum number of tokens of a document in a context. Without `preselect`, this is its
            beginning; with `preselect`, its selected windows, joined in document order with `[...]` for omitted text.
        windows: the windows from which `preselect` selects; refused without it. Default: as many whole sentences as fit
            into 63 tokens.
        max_query_len: truncates queries to this many tokens.
        temperature: the cosines are divided by it in `fit`; 0.05 in the second stage of the authors' training.
        batch_size: the maximum number of contexts in a batch.
        training: the recipe for `fit`; None for lists of 16 candidates, `listwise_cross_entropy`, and learning rates of
            1e-5, and 1e-4 for the projection. The candidates of a list are in a random order, in the same context.

    Example:
        `bm25 % 100 >> dataset.text_loader() >> ld.ListReranker(preselect=ld.BM25Windows(8), max_doc_len=512)`
    """

    backbone: str | Path = argument(DEFAULT_LIST_ENCODER, role="checkpoint")
    _: KW_ONLY
    block_size: int = argument(125, role="input", at_least=1)
    max_doc_len: int = argument(2048, role="windows", at_least=1)
    max_query_len: int = argument(512, role="input", at_least=1)
    temperature: float = argument(0.05, role="head", above=0, below=inf)
    windows: Windows | None = argument(None, role="windows", needs="preselect")
    max_windows: int | None = argument(None, role="windows", at_least=1, needs="preselect")
    selection: str = argument("first", role="windows", choices=SELECTIONS, needs="preselect")
    layout: ClassVar[Any] = Without("pair")  # type: ignore[misc]
    template: ClassVar[Any] = Without()  # type: ignore[misc]
    pooling: ClassVar[Any] = Without()  # type: ignore[misc]
    explain: ClassVar[Any] = Without(False)  # type: ignore[misc]
    score_cache: ClassVar[Any] = Without()  # type: ignore[misc]

    papers: ClassVar[tuple[str, ...]] = ("wang-2025-jina",)
    _trained_hint: ClassVar[str] = f"{DEFAULT_LIST_ENCODER} needs no training"
    encoder_class: ClassVar[type[WindowEncoder]] = ListEncoder
    settings_class: ClassVar[type[Settings]] = ListSettings

    def head_spec(self) -> HeadSpec:
        return "cosine", {"temperature": float(self.temperature)}

    def load_backbone(self) -> Backbone:
        return load_list_backbone(str(self.backbone), seed=self.seed, trust_remote_code=self.trust_remote_code)

    def default_training(self) -> TrainingArgs:
        return TrainingArgs(
            loss="listwise_cross_entropy",
            sampling="listwise",
            negatives=15,
            learning_rates={"encoder.": 1e-5, "encoder.representation.": 1e-4, "": 1e-4},
        )

    def default_windows(self) -> Windows:
        return WholeText() if self.preselect is None else SentenceWindows(max_tokens=63)

    def check(self) -> None:
        super().check()
        if self.training is not None and self.training.sampling == "pointwise":
            raise ValueError("sampling='pointwise' trains on single documents: use sampling='listwise' or 'pairs'")

    def make_settings(self, **others: Any) -> Settings:
        return super().make_settings(
            max_doc_len=self.max_doc_len if self.preselect is None else None,  # windows come from the whole document
            block_size=self.block_size,
            longest_passage=self.max_doc_len,
            **others,
        )

    def transform(self, inp: pd.DataFrame) -> pd.DataFrame:
        """As `CrossEncoder.transform`; ValueError for a qid with several queries or instructions."""
        validated(inp, self.text_field, self.text_loader, self)
        if "rank" in inp.columns and (pd.to_numeric(inp["rank"]).groupby(inp["qid"]).min() > 1).any():
            message = (
                f"{type(self).__name__}: the first candidates of a query are missing. If its rows were cut into "
                f"batches, scores differ from those of the whole list: keep all candidates of a query in one frame."
            )
            warn_once(self, message, UserWarning)
        order = first_stage_order(inp, "docno")
        return super().transform(inp.iloc[order]).iloc[np.argsort(order)]

    def queries(self, frame: pd.DataFrame) -> Sequence[Question]:
        """Return the query of each row with its instruction and qid; ValueError if they differ within a qid."""
        queries, default = super().queries(frame), self.instruction if self.instruction.strip() else ""
        for name in filter(None, ("query", self.instruction_field)):
            several = frame.groupby("qid", sort=False)[name].nunique(dropna=False) > 1
            if several.any():
                raise ValueError(f"qid {several.idxmax()!r} must have the same text in column {name!r} in all rows")
        return [
            ListQuery(query.text, default if query.instruction is None else query.instruction, qid)
            for query, qid in zip(queries, as_strings(frame["qid"]), strict=True)
        ]
