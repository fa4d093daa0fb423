"""The collections with known positions that are made of the documentation of installed Python packages."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial

import pandas as pd

from pyterrier_longdoc.common.language import token_counter
from pyterrier_longdoc.data.docstrings import SPLITS, DocstringsDataset, split_of
from pyterrier_longdoc.data.far_relevant import far_relevant
from pyterrier_longdoc.data.needle import LENGTHS, needle, passkey
from pyterrier_longdoc.data.positioned import Parts, PositionedCollection, kept_parts

LONGEST_PASSAGE = 256
"""Docstrings of at most so many tokens (`count_tokens`) are the passages of the docstrings collections."""

_LENGTHS = [str(length) for length in LENGTHS]
_SENTENCE_WORDS = 20
_FORMAT = 1  # raise when the rules below change: cached collections are then rebuilt


def docstrings_with(position: str, dataset: DocstringsDataset | None = None) -> PositionedCollection:
    """Known-item search in documents of random docstrings: ``pt.get_dataset("longdoc:docstrings-far")``.

    The passages are docstrings of up to 256 tokens; those with a topic are each relevant in one document, the others
    are filler. Documents have 768 tokens or more, and 1431 at most. The three collections have the same documents, but
    for the place of the relevant passage: "far" at least 512 tokens into the document, "uniform" anywhere, or "early",
    ending within the first 256 tokens. Tokens are those of `count_tokens`: a lower bound on BERT's word pieces.

    Topics and qrels have the variants train, dev and test (the default), divided as those of ``longdoc:docstrings``.

    Args:
        position: "early", "uniform" or "far".
        dataset: None takes the installed packages; the collection is then kept in PyTerrier's home.
    """
    source = dataset or DocstringsDataset()

    def parts() -> Parts:
        build = partial(_docstrings_parts, position, source)
        return build() if dataset else _kept(f"docstrings-{position}", source, build)

    return PositionedCollection(f"docstrings-{position}", parts, count=token_counter(), default="test", variants=SPLITS)


def docstrings_needle(dataset: DocstringsDataset | None = None) -> PositionedCollection:
    """The Needle task in docstrings: ``pt.get_dataset("longdoc:needle")``; see `needle`.

    The background are docstrings with a sentence for each 20 words or more.
    Eight lengths from 256 to 32,768 tokens (`count_tokens`), each with 100 documents and 50 queries.

    Args:
        dataset: None takes the installed packages; the collection is then kept in PyTerrier's home.
    """
    source = dataset or DocstringsDataset()

    def build() -> Parts:
        texts = (entry.text for entry in source.entries if _is_prose(entry.text))
        return needle(texts).parts

    def parts() -> Parts:
        return build() if dataset else _kept("needle", source, build)

    return PositionedCollection("needle", parts, count=token_counter(), variants=_LENGTHS)


def _is_prose(text: str) -> bool:
    # Parameter lists and examples have few sentences, between which the needle has to go.
    return len(re.findall(r"[.!?](?=\s|$)", text)) * _SENTENCE_WORDS >= len(text.split())


def plain_passkey() -> PositionedCollection:
    """The Passkey task: ``pt.get_dataset("longdoc:passkey")``; see `passkey`. The same on every machine."""

    def parts() -> Parts:
        return kept_parts("passkey", {"format": _FORMAT}, lambda: passkey().parts)

    return PositionedCollection("passkey", parts, count=token_counter(), variants=_LENGTHS)


def _docstrings_parts(position: str, dataset: DocstringsDataset) -> Parts:
    short = [entry for entry in dataset.entries if entry.tokens <= LONGEST_PASSAGE]
    rows = [(f"q-{e.docno}", e.query, e.docno, 1, split_of(e.docno)) for e in short if e.query]
    frame = pd.DataFrame(rows, columns=["qid", "query", "docno", "label", "split"])
    return far_relevant(
        [{"docno": entry.docno, "text": entry.text} for entry in short],
        frame[["qid", "query", "split"]],
        frame[["qid", "docno", "label"]],
        position=position,
        within=LONGEST_PASSAGE,
        extra_passage=False,
    ).parts


def _kept(name: str, dataset: DocstringsDataset, build: Callable[[], Parts]) -> Parts:
    return kept_parts(name, {"format": _FORMAT, "versions": dataset.versions}, build)
