"""The relevant documents of topics, their texts and their tokens."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from ..common.frames import TextField, as_strings, check_columns, field_names, strings
from ..modelling.texts import TokenizedText
from .judging import tokenized


def relevant_pairs(
    topics: pd.DataFrame, qrels: pd.DataFrame, relevant_from: int, sample: int | None, seed: int, *, needs_query: bool
) -> pd.DataFrame:
    """The relevant documents of the topics, in the order of the qrels.

    Args:
        topics: `qid` and perhaps `query`.
        qrels: `qid, docno, label`.
        relevant_from: smallest label that is relevant.
        sample: a random choice of so many; None for all.
        seed: of that choice.
        needs_query: whether the topics must have a query.

    Returns:
        `qid, docno, label` and perhaps `query`, with strings as names.

    Raises:
        ValueError: if a column is missing, labels are no numbers, a topic is there twice or nothing is relevant.
    """
    check_columns(topics, ("qid", "query") if needs_query else ("qid",), "topics")
    check_columns(qrels, ("qid", "docno", "label"), "qrels")
    if len(qrels) and pd.api.types.is_string_dtype(qrels["label"]):
        raise ValueError(f"qrels: column label must hold numbers, not {qrels['label'].iloc[0]!r}")
    topics = topics.assign(qid=as_strings(topics["qid"]))
    if topics["qid"].duplicated().any():
        raise ValueError(f"topics hold the qid {topics['qid'][topics['qid'].duplicated()].iloc[0]!r} more than once")
    pairs = qrels[["qid", "docno", "label"]].assign(qid=as_strings(qrels["qid"]), docno=as_strings(qrels["docno"]))
    pairs = pairs[(pairs["label"] >= relevant_from) & pairs["qid"].isin(set(topics["qid"]))]
    pairs = pairs.drop_duplicates(["qid", "docno"]).reset_index(drop=True)
    if not len(pairs):
        raise ValueError(f"no document in qrels has a label of at least {relevant_from} for any qid of the topics")
    if sample is not None and sample < len(pairs):
        rows = np.sort(np.random.default_rng(seed).choice(len(pairs), sample, replace=False))
        pairs = pairs.iloc[rows].reset_index(drop=True)
    if needs_query:
        queries = dict(zip(topics["qid"], strings(topics["query"], "query"), strict=True))
        pairs["query"] = [queries[qid] for qid in pairs["qid"]]
    return pairs


def texts_of_corpus(
    corpus: pd.DataFrame | Iterable[Mapping[str, Any]], wanted: set[str], text_field: TextField
) -> dict[str, str]:
    """The texts of the wanted documents, by docno; those that are not in the corpus are left out.

    Raises:
        ValueError: if a column is missing or a wanted document is there twice.
    """
    fields = field_names(text_field)
    if isinstance(corpus, pd.DataFrame):
        check_columns(corpus, ["docno", *fields], "corpus")
        kept = corpus[as_strings(corpus["docno"]).isin(wanted).to_numpy()]
    else:
        rows = [_kept_fields(row, fields) for row in corpus if str(row.get("docno")) in wanted]
        kept = pd.DataFrame(rows, columns=["docno", *fields])
    docnos = as_strings(kept["docno"])
    if docnos.duplicated().any():
        twice = docnos[docnos.duplicated()].iloc[0]
        raise ValueError(f"corpus holds the document {twice!r} more than once (column docno): keep one of them")
    columns = [strings(kept[name], name) for name in fields]
    joined = (" ".join(filter(None, parts)) for parts in zip(*columns, strict=True))
    return dict(zip(docnos.tolist(), columns[0] if len(columns) == 1 else joined, strict=True))


class Reader:
    """Tokenises documents; keeps the last one, since pairs of a document may follow each other.

    Args:
        texts: by docno.
        tokenizer: a fast Hugging Face tokenizer, or its name or folder; None takes words and punctuation marks.

    Raises:
        ValueError: if the tokenizer gives no character offsets.
    """

    def __init__(self, texts: dict[str, str], tokenizer: Any) -> None:
        self.texts, self.tokenizer = texts, fast_tokenizer(tokenizer)
        self._last: tuple[str, TokenizedText] | None = None

    def __call__(self, docno: str) -> TokenizedText:
        """The document's tokens with their characters."""
        if self._last is None or self._last[0] != docno:
            self._last = docno, tokenized(self.tokenizer, self.texts[docno])
        return self._last[1]


def _kept_fields(row: Mapping[str, Any], fields: list[str]) -> dict[str, Any]:
    absent = [name for name in fields if name not in row]
    if absent:
        raise ValueError(f"document {row['docno']!r} of the corpus lacks {', '.join(absent)}; it has {', '.join(row)}")
    return {name: row[name] for name in ["docno", *fields]}


def fast_tokenizer(tokenizer: Any) -> Any:
    """A tokenizer that gives character offsets, or None as it is.

    Args:
        tokenizer: a fast Hugging Face tokenizer, or its name or folder; None stands for words and punctuation marks.

    Raises:
        ValueError: for any other.
    """
    if isinstance(tokenizer, str | Path):
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(str(tokenizer))
    if tokenizer is not None and not getattr(tokenizer, "is_fast", False):
        raise ValueError(f"tokenizer={tokenizer!r} must be a fast Hugging Face tokenizer, its name or folder, or None")
    return tokenizer
