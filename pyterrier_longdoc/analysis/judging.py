"""Relevance judgements by a language model, chunk by chunk, and how far they agree with people's."""

from __future__ import annotations

import re
import unicodedata
import warnings
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from typing import Any

import numpy as np
import pandas as pd
import pyterrier as pt

from ..common.arguments import check_choice
from ..common.frames import TextField, field_names, strings, texts_of, validated
from ..common.language import token_spans
from ..common.presentation import Presented
from ..listwise.backends.base import required
from ..listwise.client import LLMClient, wrapped
from ..listwise.errors import IncompleteReplyWarning, UnreadableReplyError
from ..listwise.ledger import Ledger
from ..listwise.parallel import Lock, in_parallel
from ..listwise.parsing import without_reasoning
from ..listwise.prompts import Message, check_fields, clean, reminder
from ..modelling.texts import TokenizedText, tokenize
from ..modelling.windows import SentenceWindows

UNJUDGED = -1
"""Grade of a chunk, and label of a document, that has none; evaluation tools take negative labels for not judged."""

SYSTEM = "You assess search results. You are careful, and you judge only by what is written in the text."

REQUEST = """How useful is the text below to somebody who typed this query into a search engine?

Query: {query}

Text: {text}

Think of what the person most likely wants to know, and of how much of it the text tells and how reliably. Then choose \
one grade:
3 = the text is about the query and answers it fully and clearly;
2 = it answers the query in part, or the answer is mixed with much else;
1 = it is on the topic, but does not answer the query;
0 = it has nothing to do with the query.

Answer with one line and nothing else, in the form
grade: N"""

ANSWER_AGAIN = (
    "That answer could not be read. Answer again with one line and nothing else: grade: N, with N from 0 to 3"
)

_GRADE = re.compile(r"(?:^|[\s{\"'*#(])grade[\"'*]*\s*[:=][\s\"'*]*([0-3])(?![\w/-]|[.,]\d)", re.IGNORECASE)
_BARE = re.compile(r"\s*[*\"'`]*([0-3])[*\"'`]*\.?\s*")


def parse_grade(reply: str) -> int | None:
    """Reads a grade from 0 to 3: a reply that is one digit, or the last `grade: N` in it; nothing else.

    Example:
        >>> parse_grade("<think>grade: 1?</think>Grade: 2")
        2
        >>> parse_grade("I cannot judge this (see rule 3).") is None
        True
    """
    text = unicodedata.normalize("NFKC", without_reasoning(reply))
    if bare := _BARE.fullmatch(text):
        return int(bare[1])
    found = _GRADE.findall(text)
    return int(found[-1]) if found else None


@dataclass(frozen=True)
class Judgement:
    """What a judge says of one document.

    Attributes:
        spans: characters of each chunk that was shown.
        grades: one per chunk.
        share: share of the text that was shown.
    """

    spans: list[tuple[int, int]]
    grades: list[int]
    share: float

    @property
    def label(self) -> int:
        """The highest grade; 0 for a blank text, in which there is nothing to find."""
        return max(self.grades, default=0)

    @property
    def best(self) -> int:
        """The first chunk with the highest grade; -1 if none was judged."""
        return self.grades.index(self.label) if self.grades and self.label != UNJUDGED else -1


@dataclass(eq=False, repr=False)
class RelevanceJudge(Presented, pt.Transformer):
    """Grades documents from 0 to 3 by asking a language model about each chunk; the best chunk decides.

    Source: UMBRELA (Upadhyay et al. 2024), with this package's own wording; chunks of whole sentences as in the
    positional study of Boytsov et al. 2025, who take 256 tokens (128 for BEIR) and at most 36 chunks, and call a chunk
    relevant if its grade is above 0.

    Reads a frame with `qid, query, docno` and the text column(s) and returns the same rows, order and index with the
    columns `label` (highest grade; 0 for a blank text, -1 if no chunk could be judged), `chunk_grades` (list),
    `chunk_spans` (characters `(start, end)` of each chunk), `best_chunk` (index of the first chunk with the highest
    grade; -1 if none), and `judged_share` (share of the text's characters up to the end of the last chunk that was
    shown: less than 1 where `max_chunks` cut the document); columns of these names are replaced. Scores and ranks are
    left alone.

    Args:
        llm: an `LLMClient` (cache, prices, spend cap), a backend, or a function from messages to a string.
        chunk_tokens: most tokens in a chunk; only a sentence longer than this is divided.
        max_chunks: judge the first so many chunks of a document; None for all.
        tokenizer: a fast Hugging Face tokenizer that counts tokens; None counts words and punctuation marks, which
            is about 3/4 of what word pieces come to.
        request: the wording; must use `{query}` and `{text}` and ask for `grade: N`.
        on_failure: if a chunk has no readable grade after all retries: `"raise"` or `"unjudged"` (grade -1).
        retries: further calls after an unreadable reply, each with a reminder.
        concurrency: documents in flight at the same time.
        text_field: the column with the text, or a tuple of columns that are joined by a space.
        text_loader: supplies the text where the column is absent.
        verbose: show a progress bar.
    """

    llm: Any
    _: KW_ONLY
    chunk_tokens: int = 256
    max_chunks: int | None = 36
    tokenizer: Any = None
    request: str = REQUEST
    on_failure: str = "raise"
    retries: int = 2
    concurrency: int = 1
    text_field: TextField = "text"
    text_loader: Any = None
    verbose: bool = False

    def __post_init__(self) -> None:
        self._wrapped: tuple[Any, LLMClient] | None = None
        self._check()

    def __repr__(self) -> str:
        return f"RelevanceJudge({self._client().backend!r})"

    @property
    def ledger(self) -> Ledger:
        """The calls of this object, and of all others that share its `LLMClient`."""
        return self._client().ledger

    def grade(self, query: str, chunk: str, *, qid: str = "") -> int:
        """Grades one text.

        Args:
            query: the query's text.
            chunk: the text.
            qid: where the ledger enters the call.

        Returns:
            0 to 3; -1 without a readable reply if `on_failure` is `"unjudged"`.

        Raises:
            UnreadableReplyError: without a readable reply, if `on_failure` is `"raise"`.
            BackendError: if the model cannot be asked.
        """
        messages: list[Message] = [
            {"role": "system", "content": SYSTEM},
            {"role": "user", "content": self.request.format(query=clean(query), text=clean(chunk))},
        ]
        client, reply = self._client(), ""
        for attempt in range(self.retries + 1):
            if attempt:
                messages = reminder(messages, reply, ANSWER_AGAIN)
            reply = client.ask(qid, messages)
            grade = parse_grade(reply)
            if grade is not None:
                return grade
        if self.on_failure == "raise":
            raise UnreadableReplyError(
                f"query {qid or query!r}: no grade in the reply after {self.retries} retries: {reply[:200]!r}. Raise "
                f"retries=, or let the run go on with on_failure='unjudged'"
            )
        return UNJUDGED

    def chunks(self, text: str) -> list[tuple[int, int]]:
        """Characters `(start, end)` of all chunks of a text; none of a blank one."""
        tokens = tokenized(self.tokenizer, text)
        if not len(tokens):
            return []
        return [tokens.characters(span) for span in SentenceWindows(max_tokens=self.chunk_tokens)(tokens)]

    def transform(self, inp: pd.DataFrame) -> pd.DataFrame:
        """Judges every row; rows with the same query and text are judged once.

        Args:
            inp: `qid, query, docno` and the text column(s); any other columns are kept.

        Returns:
            A new frame: same rows, order and index, with the columns described above.

        Raises:
            pt.validate.InputValidationError: if a column is missing.
            UnreadableReplyError: without a readable reply, if `on_failure` is `"raise"`.
            BackendError: if the model cannot be asked. Replies so far are in the cache.
            SpendCapError: if the next call might pass the cap. Replies so far are in the cache.
        """
        text_columns = validated(inp, self.text_field, self.text_loader, self)
        self._check()
        queries = strings(inp["query"], "query")
        texts = texts_of(inp, text_columns, self.text_loader) if len(inp) else []
        pairs = list(zip(queries, texts, strict=True))
        judged = self._judge_all({pair: str(qid) for pair, qid in zip(pairs, inp["qid"].tolist(), strict=True)})
        rows = [judged[pair] for pair in pairs]
        return inp.assign(
            label=np.asarray([row.label for row in rows], dtype=np.int64),
            chunk_grades=pd.Series([row.grades for row in rows], index=inp.index, dtype=object),
            chunk_spans=pd.Series([row.spans for row in rows], index=inp.index, dtype=object),
            best_chunk=np.asarray([row.best for row in rows], dtype=np.int64),
            judged_share=np.asarray([row.share for row in rows], dtype="float64"),
        )

    def _judge_all(self, qids: dict[tuple[str, str], str]) -> dict[tuple[str, str], Judgement]:
        # Chunked before threads start: tokenizers may not be shared between them.
        spans = {pair: self.chunks(pair[1]) for pair in qids}
        shown = {pair: found[: self.max_chunks] for pair, found in spans.items()}
        lock = Lock()
        with pt.tqdm(
            total=sum(map(len, shown.values())), desc="RelevanceJudge", unit="chunk", disable=not self.verbose
        ) as bar:

            def judge(pair: tuple[str, str], check: Callable[[], None]) -> Judgement:
                query, text = pair
                grades = []
                for start, end in shown[pair]:
                    check()
                    grades.append(self.grade(query, text[start:end], qid=qids[pair]))
                    with lock:
                        bar.update()
                # White space after the last chunk is nothing that was left out.
                share = shown[pair][-1][1] / spans[pair][-1][1] if grades else 1.0
                return Judgement(shown[pair], grades, share)

            judgements = in_parallel(judge, list(qids), self.concurrency)
        missing = sum(grade == UNJUDGED for one in judgements for grade in one.grades)
        if missing:
            warnings.warn(
                f"RelevanceJudge: {missing} of {sum(len(one.grades) for one in judgements)} chunks had no readable "
                f"grade and count as unjudged (-1).",
                IncompleteReplyWarning,
                stacklevel=3,
            )
        return dict(zip(qids, judgements, strict=True))

    def _client(self) -> LLMClient:
        self._wrapped = wrapped(self.llm, self._wrapped)
        return self._wrapped[1]

    def _check(self) -> None:
        self._client()
        field_names(self.text_field)
        check_choice("on_failure", self.on_failure, ("raise", "unjudged"))
        for name, least in (("chunk_tokens", 1), ("retries", 0), ("concurrency", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"{name}={getattr(self, name)} must be at least {least}")
        if self.max_chunks is not None and self.max_chunks < 1:
            raise ValueError(f"max_chunks={self.max_chunks} must be at least 1, or None")
        check_fields("request", self.request, {"query", "text"}, required={"query", "text"})


def tokenized(tokenizer: Any, text: str) -> TokenizedText:
    """A text's tokens with their characters.

    Args:
        tokenizer: a fast Hugging Face tokenizer; None takes words and punctuation marks, as `count_tokens` does.
        text: any text.
    """
    if tokenizer is not None:
        return tokenize(tokenizer, [text], offsets=True)[0]
    spans = np.array(token_spans(text), dtype=np.int32).reshape(-1, 2)
    return TokenizedText(np.zeros(len(spans), dtype=np.int32), text, spans[:, 0], spans[:, 1])


@dataclass(frozen=True)
class Agreement:
    """How far two sets of labels agree.

    Attributes:
        pairs: number of (qid, docno) that both have judged.
        unjudged: number of pairs in both to which the judge gave no label.
        kappa: Cohen's kappa of the labels as they are.
        weighted_kappa: with quadratic weights, which forgive neighbouring grades.
        binary_kappa: of relevant against not relevant.
        confusion: counts, one row per label of the qrels, one column per label of the judge.
    """

    pairs: int
    unjudged: int
    kappa: float
    weighted_kappa: float
    binary_kappa: float
    confusion: pd.DataFrame


def agreement(judged: pd.DataFrame, qrels: pd.DataFrame, *, relevant_from: int = 1) -> Agreement:
    """Compares a judge's labels with those of people.

    Args:
        judged: `qid, docno, label`, e.g. of a `RelevanceJudge`.
        qrels: `qid, docno, label`; negative labels (spam, in web collections) count as 0.
        relevant_from: smallest label that is relevant, in both; 1 in Boytsov et al. 2025.

    Returns:
        Kappas by scikit-learn, which gives NaN where both have one and the same label for everything.

    Raises:
        ImportError: without scikit-learn.
        ValueError: if a column is missing, or no pair is in both.
    """
    sklearn_metrics = required("sklearn.metrics")
    columns = ["qid", "docno", "label"]
    for name, frame in (("judged", judged), ("qrels", qrels)):
        if absent := [column for column in columns if column not in frame.columns]:
            raise ValueError(f"{name} lacks the column(s) {', '.join(absent)}")
    theirs, ours = (frame[columns].astype({"qid": str, "docno": str}) for frame in (qrels, judged))
    both = ours.drop_duplicates(["qid", "docno"]).merge(
        theirs.drop_duplicates(["qid", "docno"]), on=["qid", "docno"], suffixes=("_judge", "_qrels")
    )
    known = both[both["label_judge"] != UNJUDGED]
    if known.empty:
        raise ValueError("no (qid, docno) has a label in both judged and qrels")
    human, judge = known["label_qrels"].clip(lower=0).astype(int), known["label_judge"].astype(int)
    kappa = sklearn_metrics.cohen_kappa_score
    return Agreement(
        pairs=len(known),
        unjudged=len(both) - len(known),
        kappa=float(kappa(human, judge)),
        weighted_kappa=float(kappa(human, judge, weights="quadratic")),
        binary_kappa=float(kappa(human >= relevant_from, judge >= relevant_from)),
        confusion=pd.crosstab(human.rename("qrels"), judge.rename("judge")),
    )
