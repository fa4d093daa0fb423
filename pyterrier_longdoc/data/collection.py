"""Collections with known positions of relevant passages, and the transformer that loads their texts."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence, ValuesView
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyterrier as pt

from ..common.arguments import check_arguments
from ..common.citations import Cited
from ..common.files import claim, full_name, full_path, write_jsonl, write_lines
from ..common.frames import as_strings
from ..common.language import token_counter
from ..common.progress import work_bar

Documents = Mapping[str, Mapping[str, str]]
"""docno -> {"docno": ..., "text": ..., other fields}."""

GOLD_COLUMNS = {
    **dict.fromkeys(("qid", "docno"), "str"),
    **dict.fromkeys(("start", "end", "first_token", "length"), "int64"),
    **dict.fromkeys(("position", "passage"), "str"),
}
"""Columns of `PositionedCollection.gold` and their types."""


class TextLoader(pt.Transformer):
    """Adds the text of each document to a frame with a ``docno`` column.

    Texts are not truncated, unlike those of a Terrier meta index. Rows, order, index and other columns stay the same;
    an existing column of the same name is replaced.

    Example:
        >>> loader = TextLoader({"d1": {"docno": "d1", "text": "a long document"}}, ["text"])
        >>> loader(pd.DataFrame({"qid": ["q1"], "docno": ["d1"]}))["text"].tolist()
        ['a long document']
    """

    # No dataclass, which would have a key: texts count where they are read.
    def __init__(self, documents: Documents, fields: list[str], name: str = "", verbose: bool = False) -> None:
        self.documents, self.fields, self.name, self.verbose = documents, fields, name, verbose

    def transform(self, inp: pd.DataFrame) -> pd.DataFrame:
        """Add the fields; raise KeyError if a docno is not in the collection."""
        pt.validate.columns(inp, includes=["docno"], context=self)
        docnos = as_strings(inp["docno"]).tolist()
        distinct = list(dict.fromkeys(docnos))
        rows = {}
        with work_bar(repr(self), "doc", len(distinct), shown=self.verbose) as bar:
            for docno in distinct:
                try:
                    rows[docno] = self.documents[docno]
                except KeyError:
                    raise KeyError(f"docno {docno!r} is not in the collection {self.name!r}") from None
                bar.update()
        columns = {name: [rows[docno][name] for docno in docnos] for name in self.fields}
        out = inp.drop(columns=self.fields, errors="ignore")
        # Objects share the text of a document with many queries; Arrow would copy it for each row.
        return out.assign(**{name: pd.Series(values, out.index, dtype=object) for name, values in columns.items()})

    def fuse_rank_cutoff(self, k: int) -> pt.Transformer:
        """Apply a rank cutoff before the texts are loaded (``loader % k``)."""
        return pt.RankCutoff(k) >> self

    def schematic(self, *, input_columns: list[str] | None = None) -> dict[str, Any]:
        """Return the schematic for PyTerrier, without the documents."""
        return {"label": "TextLoader", "help_url": None, "settings": {"name": self.name, "fields": self.fields}}

    def __repr__(self) -> str:
        return f"TextLoader({self.name!r}, {self.fields!r})"


@dataclass(frozen=True)
class CollectionParts:
    """The parts of a `PositionedCollection`.

    Attributes:
        documents: docno -> fields, any `Mapping`, such as one that reads documents from disk.
        topics: `qid, query`.
        qrels: `qid, docno, label`.
        gold: the rows of `PositionedCollection.gold`, or a function that returns them.
        splits: variant of topics and qrels -> qids.
        groups: docno -> group of comparable documents, e.g. of the same context length.
        lengths: returns the length of each document in tokens, in order; None counts them.
    """

    documents: Documents
    topics: pd.DataFrame
    qrels: pd.DataFrame
    gold: Sequence[tuple[Any, ...]] | Callable[[], Iterable[tuple[Any, ...]]] = ()
    splits: Mapping[str, Sequence[str]] = field(default_factory=dict)
    groups: Mapping[str, str] = field(default_factory=dict)
    lengths: Callable[[], Iterable[int]] | None = None


class PositionedCollection(Cited, pt.datasets.Dataset):
    """A PyTerrier dataset with documents, topics, qrels and the positions of relevant passages.

    Args:
        name: the name of the collection.
        parts: its parts, or a function that returns them on first use.
        tokenizer: counts the tokens of lengths and of positions in `gold`, see `token_counter`.
        default: the default variant of topics and qrels; None for all.
        variants: the names of the variants, needed if `parts` is a function.
        papers: the papers that `citation()` returns: keys of `references.bib`, or BibTeX entries.
    """

    def __init__(
        self,
        name: str,
        parts: CollectionParts | Callable[[], CollectionParts],
        *,
        tokenizer: Any = None,
        default: str | None = None,
        variants: Iterable[str] = (),
        papers: tuple[str, ...] = (),
    ) -> None:
        self.name, self.tokenizer, self._papers = name, full_name(tokenizer), papers
        self._source, self._default, self._variants = parts, default, list(variants)
        self._loaders: dict[tuple[tuple[str, ...], bool], TextLoader] = {}

    def cited(self) -> list[str]:
        """Return the papers of the collection."""
        return list(self._papers)

    @cached_property
    def parts(self) -> CollectionParts:
        """The parts of the collection, created on first use."""
        return self._source() if callable(self._source) else self._source

    @property
    def documents(self) -> Documents:
        """All documents, docno -> {"docno", "text", optionally "title"}, in order."""
        return self.parts.documents

    @property
    def corpus(self) -> ValuesView[Mapping[str, str]]:
        """All documents as dicts of `docno`, `text` and optionally `title`; re-iterable."""
        return self.documents.values()

    @property
    def topics(self) -> pd.DataFrame:
        """All topics, `qid` and `query`."""
        return self.parts.topics[["qid", "query"]].copy()

    @property
    def qrels(self) -> pd.DataFrame:
        """All judgements, `qid`, `docno` and `label`."""
        return self.parts.qrels[["qid", "docno", "label"]].copy()

    @cached_property
    def gold(self) -> pd.DataFrame:
        """The positions of the relevant passages, one row per passage.

        Columns: `qid` and `docno`; `start` and `end`, half-open character offsets in the document's text;
        `first_token`, the number of tokens before the passage; `length`, of the document in tokens; `position`, the
        kind of place (early, uniform or far); and `passage`, the docno of the passage in the source collection.
        """
        return pd.DataFrame(list(self.gold_rows()), columns=list(GOLD_COLUMNS)).astype(GOLD_COLUMNS)

    def gold_rows(self) -> Iterable[tuple[Any, ...]]:
        """Return an iterable of the rows of `gold`."""
        return self.parts.gold() if callable(self.parts.gold) else self.parts.gold

    @property
    def splits(self) -> dict[str, list[str]]:
        """The qids of each variant of topics and qrels; empty if there is only one."""
        return {name: list(qids) for name, qids in self.parts.splits.items()}

    def get_topics(self, variant: str | None = None) -> pd.DataFrame:
        """Return the topics of a variant, `qid` and `query`; None for the default."""
        return self._of_variant(self.topics, variant)

    def get_qrels(self, variant: str | None = None) -> pd.DataFrame:
        """Return the judgements of a variant, `qid`, `docno` and `label`; None for the default."""
        return self._of_variant(self.qrels, variant)

    def get_corpus_iter(self, *, verbose: bool = True) -> pt.model.IterDict:
        """Return a sized iterator of ``{"docno": ..., "text": ..., ...}`` for indexing."""
        bar = pt.tqdm(self.corpus, desc=f"{self.name} documents", disable=not verbose)
        return pt.utils.GeneratorLen(map(dict, bar), len(self.documents))

    def save(self, folder: str | Path) -> None:
        """Write the collection in the layout of ``pt.get_dataset("longdoc:folder:PATH")``, one document at a time.

        The tokenizer, the default variant and the citation are not part of this layout: without a tokenizer of its own,
        the folder counts positions in words.

        Args:
            folder: a new or an empty folder, or one of an earlier call, which is replaced.

        Raises:
            ValueError: if a qid or docno has white space, or a qid is in several variants, which the layout cannot
                express.
        """
        topics, qrels = self.topics, self.qrels
        variants = [(qid, variant) for variant, qids in self.splits.items() for qid in qids]
        for name in chain(topics["qid"], qrels["qid"], qrels["docno"], self.documents):
            if len(name.split()) != 1:
                raise ValueError(f"qids and docnos must not be empty or have white space, but {name!r} is or has")
        if len(dict(variants)) < len(variants):
            raise ValueError("a qid is in several variants: save the variants in separate folders")
        folder = Path(full_path(folder))
        claim(folder)
        write_jsonl(folder / "docs.jsonl", self.corpus)
        rows = ((qid, " ".join(query.split())) for qid, query in topics.itertuples(index=False))
        write_lines(folder / "topics.tsv", map("\t".join, rows))
        lines = (f"{qid} 0 {docno} {label}" for qid, docno, label in qrels.itertuples(index=False))
        write_lines(folder / "qrels.txt", lines)
        names = ("qid", "docno", "start", "end")
        write_jsonl(folder / "spans.jsonl", (dict(zip(names, row, strict=False)) for row in self.gold_rows()))
        write_lines(folder / "splits.tsv", map("\t".join, variants))

    def text_loader(self, fields: Sequence[str] | str = "*", *, verbose: bool = False) -> TextLoader:
        """Return a transformer that adds the document texts to a frame with a ``docno`` column.

        The same arguments return the same object, so that ``pt.Experiment(..., plan="tree")`` recognizes it in several
        pipelines.

        Args:
            fields: ``"*"`` for all fields, or the names of one or several fields.
            verbose: show a progress bar.
        """
        available = [name for name in next(iter(self.corpus), {"text": ""}) if name != "docno"]
        names = available if fields == "*" else [fields] if isinstance(fields, str) else list(fields)
        for name in names:
            check_arguments("str", repr(self), choices=available, fields=name)
        key = (tuple(names), verbose)
        if key not in self._loaders:
            self._loaders[key] = TextLoader(self.documents, names, self.name, verbose)
        return self._loaders[key]

    def candidates(
        self, variant: str | None = None, *, pool: str = "all", depth: int | None = None, seed: int = 0
    ) -> pd.DataFrame:
        """Return candidates for reranking without a first stage, in random order.

        Args:
            variant: the variant of the topics.
            pool: "all" documents (Boytsov et al. 2025 rerank all 800 of a LongEmbed set); documents of the
                "same_length" group as the relevant document, if the collection has groups (the protocol of LongEmbed);
                or documents "judged" for the topic, relevant or not.
            depth: the number of documents per topic, including all relevant ones; None for the whole pool.
            seed: the random seed of the sample and its order.

        Returns:
            `qid, query, docno, score, rank`, with scores that decrease from 0.

        Raises:
            ValueError: if the pool of a topic is empty or smaller than `depth`.
        """
        pools = ("all", "judged", "same_length") if self.parts.groups else ("all", "judged")
        check_arguments("str", repr(self), choices=pools, pool=pool)
        names, groups, members = list(self.documents), self.parts.groups, defaultdict[str, list[str]](list)
        for docno, group in groups.items():
            members[group].append(docno)
        qrels = self.get_qrels(variant)
        qrels = qrels[qrels["docno"].isin(names)]
        judged = qrels.groupby("qid")["docno"].agg(list).to_dict()
        positives = qrels[qrels["label"] > 0].groupby("qid")["docno"].agg(list).to_dict()
        rows: list[tuple[str, str, str, float, int]] = []
        for qid, query in self.get_topics(variant).itertuples(index=False):
            relevant = positives.get(qid, [])
            same_length = members[groups.get(relevant[0], "")] if pool == "same_length" and relevant else []
            population = {"all": names, "same_length": same_length, "judged": judged.get(qid, [])}[pool]
            docnos = _sample(random.Random(f"{seed}/{qid}"), population, relevant, depth, qid)
            rows.extend((qid, query, docno, float(-rank), rank) for rank, docno in enumerate(docnos))
        return pd.DataFrame(rows, columns=["qid", "query", "docno", "score", "rank"])

    def lengths(self, tokenizer: Any = None) -> np.ndarray:
        """Return the length of each document, `(D,)` int64, in the order of the corpus.

        Args:
            tokenizer: counts the tokens, see `token_counter`; None uses the collection's tokenizer, or counts words and
                punctuation marks if it has none.
        """
        if tokenizer is None and self.parts.lengths is not None:
            return np.fromiter(self.parts.lengths(), dtype=np.int64)
        count = token_counter(self.tokenizer if tokenizer is None else tokenizer)
        return np.fromiter((count([row["text"]])[0] for row in self.corpus), dtype=np.int64)

    def statistics(self, tokenizer: Any = None, *, limits: Sequence[int] = (1431, 1500)) -> pd.DataFrame:
        """Return statistics of the collection, as in Tables 7 and 8 and Section C.2 of Boytsov et al. 2025.

        Args:
            tokenizer: counts the tokens, see `lengths`; the paper uses BERT's.
            limits: lengths in tokens; the table has the share of documents that exceed each of them.

        Returns:
            A frame with one row per variant of topics and qrels and one for `all` (column `split`). Unknown values are
            NaN. The other columns are

            - `queries`, their mean length `query_tokens` and mean number of relevant documents `positives`;
            - `documents` (those of the variant's length, if the collection has several), their mean length
              `document_tokens`, its `median`, `p90` and `max`, and the shares `over_1431` and so on;
            - `first_min`, `first_mean` and `first_max` of the first tokens of relevant passages, in tokens of the
              collection.
        """
        count, lengths = token_counter(self.tokenizer if tokenizer is None else tokenizer), self.lengths(tokenizer)
        known = {name: self._describe_component(name) is not None for name in ("topics", "qrels")}
        no_rows = pd.DataFrame(columns=["qid", "query", "label"])
        topics, qrels = (getattr(self, name) if known[name] else no_rows for name in known)
        group_of = np.array([self.parts.groups.get(docno) for docno in self.documents], dtype=object)
        rows = []
        for split in dict.fromkeys((*self.splits, "all")):
            qids = self.splits.get(split, topics["qid"])
            queries = topics.loc[topics["qid"].isin(qids), "query"].tolist()
            relevant = qrels[qrels["qid"].isin(qids) & (qrels["label"] > 0)]
            in_split = group_of == split if split in group_of else slice(None)
            sizes = pd.Series(lengths[in_split], dtype="float64")
            gold = self.gold if split == "all" else self.gold[self.gold["qid"].isin(qids)]
            firsts = gold["first_token"]
            rows.append(
                {
                    "split": split,
                    "queries": len(queries),
                    "query_tokens": np.mean(count(queries)) if queries else np.nan,
                    "positives": len(relevant) / len(queries) if queries and known["qrels"] else np.nan,
                    "documents": len(sizes),
                    "document_tokens": sizes.mean(),
                    "median": sizes.median(),
                    "p90": sizes.quantile(0.9),
                    "max": lengths[in_split].max(initial=0),
                    **{f"over_{limit}": (sizes > limit).mean() for limit in limits},
                    **{f"first_{name}": float(firsts.agg(name)) for name in ("min", "mean", "max")},
                }
            )
        return pd.DataFrame(rows)

    def _of_variant(self, frame: pd.DataFrame, variant: str | None) -> pd.DataFrame:
        variant = variant or self._default
        if variant is None:
            return frame.copy()
        splits = self.splits
        check_arguments("str", repr(self), choices=[None, *splits], variant=variant)
        return frame[frame["qid"].isin(set(splits[variant]))].reset_index(drop=True)

    def _describe_component(self, component: str) -> bool | list[str] | None:
        if component in ("topics", "qrels"):
            return self._variants or list(self.parts.splits) or True
        return True if component == "corpus" else None

    def __repr__(self) -> str:
        return f"PositionedCollection({self.name!r})"


def _sample(rng: random.Random, population: list[str], positives: list[str], depth: int | None, qid: str) -> list[str]:
    """Return `depth` documents in random order, including all positives; None for the whole population."""
    if depth is None and population:
        return rng.sample(population, len(population))
    if depth is None or not len(positives) <= depth <= len(population):
        contents = f"its pool has {len(population)} documents, of which {len(positives)} are relevant"
        raise ValueError(f"depth={depth} is not possible for qid {qid!r}: {contents}")
    distinct = set(positives)
    # Enough even if every relevant document is drawn.
    reserve = rng.sample(population, min(len(population), depth + len(distinct)))
    docnos = [*positives, *[docno for docno in reserve if docno not in distinct][: depth - len(positives)]]
    return rng.sample(docnos, len(docnos))


def between(rng: random.Random, first: int, last: int) -> int:
    """Draw a number from `first` to `last`, both included; the result is the same in all versions of Python."""
    # random() is the only method whose results Python guarantees not to change.
    return first + int(rng.random() * (last - first + 1))
