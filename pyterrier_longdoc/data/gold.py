"""Collections with known relevant text: questions in SQuAD's format, and judged passages."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Set
from functools import partial
from itertools import chain, count, pairwise
from pathlib import Path
from typing import Any

import pandas as pd

from ..common.files import full_path
from ..common.language import token_counter
from ..common.warnings import warn
from .collection import CollectionParts, PositionedCollection
from .passages import find_source, read_source
from .rows import put_once, qrels_frame, recount, topics_frame

_NO_LETTERS = re.compile(r"[\W_]+")


def read_squad(path: str | Path, *, tokenizer: Any = None) -> PositionedCollection:
    """Read articles with questions in SQuAD's format, such as COVID-QA: ``pt.get_dataset("longdoc:squad:PATH")``.

    Each article is a document; its paragraphs are joined by blank lines, and its title or `document_id` is the docno.
    `gold` has all distinct answers. Questions without an answer at its stated offset are left out, with a warning.

    Args:
        path: the path of a file, or of a folder with `.json` files.
        tokenizer: counts the tokens of lengths and positions, see `token_counter`.

    Raises:
        ValueError: if a file has another format.
    """
    root = Path(full_path(path))
    documents: dict[str, dict[str, str]] = {}
    questions: dict[str, tuple[str, str, list[tuple[int, int]]]] = {}
    for file in sorted(root.glob("*.json")) if root.is_dir() else [root]:
        _read_articles(file, documents, questions)
    if not documents:
        raise FileNotFoundError(f"{root} has no articles in SQuAD's format (.json)")
    answered = {qid: question for qid, question in questions.items() if question[2]}
    if left := len(questions) - len(answered):
        message = f"{left} of {len(questions)} questions in {root} have no answer at its offset and are left out"
        warn(message, UserWarning)
    if not any(document["title"] for document in documents.values()):
        documents = {docno: {"docno": docno, "text": document["text"]} for docno, document in documents.items()}
    gold = [(qid, docno, *span, 0, 0, "", "") for qid, (_, docno, spans) in answered.items() for span in spans]
    parts = CollectionParts(
        documents,
        topics_frame((qid, query) for qid, (query, _, _) in answered.items()),
        qrels_frame((qid, docno, 1) for qid, (_, docno, _) in answered.items()),
        partial(recount, gold, documents, token_counter(tokenizer)),
    )
    return PositionedCollection(root.stem, parts, tokenizer=tokenizer)


def _read_articles(file: Path, documents: dict[str, dict[str, str]], questions: dict[str, Any]) -> None:
    """Add articles to `documents`, and (query, docno, answer spans) by qid to `questions`."""
    where = str(file)
    try:
        for number, article in enumerate(json.loads(file.read_text("utf-8-sig"))["data"], start=1):
            where, text, paragraphs = f"{file}, article {number}", "", article["paragraphs"]
            title = str(article.get("title") or "")
            title = "" if title.isdigit() else title  # COVID-QA has numbers as titles
            name = title or (paragraphs and paragraphs[0].get("document_id")) or f"{file.stem}_{number}"
            docno = "_".join(str(name).split())
            names = chain([docno], (f"{docno}_{number}" for number in count(len(documents) + 1)))
            docno = next(name for name in names if name not in documents)
            for paragraph in paragraphs:
                text += "\n\n" if text else ""
                for question in paragraph["qas"]:
                    place = f"{where}, question {question['id']!r}"
                    spans = _answers(question.get("answers") or [], paragraph["context"], len(text))
                    put_once(questions, str(question["id"]), (question["question"], docno, spans), place)
                text += paragraph["context"]
            documents[docno] = {"docno": docno, "text": text, "title": title.replace("_", " ")}
    except (json.JSONDecodeError, AttributeError, KeyError, TypeError) as error:
        raise ValueError(f"{where} must be in SQuAD's format: {error!r}") from None


def _answers(answers: list[dict[str, Any]], context: str, offset: int) -> list[tuple[int, int]]:
    """Return the spans of answers, without those that are not at their stated offset (as some in COVID-QA)."""
    places = []
    for answer in answers:
        start, end = answer["answer_start"], answer["answer_start"] + len(answer["text"])
        if 0 <= start < end and context[start:end] == answer["text"]:
            places.append((offset + start, offset + end))
    return list(dict.fromkeys(places))


def from_passage_qrels(
    passages: Any,
    documents: Any,
    topics: pd.DataFrame | None = None,
    qrels: pd.DataFrame | None = None,
    *,
    min_label: int = 1,
    tokenizer: Any = None,
) -> PositionedCollection:
    """Build a collection of the documents of judged passages; the relevant passages are the gold text.

    Passages of MS MARCO v2 (TREC DL 2021-23) have `msmarco_document_id` and `spans` (bytes of the document in UTF-8).
    Segments of v2.1 (TREC RAG) have `start_char` and `end_char`, and their docno begins with that of the document, up
    to "#". A document gets the highest label of its passages. Documents without a judged passage are left out.
    Judgements of passages that are missing or not found at their place (comparing letters and digits) are left out with
    a warning.

    Args:
        passages: a dataset, the name of a dataset (of PyTerrier or ir_datasets), or the passages: a frame or dicts with
            `docno` or `docid` and these fields. Passages of ir_datasets are looked up, others are read one by one.
        documents: the same for documents, with the field `body` (or else `text`), to which the places refer, and
            optionally `title`.
        topics: `qid, query`; None uses those of the passage dataset.
        qrels: `qid, docno, label` of passages; None uses those of the passage dataset.
        min_label: the smallest label of a relevant passage; 2 for TREC DL.
        tokenizer: counts the tokens of lengths and positions, see `token_counter`.

    Example:
        `from_passage_qrels("irds:msmarco-passage-v2/trec-dl-2021/judged", "irds:msmarco-document-v2", min_label=2)`
    """
    source = find_source(passages)
    _, topics, judged = read_source(source, topics, qrels, None, 0)
    rows = dict(_rows(source, set(judged["docno"])))
    parents = {name: row.get("msmarco_document_id") or name.partition("#")[0] for name, row in rows.items()}
    texts = {
        docno: {"docno": docno, "text": row["body"] if "body" in row else row["text"], "title": row.get("title") or ""}
        for docno, row in _rows(find_source(documents), set(parents.values()))
    }
    spans = {name: _spans(row, texts[parents[name]]["text"]) for name, row in rows.items() if parents[name] in texts}
    fits = judged["docno"].map(lambda name: bool(spans.get(name)))
    if not fits.all():
        losses = f"{(~fits).sum()} of {len(fits)} judgements, e.g. of {judged['docno'][~fits].iloc[0]!r}, are left out"
        losses += ": the passage or its document is missing, or the passage is not where spans or start_char say"
        if not fits.any():
            raise ValueError(losses)
        warn(losses, UserWarning)
    judged = judged[fits].assign(passage=judged["docno"], docno=judged["docno"].map(parents))
    relevant = judged.loc[judged["label"] >= min_label, ["qid", "docno", "passage"]].itertuples(index=False)
    gold = [(qid, docno, *span, 0, 0, "", name) for qid, docno, name in relevant for span in spans[name]]
    best = judged.groupby(["qid", "docno"], sort=False, as_index=False)["label"].max()
    topics = topics[topics["qid"].isin(best["qid"])].reset_index(drop=True)
    parts = CollectionParts(texts, topics, best, partial(recount, gold, texts, token_counter(tokenizer)))
    return PositionedCollection("passage-qrels", parts, tokenizer=tokenizer)


def _rows(source: Any, names: Set[str]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Find the passages or documents with these names."""
    if hasattr(source, "irds_ref"):  # looked up, because few of MS MARCO's 138 million passages are judged
        source = (row._asdict() for row in source.irds_ref().docs_store().get_many_iter(sorted(names)))
    elif hasattr(source, "get_corpus_iter"):
        source = source.get_corpus_iter(verbose=False)
    rows: Iterable[Any] = source.to_dict("records") if isinstance(source, pd.DataFrame) else source
    for row in rows:
        name = str(next(row[field] for field in ("docno", "doc_id", "docid") if field in row))
        if name in names:
            yield name, row


def _spans(row: Mapping[str, Any], text: str) -> list[tuple[int, int]]:
    """Return the spans of a passage in its document: several if other text is in between, none if it is not there."""
    if "spans" in row:
        content, passage = text.encode(errors="replace"), row["text"]
        to_character = {byte: len(content[:byte].decode(errors="ignore")) for span in row["spans"] for byte in span}
        places = [(to_character[start], to_character[end]) for start, end in row["spans"]]
    else:
        places, passage = [(row["start_char"], row["end_char"])], row["segment"]
    found = "".join(text[start:end] for start, end in places)
    # White space can differ, and MS MARCO adds full stops after headings.
    if not places or _NO_LETTERS.sub("", passage) != _NO_LETTERS.sub("", found):
        return []
    gaps = (text[end:start] for (_, end), (start, _) in pairwise(places))
    return places if any(gap.strip() for gap in gaps) else [(places[0][0], places[-1][1])]
