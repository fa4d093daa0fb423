"""Relevance judgements by a language model, chunk by chunk, and their agreement with human judgements."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from functools import partial
from typing import Any, ClassVar

import pandas as pd
import pyterrier as pt

from ..common.arguments import argument, validate
from ..common.files import full_name, import_extra
from ..common.frames import (
    TextField,
    TruncationWarning,
    check_columns,
    documents,
    field_names,
    integer_labels,
    strings,
    texts_of,
    validated,
)
from ..common.parallel import RunAll, in_parallel
from ..common.presentation import NotebookMixin
from ..common.progress import work_bar
from ..common.warnings import warn, warn_of_queries, warn_of_texts
from ..listwise.client import AsksLLM, describe_failure, read_reply
from ..listwise.parsing import IncompleteReplyWarning, UnreadableReplyError, final_answer
from ..listwise.prompts import Message, check_template, clean
from ..modelling.excerpts import best_passages
from ..modelling.preselection import WindowSelector, check_preselection
from ..modelling.tokens import TokenizedText, tokenized
from ..modelling.windows import SentenceWindows, Span

UNJUDGED = -1
"""Grade of an unjudged chunk and label of an unjudged document; evaluation tools ignore negative labels."""

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

GRADE_AGAIN = "That answer could not be read. Answer again with one line and nothing else: grade: N, with N from 0 to 3"

JUDGEMENT_COLUMNS: dict[str, Any] = {
    "label": "int64",
    "chunk_grades": object,
    "chunk_spans": object,
    "best_chunk": "int64",
    "judged_share": "float64",
}
"""The columns that a judge adds to a frame, with their types."""

_GRADE = re.compile(r"(?:^|[\s{\"'*#(])grade[\"'*]*\s*[:=][\s\"'*]*([0-3])(?![\w/-]|[.,]\d)", re.IGNORECASE)
_BARE = re.compile(r"\s*[*\"'`]*([0-3])[*\"'`]*\.?\s*")


def parse_grade(reply: str) -> int | None:
    """Return the grade (0 to 3) in a reply that is one digit or contains `grade: N` (the last one counts), or None.

    Example:
        >>> parse_grade("<think>grade: 1?</think>Grade: 2")
        2
        >>> parse_grade("I cannot judge this (see rule 3).") is None
        True
    """
    text = unicodedata.normalize("NFKC", final_answer(reply))
    if bare := _BARE.fullmatch(text):
        return int(bare[1])
    matches = _GRADE.findall(text)
    return int(matches[-1]) if matches else None


@dataclass(eq=False, repr=False)
class RelevanceJudge(AsksLLM, NotebookMixin, pt.Transformer):
    """Grades documents from 0 to 3 with a language model: each chunk gets a grade, and the best chunk counts.

    Source: UMBRELA (Upadhyay et al. 2024), with a different prompt. Documents are split into chunks of whole sentences
    as in the positional study of Boytsov et al. 2025, which uses 256 tokens (128 for BEIR), at most 36 chunks, and
    calls a chunk relevant if its grade is above 0.

    The input has `qid, query, docno` and the text column(s). Rows, order, index, scores and ranks stay the same. New
    columns (existing ones are replaced):

    - `label`: the highest grade; 0 for a blank text, -1 if no chunk could be judged;
    - `chunk_grades`: the list of grades;
    - `chunk_spans`: the characters `(start, end)` of each judged chunk;
    - `best_chunk`: the index of the first judged chunk with the highest grade; -1 if there is none;
    - `judged_share`: the share of the text (in characters of all chunks) that was judged. It is below 1 if `max_chunks`
      truncated the document or `preselect` selected chunks.

    Args:
        llm: an `LLMClient` (with a cache and counts of tokens), a backend, or a function from messages to a string.
        chunk_tokens: the maximum number of tokens of a chunk. Only longer sentences are split.
        max_chunks: judge only the first chunks of a document; None for all.
        preselect: selects the chunks to judge by the query, instead of `max_chunks`: `FirstK`, `BM25Windows`,
            `EmbeddingWindows` or `CrossEncoderWindows`.
        tokenizer: a fast Hugging Face tokenizer or its name, to count tokens. None counts words and punctuation marks,
            which gives about 3/4 of the number of word pieces.
        request: the prompt; it must contain `{query}` and `{text}` and ask for `grade: N`.
        on_failure: what to do if a chunk has no readable grade after all retries: `"raise"`, or `"unjudged"` for grade
            -1.
        retries: the maximum number of further calls after an unreadable reply, each with a reminder.
        concurrency: the number of documents judged at the same time.
        text_field: the column with the text, or a tuple of columns, joined by a space.
        text_loader: loads the text if the column is missing.
        verbose: show a progress bar.

    Example:
        `qrels = ld.RelevanceJudge(ld.OpenAIBackend("gpt-4.1"))(run)`
    """

    papers: ClassVar[tuple[str, ...]] = ("upadhyay-2024-umbrela", "boytsov-2025-positional")

    llm: Any
    _: KW_ONLY
    chunk_tokens: int = argument(256, at_least=1)
    max_chunks: int | None = argument(36, at_least=1)
    preselect: WindowSelector | None = None
    tokenizer: Any = None
    request: str = REQUEST
    on_failure: str = argument("raise", choices=("raise", "unjudged"))
    retries: int = argument(2, at_least=0)
    concurrency: int = argument(1, at_least=1)
    text_field: TextField = "text"
    text_loader: Any = None
    verbose: bool = False

    def __post_init__(self) -> None:
        self.warned: set[str] = set()
        self._check()

    def __repr__(self) -> str:
        return f"RelevanceJudge({self.client.backend!r})"

    def grade(self, query: str, chunk: str, *, qid: str = "") -> int:
        """Return the grade of one text, 0 to 3; -1 if no reply is readable and `on_failure` is `"unjudged"`."""
        messages: list[Message] = [
            {"role": "system", "content": SYSTEM},
            {"role": "user", "content": self.request.format(query=clean(query), text=clean(chunk))},
        ]
        grade, unreadable = read_reply(
            lambda reminder: self.client.ask(qid, [*messages, *reminder]),
            parse_grade,
            request=GRADE_AGAIN,
            retries=self.retries,
        )
        if grade is None and self.on_failure == "raise":
            failure = describe_failure("grade", unreadable)
            raise UnreadableReplyError(f"query {qid or query!r}: {failure}. Set on_failure='unjudged' to continue")
        return UNJUDGED if grade is None else grade

    def chunks(self, text: str) -> list[tuple[int, int]]:
        """Return the characters `(start, end)` of all chunks of a text; a blank text has none."""
        return [characters for _, characters in chunks_of(tokenized(self.tokenizer, text), self.chunk_tokens)]

    def transform(self, inp: pd.DataFrame) -> pd.DataFrame:
        """Judge every row; rows with the same query and text are judged once.

        Raises:
            UnreadableReplyError: if no reply is readable and `on_failure` is `"raise"`.
            BackendError: if the model cannot be called.
        """
        text_columns = validated(inp, self.text_field, self.text_loader, self)
        self._check()
        queries = strings(inp["query"], "query")
        texts = texts_of(inp, text_columns, self.text_loader) if len(inp) else []
        warn_of_queries(self, queries)
        warn_of_texts(self, inp, documents(texts))
        pairs = list(zip(queries, texts, strict=True))
        judgements = self._judge_all({pair: str(qid) for pair, qid in zip(pairs, inp["qid"].tolist(), strict=True)})
        rows = pd.DataFrame([judgements[pair] for pair in pairs], index=inp.index, columns=list(JUDGEMENT_COLUMNS))
        return inp.assign(**rows.astype(JUDGEMENT_COLUMNS))

    def _judge_all(self, qids: dict[tuple[str, str], str]) -> dict[tuple[str, str], tuple[Any, ...]]:
        """Return the values of `JUDGEMENT_COLUMNS` for each (query, text); the qids are for errors."""
        # Chunked before threads start, because they must not share a tokenizer.
        spans = {text: self.chunks(text) for text in dict.fromkeys(text for _, text in qids)}
        selection = {pair: spans[pair[1]][: self.max_chunks] for pair in qids}
        cut = [chunks for chunks in spans.values() if len(chunks[: self.max_chunks]) < len(chunks)]
        if cut and self.preselect is None:
            unread = sum(len(chunks) for chunks in cut) - len(cut) * (self.max_chunks or 0)
            total = sum(map(len, spans.values()))
            message = f"max_chunks={self.max_chunks} leaves {unread} of {total} chunks unjudged"
            where = f"in {len(cut)} of {len(spans)} texts (see judged_share)"
            warn(f"RelevanceJudge: {message}, {where}.", TruncationWarning)
        if self.preselect is not None:
            pairs, windows = [pair for pair in qids if spans[pair[1]]], SentenceWindows(max_tokens=self.chunk_tokens)
            best = best_passages(self.preselect, windows, pairs, self.tokenizer)
            selection |= {pair: passages.spans for pair, passages in best.items()}
        total = sum(map(len, selection.values()))

        def judge(pair: tuple[str, str], run_all: RunAll) -> tuple[Any, ...]:
            (query, text), grades, chunks = pair, [], selection[pair]
            for start, end in chunks:
                grades += run_all([partial(self.grade, query, text[start:end], qid=qids[pair])])
            label = max(grades, default=0)  # a blank text is not relevant
            best = grades.index(label) if grades and label != UNJUDGED else -1
            return label, grades, chunks, best, characters(chunks) / characters(spans[text]) if chunks else 1.0

        with work_bar("RelevanceJudge", "chunk", total, shown=self.verbose) as bar:
            judgements = in_parallel(judge, list(qids), self.concurrency, on_task=bar.update)
        missing = sum(grades.count(UNJUDGED) for _, grades, *_ in judgements)
        if missing:
            message = f"{missing} of {total} chunks have no readable grade and count as unjudged (-1)"
            warn(f"RelevanceJudge: {message}.", IncompleteReplyWarning)
        return dict(zip(qids, judgements, strict=True))

    def _check(self) -> None:
        _ = self.client  # checks `llm`
        field_names(self.text_field)
        validate(self)
        self.tokenizer = full_name(self.tokenizer)
        if self.preselect is not None:
            check_preselection(self.preselect, SentenceWindows(max_tokens=self.chunk_tokens))
        check_template("request", self.request, {"query", "text"}, required={"query", "text"})


def characters(spans: Sequence[Span]) -> int:
    """Count the characters in spans that do not overlap."""
    return sum(end - start for start, end in spans)


def chunks_of(document: TokenizedText, max_tokens: int | None) -> list[tuple[Span, Span]]:
    """Split a text into disjoint chunks of whole sentences; return the token and the character span of each."""
    spans = SentenceWindows(max_tokens=max_tokens)(document) if len(document) else []
    return [(span, document.characters(span)) for span in spans]


def agreement(judged: pd.DataFrame, qrels: pd.DataFrame, *, relevant_from: int = 1) -> pd.Series:
    """Compare the labels of a judge with human labels by scikit-learn's `cohen_kappa_score`.

    Args:
        judged: `qid, docno, label`, e.g. the output of a `RelevanceJudge`.
        qrels: `qid, docno, label`; negative labels (spam in web collections) count as 0.
        relevant_from: the smallest label that counts as relevant, in both; 1 in Boytsov et al. 2025.

    Returns:
        A series with `pairs`, the number of pairs with a label in both frames; `unjudged`, the number of pairs that the
        judge left unjudged; Cohen's `kappa` (NaN if all labels in both frames are the same); `weighted kappa` with
        quadratic weights, which penalizes neighbouring grades less; and `binary kappa` of relevant against
        non-relevant.
    """
    kappa = import_extra("sklearn.metrics", "llm", "this needs sklearn.metrics").cohen_kappa_score
    columns = ["qid", "docno", "label"]
    for name, frame in (("judged", judged), ("qrels", qrels)):
        check_columns(frame, columns, name)
        integer_labels(frame, name)
    human_labels, judge_labels = (frame[columns].astype({"qid": str, "docno": str}) for frame in (qrels, judged))
    common = judge_labels.drop_duplicates(["qid", "docno"]).merge(
        human_labels.drop_duplicates(["qid", "docno"]), on=["qid", "docno"], suffixes=("_judge", "_qrels")
    )
    labels = common[common["label_judge"] != UNJUDGED]
    if labels.empty:
        raise ValueError("judged and qrels must have labels for the same (qid, docno), but have none in common")
    human, judge = labels["label_qrels"].clip(lower=0).astype(int), labels["label_judge"].astype(int)
    return pd.Series(
        {
            "pairs": len(labels),
            "unjudged": len(common) - len(labels),
            "kappa": kappa(human, judge),
            "weighted kappa": kappa(human, judge, weights="quadratic"),
            "binary kappa": kappa(human >= relevant_from, judge >= relevant_from),
        },
        name="agreement",
    )
