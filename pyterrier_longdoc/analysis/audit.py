"""Audit of any reranker: which parts of a text can change its score, and on what else the score depends.

A sentence that answers a query replaces words at many places of a text. Where the score differs from that of the
unchanged text, the system reads. Other words at this place are not enough: a maximum over windows does not notice them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import Any

import numpy as np
import pandas as pd
import pyterrier as pt

from ..common.arguments import check_arguments, check_type
from ..common.frames import as_strings, check_columns, keys_of, texts_of
from ..common.language import SPACED_WORD
from ..common.plots import COLOURS, finish, new_axes
from ..common.presentation import described, percent
from ..common.progress import work_bar
from ..modelling.tokens import Span, tokenized
from .judging import scores_by_row

QUERY = "how do bees make honey"

ANSWER = "bees collect nectar from flowers then make golden honey"
"""Its first word alone and its last word alone change a score, so that edges are exact."""

FILLER = "it was a day like many others and nobody in the town had much to say ."
"""Its words and its full stop are one token each in common tokenizers."""

LENGTHS = (333, 1000, 1777)
"""In words; no multiples of common strides, so that lost tails differ."""

SHORT = (0, 1, 10, 100)
"""Lengths that are only tried for errors, besides the others."""

OTHER = "three red chairs stood beside old tables under high windows"
"""Has no word of the filler and of the answer."""

QUERY_WORDS = 100

STEP, PLACES = 25, 40
"""Places are this many words apart, or so many in a text if it is longer; bisection finds the edges between them."""

ROUNDING, CHANCE = 1e-4, 0.05
"""Differences between scores of the same input, as a share of their spread: below is rounding, above is chance."""

_WORD = re.compile(SPACED_WORD)

_Texts = dict[tuple[str, str], str]  # by qid and docno
_Part = tuple[str, str, int, int, int, bool]  # a row of `Audit.frame`
_Error = tuple[str, int, int, str]  # a row of `Audit.errors`

_EFFECTS = {"rows": "the other rows of its query", "order": "the order of rows", "batch": "the other rows of a call"}


@dataclass(frozen=True, eq=False, repr=False)
class Audit:
    """What a system reads; printed as sentences. See `audit`.

    Attributes:
        name: of the system.
        frame: one row per part of a text that is read throughout or never read: `of` ("text", "query", or "run" for a
            text of the run), its `docno`, its `length`, `start` and `end` of the part (half-open, in words, or in
            tokens of the tokenizer) and `read`.
        unit: of these numbers, `"words"` or `"tokens"`.
        errors: `of, first, last, error`: texts with `first` to `last` words raise this error; texts longer than
            `lengths` were not tried.
        dependence: the largest difference between scores of the same query and text, as a share of the spread of
            scores: in a `repeat` of the call, with other `rows` of the query, in another `order`, and with other
            queries in the `batch`.
        prefers_answer: whether the answer has a higher score than other text.
        run: shares of the run: `text` and `gold` that are never read, with the numbers of `texts` and `passages`;
            empty without a run.
    """

    name: str
    frame: pd.DataFrame
    unit: str
    errors: pd.DataFrame
    dependence: pd.Series
    prefers_answer: bool
    run: pd.Series

    def __repr__(self) -> str:
        return "\n".join([f"Audit of {self.name}:", *(f"- {sentence}" for sentence in self.sentences())])

    def sentences(self) -> list[str]:
        """Return the findings, one in each sentence."""
        repeat, found = self.dependence["repeat"], []
        if repeat > ROUNDING:
            consequence = "places are approximate" if len(self.frame) else "what it reads cannot be seen"
            found.append(f"Two calls with the same input differ {_share(repeat)}: {consequence}.")
        found += [self._reading(of) for of in ("text", "query") if self.frame["of"].eq(of).any()]
        if not (self.prefers_answer or self.frame["read"].all()):
            found.append("The answer does not get higher scores than other text: a maximum can hide text that is read.")
        for of, first, last, error in self.errors.drop_duplicates(["of", "error"]).itertuples(index=False):
            length, what = f"{first:,}" if first == last else f"{first:,} to {last:,}", "text" if of == "run" else of
            found.append(f"Raises an error for a {what} of {length} words{' of the run' * (of == 'run')}: {error}")
        effects = [f"{_EFFECTS[name]} ({_share(self.dependence[name])})" for name in _dependent(self.dependence)]
        if len(self.frame):
            found.append(f"A score depends on {', '.join(effects) or 'its query and its text only'}.")
        if len(self.run):
            shares, sizes = f"{percent(self.run['text'], 0)} of the text", f"{self.run['texts']:,.0f} texts"
            if "gold" in self.run:
                shares += f" and {percent(self.run['gold'], 0)} of the gold passages"
                sizes += f", {self.run['passages']:,.0f} passages"
            found.append(f"{shares} of this run are never read ({sizes}).")
        return found

    def plot(self, *, ax: Any = None) -> Any:
        """Plot the parts of each text that are read and never read; return the matplotlib axes.

        `ax` are axes to draw on; None creates a figure.
        """
        rows = list(self.frame.groupby(["of", "docno", "length"], sort=False))
        ax = ax or new_axes(len(rows))
        styles = {True: {"color": COLOURS[0]}, False: {"facecolor": "none", "edgecolor": COLOURS[1], "hatch": "//"}}
        for row, (_, parts) in enumerate(rows):
            for is_read, own in parts.groupby("read"):
                bars = list(zip(own["start"], own["end"] - own["start"], strict=True))
                ax.broken_barh(bars, (row - 0.35, 0.7), **styles[bool(is_read)])
        for is_read, label in ((True, "read"), (False, "never read")):
            ax.broken_barh([], (0, 0), label=label, **styles[is_read])
        ax.set_yticks(range(len(rows)), [f"{of}, {length:,}" for (of, _, length), _ in rows])
        ax.invert_yaxis()
        ax.set_xlabel(self.unit)
        return finish(ax)

    def _reading(self, of: str) -> str:
        """Return which parts of the filler texts, or of the query, are read."""
        parts = self.frame[self.frame["of"] == of]
        lengths = parts["length"].unique().tolist()
        read = {length: [(0, 0)][:0] for length in lengths}
        for row in parts[parts["read"]].itertuples():
            read[row.length].append((row.start, row.end))
        cut = {length: spans for length, spans in read.items() if spans != [(0, length)]}
        longest = f"{max(lengths):,}"
        if not cut:
            return f"Reads all {self.unit} of a {of} (up to {longest} tried)."
        if not any(read.values()):
            return f"No part of a {of} changes the score (up to {longest} {self.unit} tried)."
        ends = {spans[0][1] if [start for start, _ in spans] == [0] else -1 for spans in cut.values()}
        if len(cut) > 1 and len(ends) == 1 and min(ends) >= max([0, *read.keys() - cut.keys()]):
            return f"Reads the first {min(ends):,} {self.unit} of a {of} (up to {longest} tried)."
        texts = []
        for length, spans in read.items():
            places = [f"{start + 1:,} to {end:,}" for start, end in spans]
            texts.append(f"{' and '.join(places) or 'nothing'} of {length:,}")
        return f"Of a {of}, reads the {self.unit} {'; '.join(texts)}."


def audit(
    system: Any,
    run: pd.DataFrame | None = None,
    gold: pd.DataFrame | None = None,
    *,
    lengths: Sequence[int] = LENGTHS,
    sample: int = 20,
    query: str = QUERY,
    answer: str = ANSWER,
    tokenizer: Any = None,
    text_field: str = "text",
    text_loader: Any = None,
    verbose: bool = False,
) -> Audit:
    """Find out which parts of a text a reranker reads, and on what else its scores depend.

    Nothing is assumed but that the system gives texts scores. In texts of filler words, the answer to a query replaces
    words at places that are 25 words apart (in long texts, a fortieth of the text). Where this changes the score, the
    system reads. Bisection finds the edges of read parts, to the word. An unread part is missed if it is shorter than
    the answer, or if no place is in it.

    If scores depend on the other rows of a query, as the ranks of a language model do, each text is scored between two
    unchanged copies. If they depend on the other rows of a call, each call has one query, which is slow. With the
    defaults and without a run, about 150 texts are scored. What `BM25Windows` and similar steps select by content
    counts as read, because they select the answer.

    A maximum shows a part only if the answer scores higher than the rest of the text, which the audit checks and
    reports: untrained weights can read more than is found. Lengths between those tried may be read differently.

    Args:
        system: a transformer that returns each row of `qid, query, docno` and the text column with a score, or a
            function `(queries, texts) -> scores`.
        run: results with `qid`, `docno` and the text column. The answer also replaces words of these texts, which can
            have more tokens per word than the filler.
        gold: `qid, docno, start, end`: the characters of relevant passages, such as a collection's `gold` or
            `relevant_positions(...).matched`. A passage of the run is never read if the answer in its place does not
            change the score.
        lengths: the lengths of the filler texts in words.
        sample: the maximum number of texts of the run in which parts are searched; they are evenly spaced by length.
        query: a query for which neither the filler nor the texts of the run are relevant.
        answer: a few words with the answer, of which the first and the last already change a score.
        tokenizer: a fast Hugging Face tokenizer, its name or folder, to report places in tokens; None reports words.
        text_field: the text column.
        text_loader: loads the texts of the run if the column is missing.
        verbose: show a progress bar over the texts.

    Returns:
        An object that prints as sentences and has a `frame` and a `plot`.

    Raises:
        Exception: the error of the system, if it raises one at every length.

    Example:
        >>> audit(lambda queries, texts: ["bees" in " ".join(text.split()[:300]) for text in texts])
        Audit of <lambda>:
        - Reads the first 300 words of a text (up to 1,777 tried).
        - No part of a query changes the score (up to 100 words tried).
        - A score depends on its query and its text only.
    """
    check_type(Callable, "a transformer or a function (queries, texts) -> scores", system=system)
    check_arguments("int", at_least=1, sample=sample, lengths=min(lengths))
    texts = {} if run is None else _texts_by_pair(run, text_field, text_loader)
    if gold is not None:
        check_columns(gold, ("qid", "docno", "start", "end"), "gold")
        gold = gold[[pair in texts for pair in keys_of(gold)]].dropna(subset=["start", "end"])
        if gold.empty:
            raise ValueError("gold must have passages of documents of the run (set run=), for the same queries")
    probe = _Probe(system, query, answer.split(), text_field)
    works, errors = _errors(probe, lengths)
    dependence, prefers_answer = _dependence(probe, works[:3])
    audited = [length for length in works if length in lengths or any(length + 1 == first for _, first, *_ in errors)]
    chosen = _evenly_by_length(texts, sample)
    jobs = [("text", "", filler(length), "") for length in audited]
    jobs += [("query", "", filler(QUERY_WORDS), probe.relevant(audited[0]))]
    jobs += [("run", docno, text, "") for docno, text in chosen]
    rows: list[_Part] = []
    shares: dict[str, float] = {}
    if dependence["repeat"] <= CHANCE:
        with work_bar("audit", "text", len(jobs), shown=verbose) as bar:
            for of, docno, text, document in jobs:
                try:
                    read = probe.read(text, document)
                except Exception as error:  # noqa: BLE001 - systems raise anything
                    read, length = [], len(text_words(text))  # a text that raises is never read
                    errors.append((of, length, length, _in_short(error)))
                rows += _parts(of, docno, text, read, tokenizer)
                bar.update()
        if run is not None:
            shares = _shares(probe, rows, texts, gold, errors)
    columns = ["of", "docno", "length", "start", "end", "read"]
    frame, unit = pd.DataFrame(rows, columns=columns), "words" if tokenizer is None else "tokens"
    raised = pd.DataFrame(errors, columns=["of", "first", "last", "error"])
    name = getattr(system, "__qualname__", None) or described(system)
    return Audit(name, frame, unit, raised, dependence, prefers_answer, pd.Series(shares, dtype="float64"))


def filler(length: int) -> str:
    """Return a text of so many words that answers no query."""
    return " ".join(_cycled(FILLER.split(), length))


def text_words(text: str) -> list[Span]:
    """Return the characters of each word between white space."""
    return [match.span() for match in _WORD.finditer(text)]


@dataclass
class _Probe:
    """Compares the scores of texts with and without an answer."""

    system: Any
    query: str
    answer: list[str]
    text_field: str
    has_copies: bool = False  # whether each text is scored between two unchanged copies
    one_by_one: bool = False  # whether each query has its own call
    tolerance: float = 0.0

    def call(self, qids: Sequence[str], queries: Sequence[str], texts: Sequence[str]) -> np.ndarray:
        """Return the scores of rows that are scored in one call."""
        if isinstance(self.system, pt.Transformer):
            rows = pd.DataFrame({"qid": qids, "query": queries, self.text_field: texts})
            return scores_by_row(self.system, rows, described(self.system))
        scores = np.asarray(self.system(list(queries), list(texts)), dtype="float64")
        if scores.shape != (len(texts),) or not np.isfinite(scores).all():
            raise ValueError(f"{self.system!r} must return one finite number for each of {len(texts)} texts")
        return scores

    def changes(self, base: tuple[str, str], pairs: Sequence[tuple[str, str]], copy: str) -> np.ndarray:
        """Return for each pair of a query and a text whether its score differs from that of the base."""
        # Between two copies, because ranks of equal texts can be in the order of rows or in the reverse order.
        others = [copy] * self.has_copies
        size = 1 + 2 * len(others)
        queries = [query for query, _ in [base, *pairs] for _ in range(size)]
        texts = [each for _, text in [base, *pairs] for each in (*others, text, *others)]
        qids, step = [str(row // size) for row in range(len(texts))], size if self.one_by_one else len(texts)
        calls = [slice(start, start + step) for start in range(0, len(texts), step)]
        scores = np.concatenate([self.call(qids[rows], queries[rows], texts[rows]) for rows in calls])
        scores = scores[len(others) :: size]
        return np.abs(scores[1:] - scores[0]) > self.tolerance

    def read(self, text: str, document: str) -> list[Span]:
        """Return the parts of a text, or of the query of a document, that are read, in words."""
        length = len(text_words(text))

        def is_read(places: list[int]) -> np.ndarray:
            versions = [text, *(put(text, place, self.answer) for place in places)]
            pairs = [(version, document) if document else (self.query, version) for version in versions]
            return self.changes(pairs[0], pairs[1:], OTHER if document else text)

        places = sorted({*range(0, length, max(STEP, length // PLACES)), length - 1} - {-1})
        more = len(self.answer) - 1  # where an answer reaches into a read part, its last word is the first one read
        return [(min(first + more, last) if first else 0, last + 1) for first, last in _runs(is_read, places)]

    def relevant(self, length: int) -> str:
        """Return a text of so many words that repeats the answer."""
        return " ".join(_cycled(self.answer, length))


def put(text: str, place: int, answer: Sequence[str]) -> str:
    """Replace the words from a place on by those of an answer, as far as the text has words.

    Example:
        >>> put("a b c d", 1, ["x", "y"]), put("a b c d", 3, ["x", "y"])
        ('a x y d', 'a b c x')
    """
    words = text_words(text)[place : place + len(answer)]
    return f"{text[: words[0][0]]}{' '.join(answer[: len(words)])}{text[words[-1][1] :]}"


def _cycled(words: Sequence[str], length: int) -> list[str]:
    return [words[number % len(words)] for number in range(length)]


def _runs(holds: Callable[[list[int]], Iterable[bool]], places: list[int]) -> list[Span]:
    """Return the first and last number of each run of numbers for which something holds, exact by bisection."""
    found = dict(zip(places, holds(places), strict=True)) if places else {}
    while middles := [(a + b) // 2 for a, b in pairwise(sorted(found)) if b - a > 1 and found[a] != found[b]]:
        found |= zip(middles, holds(middles), strict=True)
    runs = [list(run) for held, run in groupby(sorted(found), key=found.__getitem__) if held]
    return [(run[0], run[-1]) for run in runs]


def _errors(probe: _Probe, lengths: Sequence[int]) -> tuple[list[int], list[_Error]]:
    """Return lengths without an error, and the errors."""
    raised: dict[int, Exception] = {}

    def raises(tried: list[int]) -> list[bool]:
        for length in tried:
            try:
                probe.call(["0"], [probe.query], [filler(length)])
            except Exception as error:  # noqa: BLE001 - systems raise anything
                raised[length] = error
        return [length in raised for length in tried]

    tried = sorted({*SHORT, *lengths})
    spans = _runs(raises, tried)
    if all(length in raised for length in tried):
        raise raised[tried[-1]]
    last_working = [first - 1 for first, _ in spans if first > tried[0]]
    candidates = {*lengths, *last_working, *(length for length in SHORT if length >= 10)}
    works = sorted(length for length in candidates if length not in raised)
    return works, [("text", first, last, _in_short(raised[first])) for first, last in spans]


def _dependence(probe: _Probe, lengths: Sequence[int]) -> tuple[pd.Series, bool]:
    """Return `Audit.dependence` and `Audit.prefers_answer`, and set how the probe compares scores."""
    fillers, answers = [filler(length) for length in lengths], [probe.relevant(length) for length in lengths]
    texts = [*fillers, *answers]
    same, own, queries = ["0"] * len(texts), list(map(str, range(len(texts)))), [probe.query] * len(texts)
    together, again, apart = (probe.call(qids, queries, texts) for qids in (same, same, own))
    turned = probe.call(same, queries, texts[::-1])[::-1]
    alone = np.concatenate([probe.call(same[:1], queries[:1], [text]) for text in texts])
    spread = max(np.ptp(together), np.ptp(alone)) or 1.0
    pairs = {
        "repeat": (together, again),
        "rows": (together, apart),
        "order": (together, turned),
        "batch": (apart, alone),
    }
    effects = pd.Series({name: np.abs(a - b).max() / spread for name, (a, b) in pairs.items()})
    dependent = _dependent(effects)
    probe.has_copies, probe.one_by_one = not {"rows", "batch"}.isdisjoint(dependent), "batch" in dependent
    probe.tolerance = spread * max(1e-6, 4 * effects.drop(dependent).max())
    return effects, bool(together[len(fillers) :].mean() > together[: len(fillers)].mean())


def _dependent(effects: pd.Series) -> list[str]:
    """Return the effects that are neither rounding nor chance."""
    return [name for name in _EFFECTS if effects[name] > max(ROUNDING, 3 * effects["repeat"])]


def _texts_by_pair(run: pd.DataFrame, text_field: str, text_loader: Any) -> _Texts:
    check_columns(run, ("qid", "docno", *([text_field] if text_loader is None else [])), "run")
    return dict(zip(keys_of(run), texts_of(run, [text_field], text_loader), strict=True))


def _evenly_by_length(texts: _Texts, sample: int) -> list[tuple[str, str]]:
    """Return the docno and text of a sample of documents."""
    documents = {docno: text for (_, docno), text in texts.items()}
    by_length = sorted(documents.items(), key=lambda document: len(text_words(document[1])))
    number = min(sample, len(by_length))
    return [by_length[int((i + 0.5) * len(by_length) / number)] for i in range(number)]


def _shares(
    probe: _Probe, rows: list[Any], texts: _Texts, gold: pd.DataFrame | None, errors: list[_Error]
) -> dict[str, float]:
    """Return `Audit.run`; add to the errors."""
    sizes = [(end - start, is_read) for of, _, _, start, end, is_read in rows if of == "run"]
    total = sum(size for size, _ in sizes)
    unread = sum(size for size, is_read in sizes if not is_read)
    shares = {"text": unread / max(1, total), "texts": len({docno for of, docno, *_ in rows if of == "run"})}
    if gold is None:
        return shares
    read = 0
    for (qid, docno), passages in gold.groupby([as_strings(gold["qid"]), as_strings(gold["docno"])]):
        text = texts[str(qid), str(docno)]
        starts, ends = np.array(text_words(text), dtype="int64").reshape(-1, 2).T
        firsts = np.searchsorted(ends, passages["start"], side="right")
        lasts = np.searchsorted(starts, passages["end"], side="left")
        if (firsts >= lasts).any():
            raise ValueError(
                f"gold of {docno!r} has a passage without words: set text_field= or text_loader= as for it"
            )
        answers = [(first, _cycled(probe.answer, last - first)) for first, last in zip(firsts, lasts, strict=True)]
        versions = [(probe.query, put(text, *answer)) for answer in answers]
        try:
            read += int(probe.changes((probe.query, text), versions, text).sum())
        except Exception as error:  # noqa: BLE001 - systems raise anything
            errors.append(("run", len(starts), len(starts), _in_short(error)))
    return {**shares, "gold": 1 - read / len(gold), "passages": len(gold)}


def _parts(of: str, docno: str, text: str, read: list[Span], tokenizer: Any) -> Iterator[_Part]:
    """Yield the rows of `Audit.frame` of a text."""
    words = text_words(text)
    marks = np.arange(len(words) + 1)
    if tokenizer is not None:
        tokens = tokenized(tokenizer, text)
        marks = np.append(tokens.tokens_before([start for start, _ in words]), len(tokens))
    place = 0
    for start, end in [*read, (len(words), len(words))]:
        for first, last, is_read in ((place, start, False), (start, end, True)):
            if first < last:
                yield of, docno, int(marks[-1]), int(marks[first]), int(marks[last]), is_read
        place = end


def _in_short(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


def _share(effect: float) -> str:
    return f"by up to {percent(effect)} of the spread of scores"
