"""Positions of relevant text in relevant documents, which show the positional bias of a collection.

Source: Boytsov et al. 2025 (section 2, C.4, Figures 1, 7 and 8), who locate known relevant passages, or split documents
into chunks and let a judge find the first relevant one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache, partial
from typing import Any

import numpy as np
import pandas as pd
import pyterrier as pt

from ..common.arguments import check_arguments
from ..common.frames import (
    TextField,
    TruncationWarning,
    as_strings,
    check_columns,
    field_names,
    relevant_pairs,
    strings,
    texts_of,
)
from ..common.parallel import RunAll, in_parallel
from ..common.plots import COLOURS, finish, new_axes
from ..common.presentation import percent
from ..common.progress import work_bar
from ..common.warnings import warn
from ..modelling.tokens import Span, TokenizedText, tokenized
from ..modelling.windows import CHUNK_TOKENS
from .judging import UNJUDGED, RelevanceJudge, chunks_of
from .locating import PassageLocator

CHUNK = 256
"""Tokens per chunk in the paper; 128 for BEIR."""

MAX_CHUNKS = 36

NOT_THERE, EMPTY = "document not in corpus", "document empty"

TokensOf = Callable[[str], TokenizedText | None]
"""Returns the tokens of a document by docno; None if it is not in the corpus."""

_PASSAGE_COLUMNS = {"passage": "Int64", "similarity": "float64", "method": "str"}
_CHUNK_COLUMNS = {"grade": "float64", **dict.fromkeys(["chunk", "chunks", "judged", "unjudged", "unread"], "Int64")}
_INTEGERS = ("first_token", "end_token", "length", "start", "end")


@dataclass(frozen=True, eq=False)
class RelevantPositions:
    """The position of the first relevant passage in each relevant document.

    Attributes:
        frame: one row per relevant document of a query, in the order of the qrels, with

            - `qid`, `docno`, `label`;
            - `first_token`, `end_token`: the number of tokens before the start and before the end of the relevant
              passage or chunk;
            - `length`: the length of the document in tokens;
            - `start`, `end`: the characters of the passage in the text;
            - `reason`: why there is no position (the columns above are `pd.NA`), e.g. "passage not found"; otherwise
              empty;
            - for located passages: `passage` (row of the passages frame), `similarity` and `method` (see `Match`);
            - for judged chunks: `grade` and index (`chunk`) of the relevant chunk; the number of `chunks`, of `judged`
              chunks and of chunks without a readable grade (`unjudged`) of the document; and `unread`, the number of
              tokens beyond `max_chunks`, where the relevant chunk could have been.
    """

    frame: pd.DataFrame

    def __repr__(self) -> str:
        return f"RelevantPositions({len(self.frame)} documents, {percent(self.unmatched)} unmatched)"

    def _repr_html_(self) -> str:
        return self.summary().to_frame("").to_html()

    @property
    def matched(self) -> pd.DataFrame:
        """The rows with a position, with integer columns."""
        rows = self.frame[self.frame["first_token"].notna()]
        return rows.astype(dict.fromkeys(_INTEGERS, "int64"))

    @property
    def unmatched(self) -> float:
        """The share of relevant documents without a position; NaN if there are no documents."""
        return float(self.frame["first_token"].isna().mean())

    @property
    def unread(self) -> float:
        """The share of tokens that were not judged because of `max_chunks`."""
        if "unread" not in self.frame:
            return 0.0
        return float(self.frame["unread"].sum() / max(1, self.frame["length"].sum()))

    def summary(self, *, first: int = CHUNK_TOKENS) -> pd.Series:
        """Return statistics of the positions.

        Args:
            first: the number of tokens from the start of the document; BERT reads 477 next to a query.

        Returns:
            A series with

            - `queries`, `documents`: their numbers;
            - `unmatched`: the share of documents without a position;
            - `queries matched`: the share of queries with at least one position (about 0.85 for MS MARCO in the paper);
            - `median`, `mean` and `p90` of `position` and document `length`, in tokens;
            - the shares of positions that start and end within the `first` tokens, and the share that would start there
              by chance, if all places in a document were equally likely;
            - `relative position`: the mean, where 0 is the start and 1 the end of the document;
            - for judged chunks: the shares of `documents cut` by `max_chunks` and of `tokens unread`.
        """
        rows, lengths = self.matched, self.frame["length"].dropna().astype("float64")
        starts, ends = rows["first_token"], rows["end_token"]
        room = rows["length"] - (ends - starts)
        is_judged = "unread" in self.frame
        cut = (self.frame["unread"].fillna(0) > 0).mean() if is_judged else 0.0
        return pd.Series(
            {
                "queries": self.frame["qid"].nunique(),
                "documents": len(self.frame),
                "unmatched": self.unmatched,
                "queries matched": rows["qid"].nunique() / max(1, self.frame["qid"].nunique()),
                **_spread("position", starts),
                **_spread("length", lengths),
                f"starts in first {first}": (starts < first).mean(),
                f"ends in first {first}": (ends <= first).mean(),
                f"starts in first {first} by chance": (first / (room + 1)).clip(upper=1.0).mean(),
                "relative position": (starts / room.clip(lower=1)).where(room > 0, 0.0).mean(),
                **({"documents cut": cut, "tokens unread": self.unread} if is_judged else {}),
            },
            name="positions",
        )

    def reasons(self) -> pd.Series:
        """Count the documents without a position, by reason."""
        return self.frame.loc[self.frame["first_token"].isna(), "reason"].value_counts()

    def plot(self, *, bin_tokens: int = CHUNK, max_tokens: int | None = None, ax: Any = None) -> Any:
        """Plot the distributions of first relevant positions and document lengths, as in Figure 7 of the paper.

        Args:
            bin_tokens: the width of the bars.
            max_tokens: the end of the axis; None for the bar with the 99th percentile of lengths. The last bar includes
                everything beyond it.
            ax: axes to draw on; None creates a figure.

        Returns:
            The matplotlib axes.
        """
        check_arguments("int", at_least=1, bin_tokens=bin_tokens)
        lengths, starts = self.frame["length"].dropna().astype("float64"), self.matched["first_token"]
        end = max_tokens or np.percentile(lengths, 99) + 1
        edges = bin_tokens * np.arange(max(1, int(np.ceil(end / bin_tokens))) + 1)
        ax = ax or new_axes()
        unread = f", {percent(self.unread, 0)} of tokens unread" if self.unread else ""
        missing = f"{percent(self.unmatched, 0)} unmatched{unread}"
        # One is filled and one outlined, so that both are visible where they overlap.
        filled = {"color": COLOURS[0], "alpha": 0.45}
        outlined = {"facecolor": "none", "edgecolor": COLOURS[1], "hatch": "//", "linewidth": 1.5}
        for values, style, label in (
            (lengths, filled, f"length of {len(lengths)} relevant documents"),
            (starts, outlined, f"first relevant position ({missing})"),
        ):
            # Shares, so that unmatched documents do not lower the bars of positions.
            weights = np.full(len(values), 1 / max(1, len(values)))
            heights = np.minimum(values, edges[-1] - 0.5)
            ax.hist(heights, bins=edges, weights=weights, label=label, **style)
        ax.set_xlim(0, edges[-1])
        if max([*lengths, *starts]) >= edges[-1]:
            units = {"xycoords": "axes fraction", "textcoords": "offset points"}
            ax.annotate("and beyond", (1, 0), xytext=(0, -24), ha="right", **units)
        ax.set_xlabel("tokens")
        ax.set_ylabel("share of documents")
        return finish(ax)


def _spread(name: str, values: pd.Series) -> dict[str, Any]:
    return {f"{name} median": values.median(), f"{name} mean": values.mean(), f"{name} p90": values.quantile(0.9)}


def relevant_positions(
    topics: pd.DataFrame,
    qrels: pd.DataFrame,
    corpus: pd.DataFrame | Iterable[Mapping[str, Any]],
    *,
    passages: pd.DataFrame | None = None,
    locator: PassageLocator | None = None,
    judge: Any = None,
    chunk_tokens: int = CHUNK,
    max_chunks: int | None = MAX_CHUNKS,
    tokenizer: Any = None,
    relevant_from: int = 1,
    sample: int | None = None,
    seed: int = 42,
    text_field: TextField = "text",
    verbose: bool = False,
) -> RelevantPositions:
    """Find the position at which the relevant text of each relevant document begins.

    Pass either `passages`, the known relevant text, of which the first position counts, or a `judge`. In the second
    case, documents are split into disjoint chunks of whole sentences, which the judge grades up to the first relevant
    one.

    Args:
        topics: `qid, query`; judgements for other queries are ignored. With `passages`, `query` is not needed.
        qrels: `qid, docno, label`. Add rows to search other documents, such as the paper's top 5 documents retrieved
            with a passage as the query.
        corpus: `docno` and the text column(s): a frame, or an iterable of dicts such as a dataset's
            `get_corpus_iter()`, from which only relevant documents are kept in memory.
        passages: `qid, text`: the relevant passages of each query; or `qid, docno, start, end`: the characters of known
            passages, such as a collection's `gold`, which are not searched.
        locator: finds the passages; None uses the thresholds of Boytsov et al. 2022.
        judge: a `RelevanceJudge`, of which the model, prompt, retries, concurrency and failure rule apply; or a
            function `(query, chunk) -> number`. The first chunk with a grade above 0 is relevant, as in the paper;
            later chunks are not judged.
        chunk_tokens: the maximum number of tokens per chunk: 256 in the paper, 128 for BEIR.
        max_chunks: the maximum number of chunks to judge per document (36 in the paper, about 9,000 tokens); None for
            all.
        tokenizer: a fast Hugging Face tokenizer, its name or folder, or a collection's `.tokenizer`, to count tokens;
            the paper uses BERT-base's. None counts words and punctuation marks.
        relevant_from: the smallest label that counts as relevant.
        sample: the size of a random sample of relevant (query, document) pairs (500 to 2,000 in the paper); None for
            all.
        seed: the random seed of the sample.
        text_field: the text column of the corpus, or a tuple of columns, joined by a space.
        verbose: show a progress bar.

    Returns:
        One row per relevant document, with a position or the reason why there is none.

    Warns:
        TruncationWarning: if `max_chunks` leaves text unread, which could contain the relevant passage.

    Example:
        `ld.relevant_positions(topics, qrels, corpus, judge=ld.RelevanceJudge(backend))`
    """
    if (passages is None) == (judge is None):
        raise ValueError("relevant_positions needs either passages= (a frame with qid and text) or judge=")
    is_function = callable(judge) and not isinstance(judge, pt.Transformer)
    if not (judge is None or is_function or isinstance(judge, RelevanceJudge)):
        raise ValueError(f"judge={judge!r} must be a RelevanceJudge, or a function (query, chunk) -> number")
    check_arguments("int | None", at_least=1, chunk_tokens=chunk_tokens, max_chunks=max_chunks, sample=sample)
    pairs = _relevant_pairs(topics, qrels, relevant_from, sample, seed, needs_query=judge is not None)
    texts = texts_of_corpus(corpus, set(pairs["docno"]), text_field)

    @lru_cache(maxsize=1024)  # a document can be relevant for several queries
    def read(docno: str) -> TokenizedText | None:
        return tokenized(tokenizer, texts[docno]) if docno in texts else None

    with work_bar("relevant_positions", "doc", len(pairs), shown=verbose) as bar:
        if passages is not None:
            rows = _locate_all(pairs, read, passages, locator or PassageLocator(), bar.update)
            return RelevantPositions(_frame(pairs, rows, _PASSAGE_COLUMNS))
        # Chunked before threads start, because they must not share a tokenizer.
        chunked: dict[str, tuple[int | None, list[tuple[Span, Span]]]] = {}
        for docno in dict.fromkeys(pairs["docno"]):
            document = read(docno)
            chunked[docno] = (None, []) if document is None else (len(document), chunks_of(document, chunk_tokens))
        jobs = [
            (qid, query, [texts[docno][slice(*span)] for _, span in chunked[docno][1][:max_chunks]])
            for qid, docno, query in zip(pairs["qid"], pairs["docno"], pairs["query"], strict=True)
        ]
        concurrency = judge.concurrency if isinstance(judge, RelevanceJudge) else 1
        grades = in_parallel(partial(_grades, judge), jobs, concurrency, on_done=lambda *_: bar.update())
    rows = [_judged_place(*chunked[docno], judged) for docno, judged in zip(pairs["docno"], grades, strict=True)]
    positions = RelevantPositions(_frame(pairs, rows, _CHUNK_COLUMNS))
    unread = positions.frame["unread"].fillna(0)
    if unread.any():
        tokens = f"{unread.sum():,} of {positions.frame['length'].sum():,} tokens ({percent(positions.unread)})"
        message = f"{tokens} in {(unread > 0).sum()} of {len(unread)} documents were not judged because of max_chunks"
        warn(f"relevant_positions: {message} (see column unread); max_chunks=None judges all.", TruncationWarning)
    return positions


def _frame(pairs: pd.DataFrame, positions: list[dict[str, Any]], columns: Mapping[str, str]) -> pd.DataFrame:
    """Return the frame of `RelevantPositions`, one row per pair."""
    kinds: dict[str, str] = {**dict.fromkeys(_INTEGERS, "Int64"), "reason": "str", **columns}
    rows = [{"reason": "", "method": "", **row} for row in positions]
    return pairs[["qid", "docno", "label"]].join(pd.DataFrame(rows, columns=list(kinds)).astype(kinds))


def _relevant_pairs(
    topics: pd.DataFrame, qrels: pd.DataFrame, relevant_from: int, sample: int | None, seed: int, *, needs_query: bool
) -> pd.DataFrame:
    """Return `qid, docno, label` and, if needed, `query` of the relevant documents, in the order of the qrels."""
    pairs = relevant_pairs(topics, qrels, relevant_from)
    if needs_query:
        check_columns(topics, ("query",), "topics")
        queries = dict(zip(as_strings(topics["qid"]), strings(topics["query"], "query"), strict=True))
        pairs["query"] = pairs["qid"].map(queries)
    if sample is not None and sample < len(pairs):
        indices = np.sort(np.random.default_rng(seed).choice(len(pairs), sample, replace=False))
        pairs = pairs.iloc[indices].reset_index(drop=True)
    return pairs


def _locate_all(
    pairs: pd.DataFrame, read: TokensOf, passages: pd.DataFrame, locator: PassageLocator, advance: Callable[[int], Any]
) -> list[dict[str, Any]]:
    """Return the row of the first passage of each pair."""
    is_known = {"docno", "start", "end"} <= set(passages.columns)
    check_columns(passages, ("qid", "docno", "start", "end") if is_known else ("qid", "text"), "passages")
    keys = ["qid", "docno"] if is_known else ["qid"]
    passages_of = dict(list(passages.groupby([as_strings(passages[name]).to_numpy() for name in keys])))
    rows: list[dict[str, Any]] = []
    for qid, docno in zip(pairs["qid"], pairs["docno"], strict=True):
        document, own = read(docno), passages_of.get((qid, docno)[: len(keys)], passages.head(0))
        if document is None:
            rows.append({"reason": NOT_THERE})
        elif not len(document):
            rows.append({"length": 0, "reason": EMPTY})
        else:
            found = _known_place(own, document) if is_known else _locate(own, document, locator)
            if "start" in found:
                found["first_token"] = int(document.tokens_before(found["start"]))
                found["end_token"] = document.tokens_begun(found["end"])
            rows.append({"length": len(document), **found})
        advance(1)
    return rows


def _known_place(passages: pd.DataFrame, document: TokenizedText) -> dict[str, Any]:
    """Return the first of these passages, or the reason why there is none."""
    if passages.empty:
        return {"reason": "no passage"}
    first = passages.sort_values(["start", "end"], kind="stable").iloc[0]
    if first["end"] > len(document.text):
        return {"reason": "passage ends after the text"}
    place = {"start": first["start"], "end": first["end"], "passage": first.name}
    return {**place, "similarity": 1.0, "method": "known"}


def _locate(passages: pd.DataFrame, document: TokenizedText, locator: PassageLocator) -> dict[str, Any]:
    """Return the first passage that is found, or the reason why there is none."""
    texts = strings(passages["text"], "text")
    matches = locator.locate(texts, document.text)
    candidates = [(match, row) for match, row in zip(matches, passages.index, strict=True) if match is not None]
    if not candidates:
        short = all(map(locator.too_short, texts))
        return {"reason": "no passage" if not texts else "passage too short" if short else "passage not found"}
    match, row = min(candidates, key=lambda pair: (pair[0].start, -pair[0].similarity))
    return {**asdict(match), "passage": row}


def _grades(judge: Any, document: tuple[str, str, list[str]], run_all: RunAll) -> list[float]:
    """Return the grades of the chunks of a document up to the first relevant one; NaN if a reply is unreadable."""
    (qid, query, chunks), by_model = document, isinstance(judge, RelevanceJudge)
    ask = partial(judge.grade, qid=qid) if by_model else judge
    grades: list[float] = []
    for chunk in chunks:
        (grade,) = run_all([partial(ask, query, chunk)])
        if not isinstance(grade, int | float | np.number) or np.isnan(grade):
            raise ValueError(f"judge={judge!r} must return a number, but returned {grade!r} for the query {query!r}")
        grades.append(np.nan if by_model and grade == UNJUDGED else float(grade))
        if grades[-1] > 0:
            break
    return grades


def _judged_place(length: int | None, chunks: Sequence[tuple[Span, Span]], grades: Sequence[float]) -> dict[str, Any]:
    """Return the place of the first relevant chunk of a document, or the reason why there is none."""
    if not chunks:
        return {"length": length, "reason": NOT_THERE if length is None else EMPTY}
    (first_token, end_token), (start, end) = chunks[len(grades) - 1]
    is_relevant, unjudged = grades[-1] > 0, int(np.isnan(grades).sum())
    unread = 0 if is_relevant else chunks[-1][0][1] - end_token
    row = {"length": length, "chunks": len(chunks), "judged": len(grades), "unjudged": unjudged, "unread": unread}
    if not is_relevant:
        reason = "no readable grade" if unjudged == len(grades) else "no relevant chunk"
        return {**row, "reason": reason + (" among those judged" if unread else "")}
    place = {"first_token": first_token, "end_token": end_token, "start": start, "end": end}
    return {**row, **place, "chunk": len(grades) - 1, "grade": grades[-1]}


def texts_of_corpus(
    corpus: pd.DataFrame | Iterable[Mapping[str, Any]], docnos: set[str], text_field: TextField
) -> dict[str, str]:
    """Return the texts of these documents by docno, without those missing from the corpus."""
    columns = ["docno", *field_names(text_field)]
    if isinstance(corpus, pd.DataFrame):
        frame = corpus
    else:
        dicts = [{name: row[name] for name in columns} for row in corpus if str(row["docno"]) in docnos]
        frame = pd.DataFrame(dicts, columns=columns)
    check_columns(frame, columns, "corpus")
    rows = frame[as_strings(frame["docno"]).isin(docnos).to_numpy()]
    names = as_strings(rows["docno"])
    duplicates = names[names.duplicated()].tolist()
    if duplicates:
        raise ValueError(f"corpus holds the document {duplicates[0]!r} more than once (column docno): keep one of them")
    return dict(zip(names.tolist(), texts_of(rows, columns[1:], None), strict=True))
