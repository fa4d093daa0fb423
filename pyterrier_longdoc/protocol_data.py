"""The data of a protocol: topics, qrels, candidates and texts, each made when it is first needed."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import pandas as pd
import pyterrier as pt

from .experiment.perquery import check_columns
from .experiment.runs import as_strings
from .frames import texts_of
from .training.args import TrainingArgs
from .training.groups import make_groups
from .training.kept import TrainingData


@dataclass(frozen=True)
class TopicSet:
    """Topics and their judgements.

    Attributes:
        dataset: PyTerrier's name of the dataset, e.g. `"irds:msmarco-document/train"`.
        topics: the variant of its topics, e.g. `"title"`; None where there is only one.
        qrels: the variant of its qrels.
    """

    dataset: str
    topics: str | None = None
    qrels: str | None = None

    @property
    def corpus(self) -> str:
        """The collection that it is about, e.g. `"msmarco-document"`."""
        return self.dataset.removeprefix("irds:").partition("/")[0]

    @property
    def name(self) -> str:
        """In short, e.g. `"trec-dl-2019"`."""
        return next((part for part in self.dataset.split("/")[1:] if part != "judged"), self.dataset)


@dataclass(eq=False)
class ProtocolData:
    """What a protocol trains and tests on.

    Args:
        train: topics to train on; None if these are other folds, or nothing is trained.
        test: topics to test on; of several the qids get the set's name in front.
        folds: names of datasets whose topics are the folds.
        fields: of the documents, joined by a space into the column `text`.
        depth: candidates for each query.
        max_train_queries: take so many of the training queries, chosen at random with the seed 0; None for all.
        first_stage: a retriever, or one for each corpus.
        datasets: the user's own datasets by the names of PyTerrier's that they stand for.
    """

    train: TopicSet | None
    test: Sequence[TopicSet]
    folds: Sequence[str]
    fields: Sequence[str]
    depth: int
    max_train_queries: int | None
    first_stage: pt.Transformer | Mapping[str, pt.Transformer]
    datasets: Mapping[str, Any]
    _known: dict[TopicSet, tuple[pd.DataFrame, pd.DataFrame]] = field(default_factory=dict, init=False)

    # Test.

    @cached_property
    def topics(self) -> pd.DataFrame:
        """`qid, query` of all test topics with a relevant document; others count for nothing, as in trec_eval."""
        return pd.concat([self._prefixed(part, self._judged(part)[0]) for part in self.test], ignore_index=True)

    @cached_property
    def qrels(self) -> pd.DataFrame:
        """`qid, docno, label` of these."""
        return pd.concat([self._prefixed(part, self._judged(part)[1]) for part in self.test], ignore_index=True)

    @cached_property
    def first_run(self) -> pd.DataFrame:
        """`qid, query, docno, score` of the first stage for the test topics."""
        runs = [self._prefixed(part, self._retrieved(part, self._judged(part)[0])) for part in self.test]
        return pd.concat(runs, ignore_index=True)

    @cached_property
    def candidates(self) -> pd.DataFrame:
        """The same with the texts, to be reranked."""
        texts = []
        for part in self.test:
            run = self.first_run
            if len(self.test) > 1:
                run = run[run["qid"].str.startswith(f"{part.name}:")]
            texts.append(self._with_text(part, run))
        return pd.concat(texts, ignore_index=True)

    @cached_property
    def fold_qids(self) -> list[list[str]]:
        """The qids of each fold."""
        return [self._topics(TopicSet(name, self.test[0].topics))["qid"].tolist() for name in self.folds]

    # Training.

    def training(self, args: TrainingArgs) -> TrainingData:
        """The training candidates, with the texts of those that the recipe may draw, and the qrels."""
        part, run, qrels = self._train_run
        return TrainingData(self._with_text(part, drawable(run, qrels, args)), qrels)

    @cached_property
    def _train_run(self) -> tuple[TopicSet, pd.DataFrame, pd.DataFrame]:
        if self.train is None:
            raise ValueError("there are no topics to train on")
        topics, qrels = self._judged(self.train)
        tested = {qid for part in self.test for qid in self._judged(part)[0]["qid"]}
        leaked = [qid for qid in topics["qid"] if qid in tested]
        if leaked:
            raise ValueError(
                f"{len(leaked)} queries are both in training ({self.train.dataset}) and in test, e.g. {leaked[0]!r}"
            )
        if self.max_train_queries is not None and len(topics) > self.max_train_queries:
            chosen = set(random.Random(0).sample(topics["qid"].tolist(), self.max_train_queries))
            topics = topics[topics["qid"].isin(chosen)]
        return self.train, self._retrieved(self.train, topics), qrels[qrels["qid"].isin(set(topics["qid"]))]

    # Parts.

    def _dataset(self, name: str) -> Any:
        if name in self.datasets:
            return self.datasets[name]
        try:
            return pt.get_dataset(name)
        except KeyError:
            raise ValueError(
                f"PyTerrier knows no dataset {name!r}: say where the data is with datasets={{{name!r}: dataset}}"
            ) from None

    def _topics(self, part: TopicSet) -> pd.DataFrame:
        topics = self._dataset(part.dataset).get_topics(part.topics)
        check_columns(topics, ("qid", "query"), f"the topics of {part.dataset}")
        return topics[["qid", "query"]].assign(qid=as_strings(topics["qid"])).reset_index(drop=True)

    def _judged(self, part: TopicSet) -> tuple[pd.DataFrame, pd.DataFrame]:
        """Topics with a relevant document, and their qrels."""
        if part in self._known:
            return self._known[part]
        qrels = self._dataset(part.dataset).get_qrels(part.qrels)
        check_columns(qrels, ("qid", "docno", "label"), f"the qrels of {part.dataset}")
        qrels = qrels[["qid", "docno", "label"]].assign(qid=as_strings(qrels["qid"]))
        useful = set(qrels["qid"][qrels["label"] > 0])
        topics = self._topics(part)
        topics = topics[topics["qid"].isin(useful)]
        if not len(topics):
            raise ValueError(f"no topic of {part.dataset} has a relevant document: check the qids of topics and qrels")
        self._known[part] = topics, qrels[qrels["qid"].isin(set(topics["qid"]))]
        return self._known[part]

    def _retrieved(self, part: TopicSet, topics: pd.DataFrame) -> pd.DataFrame:
        run = (self._stage(part.corpus) % self.depth).transform(topics)
        check_columns(run, ("qid", "docno", "score"), f"the candidates for {part.dataset}")
        # The topics' own words: retrievers rewrite them to what their query language takes.
        queries = dict(zip(topics["qid"], topics["query"], strict=True))
        qids = as_strings(run["qid"]).tolist()
        out = pd.DataFrame({"qid": qids, "query": [queries[qid] for qid in qids]})
        return out.assign(docno=as_strings(run["docno"]).tolist(), score=run["score"].tolist())

    def _stage(self, corpus: str) -> pt.Transformer:
        if not isinstance(self.first_stage, Mapping):
            corpora = {part.corpus for part in [*self.test, *([self.train] if self.train else [])]}
            if len(corpora) > 1:
                raise ValueError(
                    f"this protocol retrieves from {' and '.join(sorted(corpora))}: give first_stage= as a dict with a "
                    f"retriever for each"
                )
            return self.first_stage
        if corpus not in self.first_stage:
            raise ValueError(f"first_stage= has no retriever for {corpus!r}, only for {', '.join(self.first_stage)}")
        return self.first_stage[corpus]

    def _with_text(self, part: TopicSet, run: pd.DataFrame) -> pd.DataFrame:
        fields = list(self.fields)
        loader = self._dataset(part.dataset).text_loader(fields)
        return run.assign(text=texts_of(run, fields, loader))

    def _prefixed(self, part: TopicSet, frame: pd.DataFrame) -> pd.DataFrame:
        return frame if len(self.test) == 1 else frame.assign(qid=f"{part.name}:" + frame["qid"])


def drawable(run: pd.DataFrame, qrels: pd.DataFrame, args: TrainingArgs) -> pd.DataFrame:
    """The candidates that a recipe may draw, so that only their texts are loaded: the same training as with all.

    Args:
        run: `qid, query, docno` and `score` or `rank`.
        qrels: `qid, docno, label`.
        args: the recipe.

    Returns:
        Some rows of `run`.
    """
    rows = make_groups(run, [str(row) for row in range(len(run))], qrels, args)
    return run.iloc[sorted(int(row) for group in rows for row in group.texts)]
