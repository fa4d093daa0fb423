"""Listwise reranking in one pass of an encoder that sees all candidates of a query."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Any, ClassVar, NoReturn

import numpy as np
import pandas as pd
import pyterrier as pt

from ..common.arguments import arguments_of, check_checkpoint, check_given, check_positive
from ..common.coverage import Coverage
from ..common.documents import is_blank
from ..common.frames import TextField, field_names, strings, texts_of, validated, with_scores
from ..common.notices import Told, is_news, warn, warn_of_cuts, warn_of_empty
from ..common.presentation import WithBackbone, described
from ..common.progress import counting
from ..common.registry import own_code
from ..modelling.apart import ExperimentalWarning
from ..modelling.devices import check_device, check_dtype
from ..modelling.fingerprint import fingerprint
from ..modelling.one_pass import Limits, ListRead, OnePassEncoder, load_one_pass_encoder


@dataclass(eq=False, repr=False)
class ListwiseEncoder(WithBackbone, pt.Transformer):
    """Experimental: all candidates of a query in one sequence, a vector of each, by cosine with that of the query.

    Source: jina-reranker-v3 (Wang, Li & Xiao 2025, arXiv 2509.25085) and the modelling code published with it, whose
    prompt, limits and combination of blocks these are. Its published results were not repeated here. The
    code takes up to 125 documents at a time, the paper speaks of 64. Unlike that code, a block is what fits into
    `max_block_tokens` with the words around documents, which the code does not count.

    A score depends on the other candidates by design, on their order, and on the block that a document is in;
    `check_invariance` shows how much. Documents are therefore taken in one order, whatever that of the rows: by falling
    `score`, then rising `rank`, then `docno` and text. Rows of a query with the same docno and text are one document.

    Reads a frame with `qid, query, docno` and the text column(s), and returns the same rows, columns and index with new
    `score` (a cosine) and `rank`. Weights load at the first `transform`, in float32.

    Args:
        backbone: a checkpoint with the special tokens `<|embed_token|>` and `<|rerank_token|>` and a projector: a model
            on the Hugging Face hub or a folder. Its own code is not run.
        max_doc_len: read at most so many tokens of a document; None for as many as fit into a block.
        max_query_len: read at most so many tokens of a query.
        block_size: most documents in a sequence.
        max_block_tokens: most tokens in a sequence; None for the longest input of the backbone, which is 131,072 tokens
            for jina-reranker-v3.
        text_field: the column with the text, or a tuple of columns that are joined by a space.
        text_loader: supplies the text where the column is absent.
        device: `"cuda"`, `"cuda:1"`, `"cpu"`, ...; None for a GPU if there is one.
        dtype: `"float32"`, `"bfloat16"` or `"float16"`; None for float32 on a CPU, and for bfloat16 on a GPU that has
            it natively.
        verbose: show a progress bar.

    Attributes:
        coverage: how much of the text the last `transform` read; None before.

    Raises:
        ValueError: for arguments that cannot work.
    """

    papers: ClassVar[tuple[str, ...]] = ("wang-2025-jina",)

    backbone: str | Path = "jinaai/jina-reranker-v3"
    _: KW_ONLY
    max_doc_len: int | None = 2048
    max_query_len: int = 512
    block_size: int = 125
    max_block_tokens: int | None = None
    text_field: TextField = "text"
    text_loader: Any = None
    device: str | None = None
    dtype: str | None = None
    verbose: bool = False

    depends_on_candidates: ClassVar[bool] = True
    """By design: `check_invariance` shows how much instead of judging it."""

    def __post_init__(self) -> None:
        self.coverage: Coverage | None = None
        self.warned: Told = set()
        self._loaded: tuple[str, OnePassEncoder] | None = None
        self.check()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_loaded": None}

    def check(self) -> None:
        """Raises ValueError for arguments that can never work, without loading anything."""
        check_checkpoint(backbone=self.backbone)
        field_names(self.text_field)
        check_dtype(self.dtype)
        check_device(self.device)
        check_given(block_size=self.block_size, max_query_len=self.max_query_len)
        check_positive(max_doc_len=self.max_doc_len, max_block_tokens=self.max_block_tokens)

    def describe(self) -> dict[str, Any]:
        """Who this transformer is, JSON-able: its weights, which are loaded for it, and what is read."""
        not_read = ("backbone", "text_loader", "device", "verbose")
        asked = {name: described(value) for name, value in arguments_of(self).items() if name not in not_read}
        return {"weights": fingerprint(self.load_encoder().state_dict()), "arguments": asked, **own_code(self)}

    def fit(self, *frames: Any) -> NoReturn:
        """Refuses.

        Raises:
            TypeError: always.
        """
        raise TypeError(
            f"{self!r} cannot be trained here: its losses compare all documents of a list. Train PARADE, MaxP or "
            f"LongP, or give backbone= a checkpoint that was trained elsewhere"
        )

    def transform(self, inp: pd.DataFrame) -> pd.DataFrame:
        """Scores every row.

        Args:
            inp: `qid, query, docno` and the text column(s); any other columns are kept.

        Returns:
            A new frame: same rows, order, index and columns, with `score` and `rank`.

        Raises:
            pt.validate.InputValidationError: if a column is missing.
            ValueError: for a checkpoint that is none of this form, a qid with several queries, or a prompt without room
                for a document.
            FloatingPointError: if a score is not finite.
        """
        fields = validated(inp, self.text_field, self.text_loader, self)
        self.check()
        if not len(inp):
            return with_scores(inp, [])
        if is_news(self.warned, ExperimentalWarning):
            warn("ListwiseEncoder is experimental: no published result was repeated with it", ExperimentalWarning)
        queries, texts = strings(inp["query"], "query"), texts_of(inp, fields, self.text_loader)
        encoder = self.load_encoder()
        coverage = Coverage(dtype=encoder.use(self.device, self.dtype))
        limits = Limits(self.max_doc_len, self.max_query_len, self.block_size, self.max_block_tokens)
        scores = np.zeros(len(inp))
        lists = _lists(inp, queries, texts)
        least: dict[tuple[str, str], Any] = {}
        with counting(type(self).__name__, "query", len(lists), shown=self.verbose) as done:
            for query, rows_of in lists:
                read = encoder.read(query, [text for _, text in rows_of], limits)
                found, computed = encoder.score(read)
                for score, rows in zip(found, rows_of.values(), strict=True):
                    scores[rows] = score
                _note(coverage, read, computed)
                for (_, text), reading in zip(rows_of, read.readings, strict=True):
                    so_far = least.get((query, text), reading)
                    least[query, text] = min(reading, so_far, key=lambda each: each[0].tokens_read)
                done()
        for reading, left_out in least.values():
            coverage.add(reading, left_out)
        self.coverage = coverage
        self._warn_of_losses(coverage)
        warn_of_empty(self, coverage, inp, map(is_blank, texts))
        return with_scores(inp, scores)

    def load_encoder(self) -> OnePassEncoder:
        """The model in memory, loaded if need be."""
        if self._loaded is None or self._loaded[0] != str(self.backbone):
            self._loaded = str(self.backbone), load_one_pass_encoder(str(self.backbone))
        return self._loaded[1]

    def _warn_of_losses(self, coverage: Coverage) -> None:
        of_queries = f"max_query_len={self.max_query_len}"
        of_documents = f"max_doc_len={self.max_doc_len}" if coverage.tokens_beyond else ""
        if coverage.tokens_lost > coverage.tokens_beyond:
            of_block = f"max_block_tokens={self.max_block_tokens or self.load_encoder().longest}"
            of_documents = " and ".join(filter(None, [of_documents, of_block]))
        losses = coverage.losses(of_documents, of_queries)
        if losses:
            causes = [of_documents] * bool(of_documents) + [of_queries] * bool(coverage.queries_cut)
            warn_of_cuts(self, self.warned, causes, f" did not read {losses}")


def _lists(
    inp: pd.DataFrame, queries: list[str], texts: list[str]
) -> list[tuple[str, dict[tuple[str, str], list[int]]]]:
    """For each query its text, and the rows of each docno and text, in an order that is not that of the rows."""
    keys = [name for name in ("score", "rank") if name in inp.columns]
    table = inp[keys].apply(pd.to_numeric).assign(docno=inp["docno"].astype(str), text_=texts).reset_index(drop=True)
    order = table.sort_values(
        [*keys, "docno", "text_"], ascending=[*(key == "rank" for key in keys), True, True], kind="stable"
    ).index
    qids = inp["qid"].tolist()
    lists: dict[Any, tuple[str, dict[tuple[str, str], list[int]]]] = {}
    for qid, query in zip(qids, queries, strict=True):
        if lists.setdefault(qid, (query, {}))[0] != query:
            raise ValueError(f"qid {qid!r} has several texts in column 'query'; a list is ranked for one")
    for row in order.tolist():
        lists[qids[row]][1].setdefault((table["docno"][row], texts[row]), []).append(row)
    return list(lists.values())


def _note(coverage: Coverage, read: ListRead, computed: int) -> None:
    """Counts a query, and what was computed for it."""
    kept, whole = read.query_tokens
    coverage.add_queries([whole], kept)
    coverage.tokens_encoded += computed
    coverage.tokens_computed += computed
