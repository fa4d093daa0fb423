"""Audit of any reranker: which parts of a text can change its score, and on what else the score depends."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain, cycle, groupby, islice, pairwise
from typing import Any

import numpy as np
import pandas as pd
import pyterrier as pt

from ..common.arguments import check_arguments, check_type
from ..common.frames import SeenQueriesWarning, check_columns, keys_of, texts_of
from ..common.language import SPACED_WORD, counted
from ..common.plots import COLOURS, finish, new_axes
from ..common.presentation import described, percent
from ..common.progress import work_bar
from ..modelling.tokens import Span, tokenized
from .scoring import scores_by_row

QUERY = "how do bees make honey"

ANSWER = "bees collect nectar from flowers then make golden honey"
"""Its first word alone and its last word alone change a score, so that edges are exact."""

FILLER = "it was a day like many others and nobody in the town had much to say ."
"""Its words and its full stop are one token each in common tokenizers."""

LENGTHS = (333, 1000, 1777)
"""In words; no multiples of common strides, so that lost tails differ."""

SHORT = (0, 1, 10, 100)
"""Lengths that are only tried for errors, besides the others; a query has the last one."""

OTHER = "three red chairs stood beside old tables under high windows"
"""Has no word of the filler and of the answer."""

STEP, PLACES = 25, 40
"""Places are this many words apart, or so many in a text if it is longer; bisection finds the edges between them."""

ROUNDING, CHANCE = 1e-4, 0.05
"""Differences between scores of the same input, as a share of their spread: below is rounding, above is chance."""

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
        found, frame = [], self.frame
        share = self.dependence.map(lambda effect: f"by up to {percent(effect)} of the spread of scores")
        if self.dependence["repeat"] > ROUNDING:
            consequence = "places are approximate" if len(frame) else "what it reads cannot be seen"
            found.append(f"Two calls with the same input differ {share['repeat']}: {consequence}.")
        found += [self._reading(of) for of in ("text", "query") if frame["of"].eq(of).any()]
        if not (self.prefers_answer or frame["read"].all()):
            found.append("The answer does not get higher scores than other text: a maximum can hide text that is read.")
        for of, first, last, error in self.errors.drop_duplicates(["of", "error"]).itertuples(index=False):
            what, span = "text of the run" if of == "run" else of, f"{first:,} to " if first < last else ""
            found.append(f"Raises an error for a {what} with {span}{last:,} word{'s' * (last != 1)}: {error}")
        effects = [f"{_EFFECTS[name]} ({share[name]})" for name in _dependent(self.dependence)]
        if len(frame):
            found.append(f"A score depends on {', '.join(effects) or 'its query and its text only'}.")
        if len(self.run):
            shares = [f"{percent(self.run['text'], 0)} of the text"]
            sizes = [counted(int(self.run["texts"]), "text", "texts")]
            if "gold" in self.run:
                shares.append(f"{percent(self.run['gold'], 0)} of the gold passages")
                sizes.append(counted(int(self.run["passages"]), "passage", "passages"))
            are = "are" if len(shares) > 1 else "is"
            found.append(f"{' and '.join(shares)} of this run {are} never read ({', '.join(sizes)}).")
        return found

    def plot(self, *, ax: Any = None) -> Any:
        """Plot the parts of each text that are read and never read; return the matplotlib axes.

        `ax` are axes to draw on; None creates a figure.
        """
        texts = self.frame[self.frame["start"].eq(0)]
        rows = self.frame["start"].eq(0).cumsum() - 1
        ax = ax or new_axes(len(texts))
        styles = {
            True: {"label": "read", "color": COLOURS[0]},
            False: {"label": "never read", "facecolor": "none", "edgecolor": COLOURS[1], "hatch": "//"},
        }
        for is_read, own in self.frame.groupby("read"):
            ax.barh(rows[own.index], own["end"] - own["start"], 0.7, own["start"], **styles[bool(is_read)])
        ax.set_yticks(range(len(texts)), [f"{row.of}, {row.length:,}" for row in texts.itertuples()])
        ax.invert_yaxis()
        ax.set_xlabel(self.unit)
        return finish(ax)

    def _reading(self, of: str) -> str:
        """Return which parts of the filler texts, or of the query, are read."""
        parts = self.frame[self.frame["of"] == of]
        read: dict[int, list[Span]] = {length: [] for length in parts["length"]}
        for row in parts[parts["read"]].itertuples():
            read[row.length].append((row.start, row.end))
        longest, end = max(read), max([0, *(end for spans in read.values() for _, end in spans)])
        if not end:
            return f"No part of a {of} changes the score (up to {longest:,} {self.unit} tried)."
        if all(spans == [(0, min(length, end))] for length, spans in read.items()):
            if end == longest:
                return f"Reads all {self.unit} of a {of} (up to {longest:,} tried)."
            if len(read) == 1:
                return f"Reads the first {end:,} {self.unit} of a {of} of {longest:,}."
            if sum(length > end for length in read) > 1:  # one alone can also have lost its tail
                return f"Reads the first {end:,} {self.unit} of a {of} (up to {longest:,} tried)."
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

    In texts of filler words, the answer to a query replaces words at places that are 25 words apart (in long texts, a
    fortieth of the text). Where this changes the score, the system reads. Bisection finds the edges of read parts, to
    the word. An unread part is missed if it is shorter than the answer, or if no place is in it.

    If scores depend on the other rows of a query, as the ranks of a language model do, each text is scored between two
    others, which differ from it in the first and the last word. If they depend on the other rows of a call, each call
    has one query, which is slow. With the defaults and without a run, about 150 texts are scored. What `BM25Windows`
    and similar steps select by content counts as read, because they select the answer.

    A maximum shows a part only if the answer scores higher than the rest of the text, which the audit checks and
    reports: untrained weights can read more than is found. Lengths between those tried may be read differently.

    Args:
        system: a transformer that returns each row of `qid, query, docno` and the text column with a score, or a
            function `(queries, texts) -> scores`. The column of a model's `instruction_field` is empty.
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
    for name, given in (("lengths", lengths), ("answer", answer.split()), ("run", [()] if run is None else run)):
        if not len(given):
            raise ValueError(f"{name} must not be empty")
    check_arguments("int", at_least=1, sample=sample, lengths=min(lengths))
    pairs, texts = [], []
    if run is not None:
        check_columns(run, ("qid", "docno", *([text_field] if text_loader is None else [])), "run")
        pairs, texts = keys_of(run), texts_of(run, [text_field], text_loader)
    by_pair = dict(zip(pairs, texts, strict=True))
    if gold is not None:
        check_columns(gold, ("qid", "docno", "start", "end"), "gold")
        gold = gold[[pair in by_pair for pair in keys_of(gold)]].dropna(subset=["start", "end"])
        if gold.empty:
            raise ValueError("gold must have passages of documents of the run (set run=), for the same queries")
    probe = _Probe(system, query, answer, text_field)
    audited, shortest, errors = _tried(probe, lengths)
    dependence, prefers_answer = _dependence(probe, shortest)
    documents = sorted({(len(text_words(text)), docno, text) for (_, docno), text in zip(pairs, texts, strict=True)})
    number = min(sample, len(documents))
    documents = [documents[int((i + 0.5) * len(documents) / number)] for i in range(number)]
    jobs = [("text", "", cycled(FILLER, length), "") for length in audited]
    jobs += [("query", "", cycled(FILLER, SHORT[-1]), cycled(answer, audited[0]))]
    jobs += [("run", docno, text, "") for _, docno, text in documents]
    jobs = jobs if dependence["repeat"] <= CHANCE else []
    rows: list[Any] = []
    with work_bar("audit", "text", len(jobs), shown=verbose) as bar:
        for of, docno, text, document in jobs:
            try:
                read = probe.read(text, document)
            except Exception as error:  # noqa: BLE001 - systems raise anything
                read, length = [], len(text_words(text))  # a text that raises is never read
                errors.append((of, length, length, error))
            rows += _parts(of, docno, text, read, tokenizer)
            bar.update()
    frame = pd.DataFrame(rows, columns=["of", "docno", "length", "start", "end", "read"])
    shares: dict[str, float] = {}
    if run is not None and jobs:
        own = frame[frame["of"] == "run"]
        sizes = own["end"] - own["start"]
        shares = {"text": sizes[~own["read"]].sum() / max(1, sizes.sum()), "texts": len(documents)}
        if gold is not None:
            shares |= {"gold": 1 - _gold_read(probe, by_pair, gold, errors) / len(gold), "passages": len(gold)}
    name, unit = getattr(system, "__qualname__", None) or described(system), "words" if tokenizer is None else "tokens"
    messages = [(*where, f"{type(error).__name__}: {' '.join(str(error).split())[:200]}") for *where, error in errors]
    raised = pd.DataFrame(messages, columns=["of", "first", "last", "error"])
    return Audit(name, frame, unit, raised, dependence, prefers_answer, pd.Series(shares, dtype="float64"))


def text_words(text: str) -> list[Span]:
    """Return the characters of each word between white space."""
    return [match.span() for match in re.finditer(SPACED_WORD, text)]


def cycled(text: str, length: int) -> str:
    """Return a text of so many words, which are those of the given text again and again."""
    return " ".join(islice(cycle(text.split()), length))


def put(text: str, place: int, answer: str) -> str:
    """Replace the words from a place on by those of an answer, as far as the text has words.

    Example:
        >>> put("a b c d", 1, "x y"), put("a b c d", 3, "x y")
        ('a x y d', 'a b c x')
    """
    answers = answer.split()
    words = text_words(text)[place : place + len(answers)]
    return f"{text[: words[0][0]]}{' '.join(answers[: len(words)])}{text[words[-1][1] :]}"


@dataclass
class _Probe:
    """Compares the scores of texts with and without an answer."""

    system: Any
    query: str
    answer: str
    text_field: str
    has_companions: bool = False  # whether each text is scored between two others
    one_by_one: bool = False  # whether each query has its own call
    tolerance: float = 0.0

    def call(self, rows: Sequence[tuple[str, str, str]]) -> np.ndarray:
        """Return the scores of rows that are scored in one call."""
        if isinstance(self.system, pt.Transformer):
            frame = pd.DataFrame(rows, columns=["qid", "query", self.text_field])
            if instructions := getattr(self.system, "instruction_field", None):
                frame[instructions] = ""
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", SeenQueriesWarning)  # an audit evaluates nothing
                return scores_by_row(self.system, frame, described(self.system))
        scores = np.asarray(self.system([row[1] for row in rows], [row[2] for row in rows]), dtype="float64")
        if scores.shape != (len(rows),) or not np.isfinite(scores).all():
            raise ValueError(f"{self.system!r} must return one finite number for each of {len(rows)} texts")
        return scores

    def changes(self, pairs: Sequence[tuple[str, str]], companion: str) -> np.ndarray:
        """Return for each pair of a query and a text but the first whether its score differs from that of the first."""
        before, after = [], []
        if self.has_companions:
            # Before and after, because ties can be in the order of rows or in the reverse order; and distinct, because
            # a system can merge equal texts.
            last = len(text_words(companion)) - 1
            before, after = ([put(put(companion, 0, word), last, word)] for word in ("three", "four"))
        groups = [(str(number), query, [*before, text, *after]) for number, (query, text) in enumerate(pairs)]
        rows = [(qid, query, text) for qid, query, texts in groups for text in texts]
        size = 1 + len(before) + len(after)
        step = size if self.one_by_one else len(rows)
        scores = np.concatenate([self.call(rows[start : start + step]) for start in range(0, len(rows), step)])
        scores = scores[len(before) :: size]
        return np.abs(scores[1:] - scores[0]) > self.tolerance

    def read(self, text: str, document: str) -> list[Span]:
        """Return the parts of a text, or of the query of a document, that are read, in words."""
        length = len(text_words(text))

        def is_read(places: list[int]) -> np.ndarray:
            versions = [text, *(put(text, place, self.answer) for place in places)]
            pairs = [(version, document) if document else (self.query, version) for version in versions]
            return self.changes(pairs, OTHER if document else text)

        places = sorted({*range(0, length, max(STEP, length // PLACES)), length - 1} - {-1})
        more = len(self.answer.split()) - 1  # where an answer reaches into a read part, its last word is the first read
        return [(min(first + more, last) if first else 0, last + 1) for first, last in _runs(is_read, places)]


def _runs(holds: Callable[[list[int]], Iterable[bool]], places: list[int]) -> list[Span]:
    """Return the first and last number of each run of numbers for which something holds, exact by bisection."""
    found = dict(zip(places, holds(places), strict=True)) if places else {}
    while middles := [(a + b) // 2 for a, b in pairwise(sorted(found)) if b - a > 1 and found[a] != found[b]]:
        found |= zip(middles, holds(middles), strict=True)
    runs = [list(run) for held, run in groupby(sorted(found), key=found.__getitem__) if held]
    return [(run[0], run[-1]) for run in runs]


def _tried(probe: _Probe, lengths: Sequence[int]) -> tuple[list[int], list[int], list[Any]]:
    """Return the lengths to audit, the shortest lengths that work, and the errors."""
    raised: dict[int, Exception] = {}

    def raises(tried: list[int]) -> list[bool]:
        for length in tried:
            try:
                probe.call([("0", probe.query, cycled(FILLER, length))])
            except Exception as error:  # noqa: BLE001 - systems raise anything
                raised[length] = error
        return [length in raised for length in tried]

    spans = _runs(raises, sorted({*SHORT, *lengths}))
    last_working = {first - 1 for first, _ in spans if first > 1}
    audited = sorted({*lengths, *last_working} - raised.keys())
    if not audited:
        raise raised[max(lengths)]
    shortest = sorted({*audited, *SHORT[2:]} - raised.keys())[:3]
    return audited, shortest, [("text", first, last, raised[first]) for first, last in spans]


def _dependence(probe: _Probe, lengths: Sequence[int]) -> tuple[pd.Series, bool]:
    """Return `Audit.dependence` and `Audit.prefers_answer`, and set how the probe compares scores."""
    texts = [cycled(words, length) for words in (FILLER, probe.answer) for length in lengths]
    same = [("0", probe.query, text) for text in texts]
    own = [(str(number), probe.query, text) for number, text in enumerate(texts)]
    together, again, apart = map(probe.call, (same, same, own))
    turned = probe.call(same[::-1])[::-1]
    alone = np.concatenate([probe.call([row]) for row in same])
    spread = max(np.ptp(together), np.ptp(alone)) or 1.0
    changes = {"repeat": again - together, "rows": apart - together, "order": turned - together, "batch": alone - apart}
    effects = pd.Series(changes).map(lambda change: np.abs(change).max() / spread)
    dependent = _dependent(effects)
    probe.has_companions, probe.one_by_one = not {"rows", "batch"}.isdisjoint(dependent), "batch" in dependent
    probe.tolerance = spread * max(1e-6, 4 * effects.drop(dependent).max())
    return effects, bool(together[len(lengths) :].mean() > together[: len(lengths)].mean())


def _dependent(effects: pd.Series) -> list[str]:
    """Return the effects that are neither rounding nor chance."""
    return [name for name in _EFFECTS if effects[name] > max(ROUNDING, 3 * effects["repeat"])]


def _gold_read(probe: _Probe, texts: dict[Any, str], gold: pd.DataFrame, errors: list[Any]) -> int:
    """Return how many gold passages are read; add to the errors."""
    read = 0
    for pair, start, end in zip(keys_of(gold), gold["start"], gold["end"], strict=True):
        words = text_words(texts[pair])
        inside = [number for number, word in enumerate(words) if word[0] < end and word[1] > start]
        if not inside:
            raise ValueError(f"gold of {pair[1]!r} has a passage without words: set text_field= or text_loader=")
        versions = [texts[pair], put(texts[pair], inside[0], cycled(probe.answer, len(inside)))]
        try:
            read += int(probe.changes([(probe.query, version) for version in versions], texts[pair]).sum())
        except Exception as error:  # noqa: BLE001 - systems raise anything
            errors.append(("run", len(words), len(words), error))
    return read


def _parts(of: str, docno: str, text: str, read: list[Span], tokenizer: Any) -> list[Any]:
    """Return the rows of `Audit.frame` of a text."""
    words = text_words(text)
    marks: Sequence[int] = range(len(words) + 1)
    if tokenizer is not None:
        tokens = tokenized(tokenizer, text)
        # By the ends of words, because a token can begin with the space before its word.
        marks = [0, *map(int, tokens.tokens_before([end for _, end in words[:-1]])), len(tokens)]
    edges = [0, *chain.from_iterable(read), len(words)]  # unread and read parts alternate
    return [
        (of, docno, marks[-1], marks[first], marks[last], bool(number % 2))
        for number, (first, last) in enumerate(pairwise(edges))
        if first < last
    ]
