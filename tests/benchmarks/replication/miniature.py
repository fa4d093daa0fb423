"""The papers' data and backbone in miniature: short passages in documents of a few hundred tokens, a small encoder.

Chunks and documents are those of Boytsov et al. 2025 divided by 3.7, windows and queries by less: FirstP reads 128
tokens in place of 477, windows are 64 / 48 in place of 150 / 100 or 75, documents have up to 384 = 3 x 128 tokens. The
same documents have their relevant passage within the first 128 tokens (*early*, as in most of MS MARCO), anywhere
(*uniform*), or behind them (*far*, as in MS MARCO FarRelevant).
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import pandas as pd
import pyterrier as pt

from pyterrier_longdoc.common.files import import_extra
from pyterrier_longdoc.common.language import sentence_starts, token_counter
from pyterrier_longdoc.common.packaged import ENCODER
from pyterrier_longdoc.common.runs import frame_digest
from pyterrier_longdoc.data import DocstringsDataset, PositionedCollection, far_relevant
from pyterrier_longdoc.data.passages import docno_and_text, read_source
from pyterrier_longdoc.training import add_judged

FIRST = 128
"""Tokens that FirstP reads, and the chunks of AvgP, CEDR and Neural Model 1; *far* is behind them. 477 in the paper."""
WHOLE = 3 * FIRST
"""Tokens of the longest document, and those that all other models read; 1431 in the paper."""
WINDOW, STRIDE = 64, 48
"""150 and 100 or 75 in the paper."""
QUERY = 24
"""Tokens of a query that are read; 32 in the paper."""
PASSAGE = 24, 64
"""Fewest and most tokens of a passage."""

POSITIONS = ("early", "uniform", "far")


class Sizes(NamedTuple):
    """How many topics there are of each kind, all different; what is left is for the pairs of the start."""

    train: int = 2000
    test: int = 500
    dev: int = 200
    depth: int = 8
    """BM25's best so many are reranked, and give the negatives."""

    @property
    def drawn(self) -> dict[str, int]:
        """Topics of each split before those are left out whose relevant document BM25 does not find."""
        return {"test": round(self.test * 2.4), "dev": round(self.dev * 2.4), "train": self.train}


class Passages(NamedTuple):
    """A passage collection: dicts or rows of `docno` and `text`, and what is relevant for whom."""

    corpus: Any
    topics: pd.DataFrame
    qrels: pd.DataFrame


def passages_of(name: str, *, topics: int = 20_000, filler: int = 200_000) -> Passages:
    """The passages of a dataset: the relevant ones of its first topics, and its first others.

    Args:
        name: PyTerrier's or of ir_datasets, e.g. `"irds:msmarco-passage/train/judged"`.
        topics: at most so many.
        filler: at most so many passages that are relevant for none of these.

    Raises:
        ValueError: if a passage has no `docno` or `text`, or nothing is relevant.
    """
    source, asked, relevant = read_source(name, None, None, None, 1)
    asked = asked.head(topics)
    relevant = relevant[relevant["qid"].isin(asked["qid"])]
    needed, corpus = set(relevant["docno"]), []
    for docno, text in (docno_and_text(row, "text") for row in source):
        if docno not in needed:
            filler -= 1
        if docno in needed or filler >= 0:
            corpus.append({"docno": docno, "text": text})
    return Passages(corpus, asked, relevant.assign(label=1))


def docstring_passages(tokenizer: Any = ENCODER) -> Passages:
    """The beginnings of the docstrings of installed packages, whose first sentences are the queries.

    Args:
        tokenizer: in whose tokens they are cut, see `token_counter`.
    """
    entries = DocstringsDataset().entries
    first_words = [e.text.split()[: PASSAGE[1]] for e in entries]
    distinct = sorted({word for words in first_words for word in words})
    # Word pieces never span white space, so that lengths add up.
    tokens = dict(zip(distinct, token_counter(tokenizer)(distinct), strict=True))
    corpus = [
        {"docno": e.docno, "text": beginning(words, tokens)} for e, words in zip(entries, first_words, strict=True)
    ]
    topics = [(f"q-{e.docno}", e.query, e.docno, 1) for e in entries if e.query]
    frame = pd.DataFrame(topics, columns=["qid", "query", "docno", "label"])
    return Passages(corpus, frame[["qid", "query"]], frame[["qid", "docno", "label"]])


def beginning(words: Sequence[str], tokens: Mapping[str, int]) -> str:
    """As many sentences as make a passage, or as many words where no sentence ends in time.

    Args:
        words: of a document.
        tokens: how many each has.
    """
    least, most = PASSAGE
    lengths = list(accumulate(tokens[word] for word in words))
    whole = " ".join(words[: bisect_right(lengths, most)])
    for start in reversed(sentence_starts(whole)):
        if lengths[len(whole[:start].split()) - 1] >= least:
            return whole[:start].rstrip()
    return whole


@dataclass(eq=False)
class Miniature:
    """The collections and their candidates, made at first use; the same in every process.

    Args:
        passages: a passage collection; None for `docstring_passages`.
        sizes: numbers of topics and candidates.
        tokenizer: in whose tokens all lengths are.
        longest: tokens of the longest document.
    """

    passages: Passages | None = None
    sizes: Sizes = field(default_factory=Sizes)
    tokenizer: Any = ENCODER
    longest: int = WHOLE

    @cached_property
    def source(self) -> Passages:
        """The passages of fitting length, and topics with one such passage that is no other topic's."""
        given = self.passages or docstring_passages(self.tokenizer)
        corpus, (least, most) = pd.DataFrame(given.corpus)[["docno", "text"]], PASSAGE
        corpus["tokens"] = token_counter(self.tokenizer)(corpus["text"].tolist())
        corpus = corpus[corpus["tokens"].between(least, most)]
        relevant = given.qrels[given.qrels["label"] > 0].merge(corpus, on="docno").drop_duplicates("qid")
        relevant = relevant.drop_duplicates("text", keep=False)
        topics = given.topics[["qid", "query"]].merge(relevant[["qid"]], on="qid")
        return Passages(corpus[["docno", "text"]], topics, relevant[["qid", "docno", "label"]])

    @cached_property
    def described(self) -> str:
        """What the collections are made of, for short: another release of a package has other docstrings."""
        corpus, topics, qrels = self.source
        digest = frame_digest(qrels.merge(topics, on="qid").merge(corpus, on="docno", how="outer"))
        return f"{len(corpus):,} passages, {len(topics):,} topics, {digest}"

    @cached_property
    def drawn(self) -> dict[str, pd.DataFrame]:
        """`qid, query` that collections are made of, *test*, *dev* and *train*; and *pairs*, all others."""
        mixed, start = self.source.topics.sample(frac=1.0, random_state=0), 0
        parts = {}
        for split, number in {**self.sizes.drawn, "pairs": len(mixed)}.items():
            parts[split] = mixed.iloc[start : start + number].reset_index(drop=True)
            start += number
        return parts

    @cached_property
    def collections(self) -> dict[str, PositionedCollection]:
        """By position of the one relevant passage of each document; of all topics but the pairs'."""
        topics = pd.concat([self.drawn[split] for split in self.sizes.drawn], ignore_index=True)
        recipe = {"min_offset": FIRST, "max_doc_len": self.longest, "extra_passage": False, "tokenizer": self.tokenizer}
        return {
            position: far_relevant(
                self.source.corpus,
                topics,
                self.source.qrels,
                position=position,
                name=f"miniature-{position}",
                **recipe,
            )
            for position in POSITIONS
        }

    @cached_property
    def run(self) -> pd.DataFrame:
        """`qid, query, docno, score`: BM25's best documents, alike in all collections, whose passages are the same."""
        collection = self.collections[POSITIONS[0]]
        return bm25(collection.corpus, collection.topics, self.sizes.depth)

    @cached_property
    def topics(self) -> dict[str, pd.DataFrame]:
        """`qid, query` of *test*, *dev*, *train* and *pairs*.

        To test on there are those alone whose relevant document BM25 finds, as in MS MARCO FarRelevant: the paper gives
        a random order of 100 candidates the reciprocal rank of lists that all have a relevant document.
        """
        found = self.run.merge(self.collections[POSITIONS[0]].qrels, on=["qid", "docno"])["qid"]
        parts = dict(self.drawn)
        for split, number in (("test", self.sizes.test), ("dev", self.sizes.dev)):
            parts[split] = parts[split][parts[split]["qid"].isin(found)].head(number)
        lacking = [split for split, topics in parts.items() if not len(topics)]
        if lacking:
            raise ValueError(f"{len(self.source.topics)} topics with a fitting passage leave none for {lacking}")
        return parts

    def candidates(self, position: str, split: str) -> pd.DataFrame:
        """BM25's best of a collection for the topics of a split, with texts.

        Those to train on have the relevant document of each query behind them where BM25 misses it, as the paper's do.

        Args:
            position: of the relevant passages, one of `POSITIONS`.
            split: "test", "dev" or "train".
        """
        topics = self.topics[split]
        run = self.run[self.run["qid"].isin(topics["qid"])].reset_index(drop=True)
        if split == "train":
            run = add_judged(run, self.qrels(split), topics=topics)
        return self.collections[position].text_loader().transform(run)

    def qrels(self, split: str) -> pd.DataFrame:
        """`qid, docno, label` of the topics of a split, alike in all collections."""
        qrels = self.collections[POSITIONS[0]].qrels
        return qrels[qrels["qid"].isin(self.topics[split]["qid"])].reset_index(drop=True)

    @cached_property
    def pairs(self) -> tuple[pd.DataFrame, pd.DataFrame]:
        """Passages for the topics that nothing else is made of, BM25's best and the right one, and their qrels."""
        topics = self.topics["pairs"]
        qrels = self.source.qrels.merge(topics[["qid"]], on="qid")
        corpus = self.source.corpus.merge(qrels[["docno"]], on="docno")
        run = add_judged(bm25(corpus.to_dict("records"), topics, self.sizes.depth), qrels, topics=topics)
        return run.merge(corpus, on="docno", how="left"), qrels


def by_absence(candidates: pd.DataFrame, tokenizer: Any = ENCODER) -> pd.DataFrame:
    """Ranks those documents first that have the fewest words of the query where FirstP reads.

    What BM25 retrieves has words of the query somewhere: where none is in the first window, they are behind it.

    Args:
        candidates: `qid, query, docno, text`.
        tokenizer: in whose tokens the first window is measured, see `token_counter`.
    """
    count = token_counter(tokenizer)
    scores = []
    for query, words in zip(candidates["query"], candidates["text"].str.split(), strict=True):
        read = words[: bisect_right(list(accumulate(count(words))), FIRST)]
        scores.append(-len(_words(query) & _words(" ".join(read))))
    return pt.model.add_ranks(candidates.assign(score=scores))


def _words(text: str) -> set[str]:
    return set(re.findall(r"\w+", text.lower()))


def bm25(documents: Iterable[Mapping[str, str]], topics: pd.DataFrame, depth: int) -> pd.DataFrame:
    """`qid, query, docno, score` of BM25's best documents, by PISA, which needs no Java.

    Args:
        documents: with `docno` and `text`.
        topics: `qid, query`.
        depth: how many for each.
    """
    pisa = import_extra("pyterrier_pisa", "demo", "pyterrier_pisa is missing")
    with TemporaryDirectory() as folder:
        index = pisa.PisaIndex(str(Path(folder, "index")), text_field="text")
        index.index(documents)
        return index.bm25(num_results=depth)(topics)[["qid", "query", "docno", "score"]]
