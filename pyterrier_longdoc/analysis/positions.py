"""Where in relevant documents the relevant text begins: how strongly a collection favours the beginnings.

Source: Boytsov et al. 2025 (section 2, C.4, Figures 1, 7 and 8), who locate the passages that are known to be relevant,
or cut documents into chunks and let a judge find the first relevant one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import pyterrier as pt

from ..common.frames import TextField, strings
from ..experiment.perquery import check_columns
from ..experiment.runs import as_strings
from ..modelling.texts import Span, TokenizedText
from ..modelling.windows import CHUNK_TOKENS, SentenceWindows
from .judging import ChunkJob, ChunkJudge, FirstChunk, as_chunk_judge
from .locating import Match, PassageLocator
from .triples import Reader, relevant_pairs, texts_of_corpus

CHUNK = 256
"""Tokens of a chunk in the paper; 128 for BEIR."""

MAX_CHUNKS = 36

NOT_IN_CORPUS = "document not in corpus"
EMPTY = "document empty"
NO_PASSAGE = "no passage"
TOO_SHORT = "passage too short"
NOT_FOUND = "passage not found"
NO_CHUNK = "no relevant chunk"
NO_CHUNK_READ = "no relevant chunk among those judged"
"""Why a relevant document has no position: the values of the column `reason`."""

_PASSAGE_COLUMNS = {"passage": "Int64", "similarity": "float64", "method": "str"}
_CHUNK_COLUMNS = {"grade": "float64", "chunk": "Int64", "chunks": "Int64", "judged": "Int64", "unjudged": "Int64"}
_INTEGERS = ("first_token", "end_token", "length", "start", "end")


@dataclass(frozen=True, eq=False)
class RelevantPositions:
    """Where the first relevant passage of each relevant document begins.

    Attributes:
        frame: one row for each relevant document of a query, in the order of the qrels, with

            - `qid`, `docno`, `label`;
            - `first_token`: number of tokens before the relevant passage or chunk; `end_token`: before its end;
            - `length`: of the document, in tokens;
            - `start`, `end`: the passage's characters in the text;
            - `reason`: why there is no position (missing values, `pd.NA`), else empty;
            - of located passages: `passage` (row of the passages frame), `similarity` and `method` (see `Match`);
            - of judged chunks: `grade` of the relevant chunk, its number `chunk`, the number of `chunks` of the
              document, how many of them were `judged`, and how many of those had no readable grade (`unjudged`).
    """

    frame: pd.DataFrame

    def __repr__(self) -> str:
        return f"RelevantPositions({len(self.frame)} documents, {self.unmatched:.1%} unmatched)"

    def _repr_html_(self) -> str:
        return self.summary().to_frame("").to_html()

    @property
    def matched(self) -> pd.DataFrame:
        """The rows with a position, with plain integers."""
        rows = self.frame[self.frame["first_token"].notna()]
        return rows.astype(dict.fromkeys(_INTEGERS, "int64"))

    @property
    def unmatched(self) -> float:
        """Share of the relevant documents in which no relevant passage was found; NaN if there are none."""
        return float(self.frame["first_token"].isna().mean()) if len(self.frame) else float("nan")

    def summary(self, *, first: int = CHUNK_TOKENS) -> pd.Series:
        """Statistics of the positions.

        Args:
            first: a number of tokens from the start of the document; 477 is what a BERT reads besides a query.

        Returns:
            `queries` and `documents`; the share `unmatched` of documents and the share `queries matched` of queries
            with at least one position (about 0.85 for MS MARCO in the paper); `median`, `mean` and `p90` of first
            relevant position and of document length, in tokens; the shares of matched passages that `start` and `end`
            within the `first` tokens, and the share that would start there if all places in a document were equally
            likely; and the mean relative position, 0 at the start and 1 at the end of the document.
        """
        rows, lengths = self.matched, self.frame["length"].dropna().to_numpy(dtype="float64")
        starts, ends, own = (rows[name].to_numpy() for name in ("first_token", "end_token", "length"))
        room = own - (ends - starts)
        with np.errstate(invalid="ignore"):
            relative = np.where(room > 0, starts / np.maximum(room, 1), 0.0)
        return pd.Series(
            {
                "queries": self.frame["qid"].nunique(),
                "documents": len(self.frame),
                "unmatched": self.unmatched,
                "queries matched": rows["qid"].nunique() / max(1, self.frame["qid"].nunique()),
                **{f"position {name}": value for name, value in _spread(starts).items()},
                **{f"length {name}": value for name, value in _spread(lengths).items()},
                f"starts in first {first}": _mean(starts < first),
                f"ends in first {first}": _mean(ends <= first),
                f"starts in first {first} by chance": _mean(np.minimum(1.0, first / (room + 1))),
                "relative position": _mean(relative),
            },
            name="positions",
        )

    def reasons(self) -> pd.Series:
        """How many documents have no position, by reason."""
        return self.frame.loc[self.frame["first_token"].isna(), "reason"].value_counts()

    def plot(self, *, bin_tokens: int = CHUNK, max_tokens: int | None = None, ax: Any = None) -> Any:
        """Draws the distribution of first relevant positions against that of document lengths: the paper's Figure 7.

        Args:
            bin_tokens: width of the bars.
            max_tokens: end of the axis; None for the bar with the 99th percentile of lengths. The last bar counts
                whatever lies beyond, too.
            ax: matplotlib axes to draw on; None makes a figure.

        Returns:
            The axes.

        Raises:
            ValueError: if there is nothing to draw.
            ImportError: without matplotlib.
        """
        from .plots import plot_positions

        return plot_positions(self, bin_tokens=bin_tokens, max_tokens=max_tokens, ax=ax)


def relevant_positions(
    topics: pd.DataFrame,
    qrels: pd.DataFrame,
    corpus: pd.DataFrame | Iterable[Mapping[str, Any]],
    *,
    passages: pd.DataFrame | None = None,
    locator: PassageLocator | None = None,
    judge: Any = None,
    threshold: float | None = None,
    chunk_tokens: int = CHUNK,
    max_chunks: int | None = MAX_CHUNKS,
    tokenizer: Any = None,
    relevant_from: int = 1,
    sample: int | None = None,
    seed: int = 42,
    text_field: TextField = "text",
    verbose: bool = False,
) -> RelevantPositions:
    """Finds the first relevant passage of each relevant document.

    Give either `passages`, to look for the text that is known to be relevant, or a `judge`, to ask it about one chunk
    after the other, from the start of a document to its first relevant chunk. Chunks are disjoint, of whole sentences.

    Args:
        topics: `qid, query`; judgements of other queries do not count. Passages do without `query`.
        qrels: `qid, docno, label`. To look in further documents, such as the top 5 of a retriever with a passage as
            its query, as in the paper, add their rows.
        corpus: `docno` and the text column(s): a frame, or an iterable of dicts, such as a dataset's
            `get_corpus_iter()`, of which only the relevant documents are kept.
        passages: `qid, text`: the relevant passages of each query.
        locator: how passages are found; None for the paper's thresholds.
        judge: a `RelevanceJudge`, of which model, wording, retries, concurrency and rule for failures count; a
            reranker; or a function `(query, chunk) -> number`.
        threshold: a chunk is relevant if its grade, score or number is above. None is 0 for LLMs (in the paper,
            every positive grade is relevant) and functions; a reranker needs one, since scores have no zero.
        chunk_tokens: most tokens of a chunk: 256 in the paper, 128 for BEIR.
        max_chunks: judge at most so many chunks of a document (36 in the paper); None for all.
        tokenizer: a fast Hugging Face tokenizer, or its name or folder, whose tokens are counted: BERT-base's in the
            paper. None counts words and punctuation marks.
        relevant_from: smallest label that is relevant.
        sample: a random choice of so many relevant (query, document) pairs (500 to 2,000 in the paper); None for all.
        seed: of that choice.
        text_field: the corpus's text column, or a tuple of columns that are joined by a space.
        verbose: show a progress bar.

    Returns:
        One row for each relevant document, with a position or the reason why there is none.

    Raises:
        ValueError: if a column is missing, a document is there twice, nothing is relevant, or arguments do not fit.
        ImportError: without rapidfuzz, for passages.
    """
    if (passages is None) == (judge is None):
        raise ValueError("give either passages= (a frame with qid and text) or judge=")
    for name, value in (("chunk_tokens", chunk_tokens), ("max_chunks", max_chunks), ("sample", sample)):
        if value is not None and value < 1:
            raise ValueError(f"{name}={value} must be at least 1")
    pairs = relevant_pairs(topics, qrels, relevant_from, sample, seed, needs_query=judge is not None)
    texts = texts_of_corpus(corpus, set(pairs["docno"]), text_field)
    reader = Reader(texts, tokenizer)
    with pt.tqdm(total=len(pairs), desc="relevant_positions", unit="doc", disable=not verbose) as bar:
        if passages is not None:
            found = _located(pairs, reader, passages, locator or PassageLocator(), bar)
            columns = _PASSAGE_COLUMNS
        else:
            asked = as_chunk_judge(judge, threshold)
            found = _judged(pairs, reader, asked, SentenceWindows(max_tokens=chunk_tokens), max_chunks, bar)
            columns = _CHUNK_COLUMNS
    return RelevantPositions(_as_frame(pairs, found, columns))


def _located(
    pairs: pd.DataFrame, reader: Reader, passages: pd.DataFrame, locator: PassageLocator, bar: Any
) -> list[dict[str, Any]]:
    check_columns(passages, ("qid", "text"), "passages")
    of_query: dict[str, list[tuple[int, str]]] = {}
    for row, (qid, text) in enumerate(zip(as_strings(passages["qid"]), strings(passages["text"], "text"), strict=True)):
        of_query.setdefault(qid, []).append((row, text))
    found = []
    for qid, docno in zip(pairs["qid"], pairs["docno"], strict=True):
        found.append(_missing(docno, reader) or _locate(of_query.get(qid, []), reader(docno), locator))
        bar.update()
    return found


def _missing(docno: str, reader: Reader) -> dict[str, Any] | None:
    """The row of a document without any token; None if it has some."""
    if docno not in reader.texts:
        return {"reason": NOT_IN_CORPUS}
    return None if len(reader(docno)) else {"reason": EMPTY, "length": 0}


def _locate(passages: list[tuple[int, str]], document: TokenizedText, locator: PassageLocator) -> dict[str, Any]:
    """The row of the passage that begins first."""
    matches = locator.locate([text for _, text in passages], document.text)
    found = [(match, row) for match, (row, _) in zip(matches, passages, strict=True) if match is not None]
    if not found:
        short = all(locator.too_short(text) for _, text in passages)
        return {"length": len(document), "reason": (TOO_SHORT if short else NOT_FOUND) if passages else NO_PASSAGE}
    match, row = min(found, key=lambda pair: (pair[0].start, -pair[0].similarity))
    return {**_place(document, match), "passage": row, "similarity": match.similarity, "method": match.method}


def _place(document: TokenizedText, match: Match) -> dict[str, Any]:
    starts, ends = np.asarray(document.starts), np.maximum.accumulate(np.asarray(document.ends))
    return {
        # The first token that reaches beyond: byte-level tokens begin with the space before their word.
        "first_token": int(np.searchsorted(ends, match.start, side="right")),
        "end_token": int(np.searchsorted(starts, match.end, side="left")),
        "length": len(document),
        "start": match.start,
        "end": match.end,
        "reason": "",
    }


def _judged(
    pairs: pd.DataFrame, reader: Reader, judge: ChunkJudge, windows: SentenceWindows, max_chunks: int | None, bar: Any
) -> list[dict[str, Any]]:
    # Chunked before anybody is asked: tokenizers may not be shared between threads.
    found, spans, jobs = [], [], []
    for qid, docno, query in zip(pairs["qid"], pairs["docno"], pairs["query"], strict=True):
        row = _missing(docno, reader)
        found.append(row or {"length": len(reader(docno))})
        cut = [] if row else windows(reader(docno))
        characters = [reader(docno).characters(span) for span in cut]
        spans.append((cut, characters))
        jobs.append(ChunkJob(qid, query, [reader.texts[docno][a:b] for a, b in characters[:max_chunks]]))
    for row, job, first, (cut, characters) in zip(found, jobs, judge(jobs, bar.update), spans, strict=True):
        if job.chunks:
            row |= {"chunks": len(cut), "judged": first.judged, "unjudged": first.unjudged}
            row |= _chunk(cut, characters, first) if first.number >= 0 else {"reason": _why(cut, job)}
    return found


def _chunk(cut: list[Span], characters: list[Span], first: FirstChunk) -> dict[str, Any]:
    (start, end), (first_token, end_token) = characters[first.number], cut[first.number]
    tokens = {"first_token": first_token, "end_token": end_token}
    return {**tokens, "start": start, "end": end, "reason": "", "chunk": first.number, "grade": first.grade}


def _why(cut: list[Span], job: ChunkJob) -> str:
    return NO_CHUNK if len(job.chunks) == len(cut) else NO_CHUNK_READ


def _as_frame(pairs: pd.DataFrame, found: list[dict[str, Any]], columns: Mapping[str, str]) -> pd.DataFrame:
    """The pairs with what was found; missing values where nothing was."""
    frame = pairs[["qid", "docno", "label"]].copy()
    kinds: dict[str, Any] = {**dict.fromkeys(_INTEGERS, "Int64"), "reason": "str", **columns}
    for name, kind in kinds.items():
        nothing = {"str": "", "Int64": pd.NA}.get(kind, np.nan)
        values = [row.get(name, nothing) for row in found]
        frame[name] = pd.Series(values, index=frame.index, dtype=object).astype(kind)
    return frame


def _spread(values: np.ndarray) -> dict[str, float]:
    if not len(values):
        return dict.fromkeys(("median", "mean", "p90"), float("nan"))
    return {"median": float(np.median(values)), "mean": float(values.mean()), "p90": float(np.percentile(values, 90))}


def _mean(values: np.ndarray) -> float:
    return float(values.mean()) if len(values) else float("nan")
