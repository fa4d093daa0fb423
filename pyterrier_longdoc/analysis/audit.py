"""Audit of any reranker: which parts of a text can change its score, and on what else the score depends."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, cycle, groupby, islice, pairwise, product
from typing import Any

import numpy as np
import pandas as pd
import pyterrier as pt

from ..common.arguments import check_arguments, check_type
from ..common.frames import check_columns, keys_of, texts_of
from ..common.language import SPACED_WORD, counted
from ..common.pipelines import stages_of
from ..common.plots import COLOURS, finish, new_axes
from ..common.presentation import described, percent
from ..common.progress import work_bar
from ..modelling.tokens import Span, tokenized
from .scoring import scores_by_row

QUERY = "how do bees make honey"

ANSWER = "bees collect nectar from flowers then make golden honey"
"""Its first word alone and its last word alone change a score, so that edges are exact."""

ROWS = 3
"""Rows of a query: the text stands between two others."""

FILLER = "it was a day like many others and nobody in the town had much to say ."
"""Its words and its full stop are one token each in common tokenizers."""

LENGTHS = (333, 1000, 1777)
"""In words; no multiples of common strides, so that lost tails differ."""

SHORT = (0, 1, 10, 100)
"""Lengths that are only tried for errors, besides the others; a query has the last one."""

OTHER = "three red chairs stood beside old tables under high windows"
"""Has no word of the filler and of the answer."""

BLOCK, BLOCKS = 25, 40
"""Blocks have this many words, or a text has so many of them if it is longer."""

ROUNDING, CHANCE = 1e-4, 0.05
"""Differences between scores of the same input, as a share of their spread: below is rounding, above is chance."""

_EFFECTS = {
    "rows": "the other rows of its query",
    "order": "the order of rows",
    "batch": "the other rows of a call",
    "score": "its first-stage score",
    "rank": "its first-stage rank",
    "docno": "its docno, so that what it reads cannot be seen",
}


@dataclass(frozen=True, eq=False, repr=False)
class Audit:
    """What a system reads; printed as sentences. See `audit`.

    Attributes:
        name: of the system.
        frame: one row per part of a text that is read throughout or never read: `of` ("text", "query", or "run" for a
            text of the run), its `docno`, its `length`, `start` and `end` of the part (half-open, in words, or in
            tokens of the tokenizer) and `read`, which is `<NA>` where chance hides it.
        unit: of these numbers, `"words"` or `"tokens"`.
        errors: `of, first, last, error`: texts with `first` to `last` words raise this error; texts longer than
            `lengths` were not tried. If `of` is "call", so many rows raise it that work in calls with one query each.
        dependence: the largest difference between scores of the same query and text, as a share of the spread of
            scores: in a `repeat` of the call, with other `rows` of the query, in another `order`, with other queries in
            the `batch`, and with another first-stage `score` (by up to 1), `rank` or `docno`.
        rows: the number of rows of a query with which this was tried.
        prefers_answer: whether the answer has a higher score than other text.
        same_places: whether texts of the same length are read at the same places.
        run: shares of the run: `text` and `gold` that are never read, with the numbers of `texts` and `passages`;
            empty without a run, and where chance hides what is read.
    """

    name: str
    frame: pd.DataFrame
    unit: str
    errors: pd.DataFrame
    dependence: pd.Series
    rows: int
    prefers_answer: bool
    same_places: bool
    run: pd.Series

    def __repr__(self) -> str:
        return "\n".join([f"Audit of {self.name}:", *(f"- {sentence}" for sentence in self.sentences())])

    def sentences(self) -> list[str]:
        """Return the findings, one in each sentence."""
        found, frame = [], self.frame
        share = self.dependence.map(lambda effect: f"by up to {percent(effect)} of the spread of scores")
        dependent = _dependent(self.dependence)
        if self.dependence["repeat"] > ROUNDING:
            consequence = (
                "places are approximate, and more can be read" if len(frame) else "what it reads cannot be seen"
            )
            found.append(f"Two calls with the same input differ {share['repeat']}: {consequence}.")
        if not self.same_places:
            found.append("Texts of the same length are read at different places: what it reads cannot be seen.")
        tried = f", in queries of {self.rows} rows" if {"rows", "batch"}.intersection(dependent) else ""
        found += [f"{self._reading(of)}{tried}." for of in ("text", "query") if frame["of"].eq(of).any()]
        if frame["read"].any():
            found.append(f"Gaps shorter than {2 * BLOCK} words, or than 1/{BLOCKS // 2} of a text, can go unseen.")
        if not (self.prefers_answer or frame["read"].fillna(False).all()):
            found.append("The answer does not get higher scores than other text: a maximum can hide text that is read.")
        for of, first, last, error in self.errors.drop_duplicates(["of", "error"]).itertuples(index=False):
            what, span = "text of the run" if of == "run" else of, f"{first:,} to " if first < last else ""
            unit = "row" if of == "call" else "word"
            found.append(f"Raises an error for a {what} with {span}{last:,} {unit}{'s' * (last != 1)}: {error}")
        if self.dependence["repeat"] <= CHANCE:
            on = ", ".join(f"{_EFFECTS[name]} ({share[name]})" for name in dependent) or "its query and its text only"
            found.append(f"A score depends on {on}, in queries of up to {self.rows} rows.")
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
        at_least, by = ("at least ", " by more than chance") if parts["read"].isna().any() else ("", "")
        if not end:
            return f"No part of a {of} changes the score{by} (up to {longest:,} {self.unit} tried)"
        if all(spans == [(0, min(length, end))] for length, spans in read.items()):
            if end == longest:
                return f"Reads all {self.unit} of a {of} (up to {longest:,} tried)"
            if len(read) == 1:
                return f"Reads {at_least}the first {end:,} {self.unit} of a {of} of {longest:,}"
            if sum(length > end for length in read) > 1:  # one alone can also have lost its tail
                return f"Reads {at_least}the first {end:,} {self.unit} of a {of} (up to {longest:,} tried)"
        texts = []
        for length, spans in read.items():
            places = [f"{start + 1:,} to {end:,}" for start, end in spans]
            texts.append(f"{' and '.join(places) or 'nothing'} of {length:,}")
        return f"Of a {of}, reads {at_least}the {self.unit} {'; '.join(texts)}"


def audit(
    system: Any,
    run: pd.DataFrame | None = None,
    gold: pd.DataFrame | None = None,
    *,
    lengths: Sequence[int] = LENGTHS,
    sample: int = 20,
    query: str = QUERY,
    answer: str = ANSWER,
    rows: int = ROWS,
    tokenizer: Any = None,
    text_field: str = "text",
    text_loader: Any = None,
    verbose: bool = False,
) -> Audit:
    """Find out which parts of a text a reranker reads, and on what else its scores depend.

    In texts of filler words, the answer to a query, repeated, replaces a block of 25 words (in long texts, a fortieth
    of the text), one block after the other. Where this changes the score, the system reads. Bisection finds the edges
    of read parts, to the word. No read part is lost, but an unread part between two read ones is missed if it is
    shorter than a block, and can be missed if it is shorter than two.

    If scores depend on the other rows of a query, as the ranks of a language model do, each text is scored between
    others, which differ from it in the first and the last word. If they depend on the other rows of a call, each call
    has one query, which is slow. With the defaults and without a run, about 200 texts are scored. What `BM25Windows`
    and similar steps select by content counts as read, because they select the answer.

    A maximum shows a part only if the answer scores higher than the rest of the text, which the audit checks and
    reports: untrained weights can read more than is found. Lengths between those tried may be read differently.

    Args:
        system: a reranker that returns each row of `qid, query, docno` and the text column with a score, or a function
            `(queries, texts) -> scores`. The column of a model's `instruction_field` is empty. Its progress bars and
            warnings are hidden, and its `coverage` stays that of its last call.
        run: results with `qid`, `docno` and the text column. The answer also replaces words of these texts, which can
            have more tokens per word than the filler.
        gold: `qid, docno, start, end`: the characters of relevant passages, such as a collection's `gold` or
            `relevant_positions(...).matched`. A passage of the run is never read if the answer in its place does not
            change the score.
        lengths: the lengths of the filler texts in words.
        sample: the maximum number of texts of the run in which parts are searched; they are evenly spaced by length.
        query: a query for which neither the filler nor the texts of the run are relevant.
        answer: a few words with the answer, of which the first and the last already change a score.
        rows: the number of rows of a query, at least 3. With more, a text is scored between others even if its score
            does not seem to depend on them.
        tokenizer: a fast Hugging Face tokenizer, its name or folder, to report places in tokens; None reports words.
        text_field: the text column.
        text_loader: loads the texts of the run if the column is missing.
        verbose: show a progress bar over the texts.

    Returns:
        An object that prints as sentences and has a `frame` and a `plot`.

    Raises:
        Exception: the error of the system, if it raises one at every length.
        ValueError: for invalid arguments, and for a pipeline that begins with a first stage or a text loader.

    Example:
        >>> audit(lambda queries, texts: ["bees" in " ".join(text.split()[:300]) for text in texts])
        Audit of <lambda>:
        - Reads the first 300 words of a text (up to 1,777 tried).
        - No part of a query changes the score (up to 100 words tried).
        - Gaps shorter than 50 words, or than 1/20 of a text, can go unseen.
        - A score depends on its query and its text only, in queries of up to 3 rows.
    """
    check_type(Callable, "a transformer or a function (queries, texts) -> scores", system=system)
    for name, given in (("lengths", lengths), ("answer", answer.split()), ("run", [()] if run is None else run)):
        if not len(given):
            raise ValueError(f"{name} must not be empty")
    check_arguments("int", at_least=1, sample=sample, lengths=min(lengths))
    check_arguments("int", at_least=ROWS, rows=rows)
    if isinstance(system, pt.Transformer):
        _check_first(next(iter(system)) if isinstance(system, pt.Compose) else system, text_field)
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
    probe = _Probe(system, query, answer, rows, text_field)
    audited, shortest = _tried(probe, lengths)
    dependence, prefers_answer = _dependence(probe, shortest)
    by_chance, same_places = dependence["repeat"] > ROUNDING, True
    documents = sorted({(len(text_words(text)), docno, text) for (_, docno), text in zip(pairs, texts, strict=True)})
    number = min(sample, len(documents))
    documents = [documents[int((i + 0.5) * len(documents) / number)] for i in range(number)]
    jobs = [("text", "", cycled(FILLER, length), "") for length in audited]
    jobs += [("query", "", cycled(FILLER, SHORT[-1]), cycled(answer, audited[0]))]
    jobs += [("run", docno, text, "") for _, docno, text in documents]
    if dependence["repeat"] > CHANCE or "docno" in _dependent(dependence):  # other words have another docno
        jobs = []
    parts: list[Any] = []
    with work_bar("audit", "text", len(jobs), shown=verbose) as bar:
        for of, docno, text, document in jobs:
            try:
                read, consistent = probe.read(text, document)
                same_places = consistent or by_chance
                parts += _parts(of, docno, text, read, tokenizer)
            except Exception as error:  # noqa: BLE001 - systems raise anything
                length = len(text_words(text))
                probe.errors.append((of, length, length, error))
                if of == "run":  # it gets no score, so that nothing of it counts
                    parts += _parts(of, docno, text, [], tokenizer)
            if not same_places:
                parts = []
                break
            bar.update()
    frame = pd.DataFrame(parts, columns=["of", "docno", "length", "start", "end", "read"]).astype({"read": "boolean"})
    shares: dict[str, float] = {}
    if by_chance:
        frame["read"] = frame["read"].where(frame["read"])
    elif run is not None and len(frame):
        own = frame[frame["of"] == "run"]
        sizes = own["end"] - own["start"]
        shares = {"text": sizes[~own["read"]].sum() / max(1, sizes.sum()), "texts": len(documents)}
        if gold is not None:
            shares |= {"gold": 1 - _gold_read(probe, by_pair, gold) / len(gold), "passages": len(gold)}
    name, unit = getattr(system, "__qualname__", None) or described(system), "words" if tokenizer is None else "tokens"
    messages = [(*at, f"{type(error).__name__}: {' '.join(str(error).split())[:200]}") for *at, error in probe.errors]
    raised = pd.DataFrame(messages, columns=["of", "first", "last", "error"])
    of_run = pd.Series(shares, dtype="float64")
    return Audit(name, frame, unit, raised, dependence, rows, prefers_answer, same_places, of_run)


def text_words(text: str) -> list[Span]:
    """Return the characters of each word between white space."""
    return [match.span() for match in re.finditer(SPACED_WORD, text)]


def cycled(text: str, length: int) -> str:
    """Return a text of so many words, which are those of the given text again and again."""
    return " ".join(islice(cycle(text.split()), length))


def put(text: str, place: int, answer: str) -> str:
    """Replace the words from a place on by those of an answer, as far as the text has words.

    Example:
        >>> put("a b c d", 1, "x y"), put("a b c d", 3, "x y"), put("a b c d", 4, "x y")
        ('a x y d', 'a b c x', 'a b c d')
    """
    answers = answer.split()
    words = text_words(text)[place : place + len(answers)]
    if not words:
        return text
    return f"{text[: words[0][0]]}{' '.join(answers[: len(words)])}{text[words[-1][1] :]}"


def companions(text: str, number: int) -> list[str]:
    """Return texts that differ from a text in its first and its last word, and from each other (up to 100)."""
    last = len(text_words(text)) - 1
    words = islice(cycle(product(OTHER.split(), repeat=2)), number)
    return [put(put(text, 0, first), last, final) for first, final in words]


@contextmanager
def _without_trace(system: Any) -> Iterator[None]:
    """Hide the bars and warnings of a system in a call, and restore what it remembers of its calls."""
    stages = list(stages_of(system)) if isinstance(system, pt.Transformer) else []
    for stage in stages[:]:
        inner = getattr(getattr(stage, "preselect", None), "model", None), getattr(stage, "backbone", None)
        stages += [part for part in (inner[0], getattr(inner[1], "scorer", None)) if isinstance(part, pt.Transformer)]
    names = {"coverage", "counts", "warned", "verbose"}
    before = [{name: vars(stage)[name] for name in names & vars(stage).keys()} for stage in stages]
    for stage, values in zip(stages, before, strict=True):
        # Not by setattr, after which a model would be set up again.
        hidden = {"verbose": False, "warned": set()}
        vars(stage).update({name: hidden[name] for name in hidden.keys() & values.keys()})
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            yield
    finally:
        for stage, values in zip(stages, before, strict=True):
            vars(stage).update(values)


@dataclass
class _Probe:
    """Compares the scores of texts with and without an answer."""

    system: Any
    query: str
    answer: str
    rows: int
    text_field: str
    has_companions: bool = False  # whether each text is scored between others
    one_by_one: bool = False  # whether each query has its own call
    tolerance: float = 0.0
    errors: list[Any] = field(default_factory=list)

    def frame(self, rows: Sequence[tuple[str, str, str]]) -> pd.DataFrame:
        """Return rows with a qid, a query and a text."""
        return pd.DataFrame(rows, columns=["qid", "query", self.text_field])

    def call(self, frame: pd.DataFrame, **first_stage: Any) -> np.ndarray:
        """Return the scores of rows that are scored in one call."""
        with _without_trace(self.system):
            if not isinstance(self.system, pt.Transformer):
                queries, texts = frame["query"].tolist(), frame[self.text_field].tolist()
                from ..modelling.external import PairScorer  # loads torch

                return PairScorer(self.system).score(queries, texts, len(texts))
            if instructions := getattr(self.system, "instruction_field", None):
                frame = frame.assign(**{instructions: ""})
            return scores_by_row(self.system, frame, described(self.system), **first_stage)

    def changes(self, pairs: Sequence[tuple[str, str]], companion: str) -> np.ndarray:
        """Return for each pair of a query and a text but the first whether its score differs from that of the first."""
        # Before and after, because ties can be in the order of rows or in the reverse order; and distinct, because a
        # system can merge equal texts.
        others = companions(companion, self.rows - 1) if self.has_companions else []
        half, size = len(others) // 2, len(others) + 1
        groups = [(query, [*others[:half], text, *others[half:]]) for query, text in pairs]
        frame = self.frame([(str(n), query, text) for n, (query, texts) in enumerate(groups) for text in texts])

        def scored(step: int) -> np.ndarray:
            return np.concatenate([self.call(frame[start : start + step]) for start in range(0, len(frame), step)])

        try:
            scores = scored(size if self.one_by_one else len(frame))
        except Exception as error:
            if self.one_by_one:
                raise
            scores = scored(size)  # raises unless the size of the call is the cause
            self.one_by_one = True
            self.errors.append(("call", len(frame), len(frame), error))
        scores = scores[half::size]
        return np.abs(scores[1:] - scores[0]) > self.tolerance

    def read(self, text: str, document: str) -> tuple[list[Span], bool]:
        """Return the parts of a text, or of the query of a document, that are read, in words, and if that is certain.

        It is uncertain if other parts are read in another text of the same length.
        """
        length = len(text_words(text))
        size = max(BLOCK, length // BLOCKS)

        def block(place: int) -> str:  # the part in the text, which begins and ends like the answer
            words = min(place + size, length) - max(place, 0)
            return " ".join([*cycled(self.answer, max(words - 1, 1)).split(), self.answer.split()[-1]][:words])

        def is_read(text: str, places: list[int]) -> np.ndarray:
            versions = [text, *(put(text, max(place, 0), block(place)) for place in places)]
            pairs = [(version, document) if document else (self.query, version) for version in versions]
            return self.changes(pairs, OTHER if document else text)

        # Outside of the text at both ends, so that edges are found at its ends as well.
        runs = _runs(partial(is_read, text), [*range(-size, length, size), length])
        found = [(first + size - 1, last + 1) for first, last in runs]  # the first block only reaches it
        read = [(start, end) for start, end in found if start < end]
        if text != cycled(FILLER, length):  # other words can have more or fewer tokens
            return read, True
        twin = put(text, 0, "he")  # as many letters and tokens
        unread = zip([0, *(end for _, end in read)], [*(start for start, _ in read), length], strict=True)
        again = [place for start, end in unread for place in range(start, end - size + 1, size)]
        return read, read == found and not (again and is_read(twin, again).any())


def _runs(holds: Callable[[list[int]], Iterable[bool]], places: list[int]) -> list[Span]:
    """Return the first and last number of each run of numbers for which something holds, exact by bisection."""
    found = dict(zip(places, holds(places), strict=True)) if places else {}
    while middles := [(a + b) // 2 for a, b in pairwise(sorted(found)) if b - a > 1 and found[a] != found[b]]:
        found |= zip(middles, holds(middles), strict=True)
    runs = [list(run) for held, run in groupby(sorted(found), key=found.__getitem__) if held]
    return [(run[0], run[-1]) for run in runs]


def _tried(probe: _Probe, lengths: Sequence[int]) -> tuple[list[int], list[int]]:
    """Return the lengths to audit and the shortest lengths that work; add to the errors."""
    raised: dict[int, Exception] = {}

    def raises(tried: list[int]) -> list[bool]:
        for length in tried:
            try:
                probe.call(probe.frame([("0", probe.query, cycled(FILLER, length))]))
            except Exception as error:  # noqa: BLE001 - systems raise anything
                raised[length] = error
        return [length in raised for length in tried]

    spans = _runs(raises, sorted({*SHORT, *lengths}))
    last_working = {first - 1 for first, _ in spans if first > 1}
    audited = sorted({*lengths, *last_working} - raised.keys())
    if not audited:
        raise raised[max(lengths)]
    shortest = sorted({*audited, *SHORT[2:]} - raised.keys())[:3]
    probe.errors += [("text", first, last, raised[first]) for first, last in spans]
    return audited, shortest


def _dependence(probe: _Probe, lengths: Sequence[int]) -> tuple[pd.Series, bool]:
    """Return `Audit.dependence` and `Audit.prefers_answer`, and set how the probe compares scores."""
    texts = [cycled(words, length) for words in (FILLER, probe.answer) for length in lengths]
    texts += companions(texts[0], max(0, probe.rows - len(texts)))
    same = probe.frame([("0", probe.query, text) for text in texts])
    own, turned = same.assign(qid=same.index.astype(str)), same[::-1]
    other = probe.frame([(f"other {number}", OTHER, texts[0]) for number in range(2)]).set_axis([-2, -1])

    def scores(frame: pd.DataFrame, **first_stage: Any) -> pd.Series:
        columns = {"rank": np.abs(frame.index), **first_stage}  # ranks are the same in another order or query
        try:
            return pd.Series(probe.call(frame, **columns), frame.index)
        except Exception as error:
            if len(frame) == 1:
                raise
            rows = [
                (frame.iloc[[i]], {name: values[[i]] for name, values in columns.items()}) for i in range(len(frame))
            ]
            found = pd.Series(np.concatenate([probe.call(row, **own) for row, own in rows]), frame.index)
            if not probe.one_by_one:  # the size of the call was the cause
                probe.errors.append(("call", len(frame), len(frame), error))
            probe.one_by_one = True
            return found

    together, apart = scores(same), scores(own)
    alone = pd.concat([scores(own.loc[[row]]) for row in own.index])
    amid_others = scores(pd.concat([other[:1], own, other[1:]])).drop(other.index)
    new_docnos = scores(same.set_axis(same.index + len(same)), rank=same.index).set_axis(same.index)
    spread = max(np.ptp(together), np.ptp(alone)) or 1.0
    changes = {
        "repeat": scores(same) - together,
        "rows": apart - together,
        "order": scores(turned) - together,
        "batch": alone - amid_others,
        "score": scores(same, score=same.index / len(same)) - together,
        "rank": scores(same, rank=turned.index) - together,
        "docno": new_docnos - together,
    }
    effects = pd.Series(changes).map(lambda change: change.abs().max() / spread)
    dependent = _dependent(effects)
    probe.one_by_one |= "batch" in dependent
    probe.has_companions = probe.rows > ROWS or not {"rows", "batch"}.isdisjoint(dependent)
    probe.tolerance = spread * max(1e-6, 4 * effects.drop(dependent).max())
    fillers, answers = together[: len(lengths)], together[len(lengths) : 2 * len(lengths)]
    return effects, bool(answers.mean() > fillers.mean())


def _dependent(effects: pd.Series) -> list[str]:
    """Return the effects that are neither rounding nor chance."""
    return [name for name in _EFFECTS if effects[name] > max(ROUNDING, 3 * effects["repeat"])]


def _check_first(stage: pt.Transformer, text_field: str) -> None:
    """Raise ValueError for a first stage, which adds documents, or a text loader."""
    for given, added in ((["qid", "query"], "docno"), (["qid", "query", "docno", "score", "rank"], text_field)):
        if added in (pt.inspect.transformer_outputs(stage, given, strict=False) or ()):
            what = "the first stage" + " and the text loader" * (added != "docno")
            raise ValueError(f"audit takes a reranker: leave out {what}, {described(stage)}")


def _gold_read(probe: _Probe, texts: dict[Any, str], gold: pd.DataFrame) -> int:
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
            probe.errors.append(("run", len(words), len(words), error))
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
