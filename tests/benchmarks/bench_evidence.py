"""Beginnings against evidence: a stand-in for a language model that counts words, on documents relevant far behind.

Each topic's document of `longdoc:docstrings-far`, whose relevant passage begins after 512 tokens, is ranked among
others that are drawn at random, in random order. The stand-in orders what it is shown by how many of the query's words
are in it, weighed by how few documents of the prompt have them.

Run: python -m tests.benchmarks.bench_evidence
"""

from __future__ import annotations

import math
import random
import re
import time
from typing import Any

import pandas as pd
import pyterrier as pt

import pyterrier_longdoc as ld
from pyterrier_longdoc.common.measures import chance_rr
from tests.support.llm import shown

TOPICS, CANDIDATES = 100, 20
TOKENIZER = "longdoc:minilm-l6"

_WORD = re.compile(r"\w+")


def counting_words(messages: list[dict[str, str]]) -> str:
    """A ranking of the documents by the query's words in them; of equals the first."""
    query = set(_WORD.findall(messages[-1]["content"].partition("\n")[0].removeprefix("Query: ").lower()))
    documents = {number: set(_WORD.findall(text.lower())) for number, text in shown(messages)}
    having = {word: sum(word in own for own in documents.values()) for word in query}
    rarity = {word: math.log(1 + len(documents) / (1 + number)) for word, number in having.items()}
    worth = {number: sum(rarity[word] for word in query & own) for number, own in documents.items()}
    return " > ".join(f"[{number}]" for number in sorted(worth, key=lambda number: -worth[number]))


def far_candidates(topics: int, candidates: int) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Rows to rerank, in random order, and qrels."""
    far: Any = pt.get_dataset("longdoc:docstrings-far")
    texts = {document["docno"]: document["text"] for document in far.get_corpus_iter(verbose=False)}
    chosen, qrels = far.get_topics("test").head(topics), far.get_qrels("test")
    rng, rows = random.Random(1), []
    for qid, query in chosen[["qid", "query"]].itertuples(index=False):
        relevant = qrels.loc[(qrels["qid"] == qid) & (qrels["label"] > 0), "docno"].iloc[0]
        others = rng.sample(sorted(texts.keys() - {relevant}), candidates - 1)
        docnos = rng.sample([relevant, *others], candidates)
        rows += [(qid, query, docno, texts[docno], -rank) for rank, docno in enumerate(docnos)]
    frame = pd.DataFrame(rows, columns=["qid", "query", "docno", "text", "score"])
    return frame, qrels[qrels["qid"].isin(chosen["qid"])]


def reciprocal_rank(ranker: Any, frame: pd.DataFrame, qrels: pd.DataFrame) -> float:
    """Mean over topics, each of which has one relevant document."""
    relevant = ranker(frame).merge(qrels[qrels["label"] > 0][["qid", "docno"]], on=["qid", "docno"])
    return float((1 / (relevant["rank"] + 1)).mean())


SHOWN: dict[str, dict[str, Any]] = {
    "first 512 tokens": {"max_doc_len": 512},
    "8 passages by FirstK, 512 tokens": {"max_doc_len": 512, "preselect": ld.FirstK(8)},
    "8 passages by BM25, 512 tokens": {"max_doc_len": 512, "preselect": ld.BM25Windows(8)},
    "2 passages by BM25, 128 tokens": {"max_doc_len": 128, "preselect": ld.BM25Windows(2)},
    "by BM25, 4,000 tokens of prompt": {"max_prompt_tokens": 4000, "preselect": ld.BM25Windows(8)},
    "whole documents": {},
}


def main() -> None:
    frame, qrels = far_candidates(TOPICS, CANDIDATES)
    chance = chance_rr(CANDIDATES)
    print(f"{TOPICS} topics, one relevant document of {CANDIDATES} in random order: RR by chance {chance:.2f}")
    print(f"\n{'shown':36s}{'RR':>6s}{'tokens read':>14s}{'tokens of a prompt':>20s}{'seconds':>9s}")
    for name, arguments in SHOWN.items():
        llm = ld.LLMClient(counting_words, tokenizer=TOKENIZER)
        ranker = ld.RankGPT(llm, tokenizer=TOKENIZER, **arguments)
        start = time.perf_counter()
        rr = reciprocal_rank(ranker, frame, qrels)
        seconds = time.perf_counter() - start
        prompt = sum(call.input_tokens for call in llm.ledger.calls) / len(llm.ledger.calls)
        print(f"{name:36s}{rr:6.2f}{ranker.coverage.share_read:14.0%}{prompt:20.0f}{seconds:9.1f}")


if __name__ == "__main__":
    main()
