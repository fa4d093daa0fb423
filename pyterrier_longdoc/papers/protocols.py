"""An experiment of a paper as one call: what is trained, tested and measured, and how."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pandas as pd
import pyterrier as pt

from ..common.arguments import arguments_of, check_seeds
from ..common.frames import as_strings, keys_of, texts_of
from ..common.presentation import ShowsChanges, changes, described
from ..common.warnings import warn
from ..experiment import Experiment, ExperimentResults
from ..experiment.systems import Fold
from ..rerankers.reranker import CrossEncoder
from ..training import TrainingArgs, add_judged
from ..training.examples import drawable
from ..training.resume import FINISHED, MODEL, TrainingData, check_new, fit_or_load, note_settings, settings_of
from .presets import Named, presets, with_own_rates

FIRST_STAGE = "first stage"
"""The name of the first stage among the systems of a protocol."""

Trained = str | Path | Callable[[str, int], Any]
"""Where trained models are: the folder of a protocol's run, or a function `(name, seed) -> model`."""


@dataclass(frozen=True, repr=False)
class TopicSet(ShowsChanges):
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


@dataclass(frozen=True, repr=False)
class Protocol:
    """How a collection is used: data, candidates, texts, recipe, folds, measures.

    Attributes:
        test: topics to test on; those of several sets are pooled.
        fields: of the documents, joined by a space.
        metrics: measures, the first of which the paper's Table 1 gives.
        train: topics to train on; None where the models are trained on other folds.
        folds: names of datasets whose topics are the folds.
        start: the protocol whose models, of the same configuration and seed, are trained further; None for models that
            start from their backbone.
        recipe: name of the recipe, see `training.recipes`.
        depth: candidates for each query, of the first stage.
        max_train_queries: train on so many first queries of the file; None for all.
        max_query_len: tokens of a query that are read.
        max_doc_len: tokens of a document that are read; FirstP reads 477.
        alpha: significance level of the paired t-test.
        published: the paper's figure that `compare` puts beside one's own.
        note: what the paper does not say, or does otherwise.
    """

    test: tuple[TopicSet, ...]
    fields: tuple[str, ...]
    metrics: tuple[str, ...]
    train: TopicSet | None = None
    folds: tuple[str, ...] = ()
    start: str | None = None
    recipe: str = "boytsov2025"
    depth: int = 100
    max_train_queries: int | None = None
    max_query_len: int = 32
    max_doc_len: int = 1431
    alpha: float = 0.05
    published: str | None = None
    note: str = ""

    def __repr__(self) -> str:
        known = [name for name, protocol in protocols.items() if protocol == self]
        return f"protocols[{known[0]!r}]" if known else f"Protocol({', '.join(changes(self))})"

    def run(
        self,
        models: Mapping[str, Callable[[int], Any]] | Sequence[str],
        first_stage: pt.Transformer | Mapping[str, pt.Transformer],
        folder: str | Path,
        *,
        seeds: Sequence[int] = (0, 1, 2),
        start_from: Trained | None = None,
        trained: Trained | None = None,
        datasets: Mapping[str, Any] | None = None,
        arguments: Mapping[str, Any] | None = None,
        partner: Mapping[str, str] | None = None,
        correction: str | None = None,
        verbose: bool = False,
    ) -> ExperimentResults:
        """Train the models with each seed, rerank the candidates and compare.

        As the authors do, the protocols' recipes also train on judged documents that the first stage did not retrieve
        (`judged="all"`); their text is the dataset's. A recipe of one's own decides that for itself.

        Models without `fit` are not trained. Others get the protocol's recipe (unless they have one), its document
        length (unless they have one) and the seed. Presets that the paper trains for more epochs on MS MARCO (two for
        PARADE Transf-RAND-L2) are; the last epoch's weights are kept, without looking at validation data.

        Args:
            models: functions that make a new model for a seed, by name: `{"MaxP": lambda seed: ld.MaxP(seed=seed)}`;
                or names of `ld.presets`.
            first_stage: a retriever; a dict with one for each corpus (`"msmarco-document"`, `"msmarco-document-v2"`)
                if there are several.
            folder: for models, runs and results. A second call goes on where the first one was interrupted.
            seeds: 0, 1, 2 in the paper.
            start_from: where the models of the protocol `start` are: the `folder` of its run, or a function
                `(name, seed) -> model`. To train from the backbones: `dataclasses.replace(protocol, start=None)`.
            trained: where models are that need no training, e.g. MS MARCO's for a zero-shot test: as `start_from`.
            datasets: own datasets by the names of PyTerrier's that they stand for: anything with `get_topics`,
                `get_qrels` and `text_loader`.
            arguments: further constructor arguments of presets and of trained models in a folder, e.g.
                `{"device": "cuda", "batch_size": 128}`.
            partner: for a model the name of its FirstP; None for that of its preset.
            correction: of p-values, see `ld.Experiment`; the paper has none.
            verbose: show progress bars.

        Returns:
            The results, with the first stage as the baseline: `.table`, `.perquery`, `.to_markdown()`, `.run(name,
            seed)`.

        """
        check_seeds(seeds)
        if self.start is not None and start_from is None and trained is None:
            start = f"protocols[{self.start!r}]"
            raise ValueError(f"models start from those of {start}: give its folder as start_from=, or trained=")
        if trained is not None:
            models = {name: partial(find_model, trained, name, **(arguments or {})) for name in models}
        elif not isinstance(models, Mapping):
            models = {name: preset_factory(self, name, arguments or {}) for name in models}
        elif arguments:
            raise ValueError("arguments= are for presets and trained models; the functions in models= pass their own")
        data = _Data(self, first_stage, datasets or {}, trains=trained is None)
        if partner is None:
            of_presets = {name: presets[name].partner for name in models if name in presets}
            partner = {name: first for name, first in of_presets.items() if first is not None and first in models}
        return Experiment(
            {
                FIRST_STAGE: data.first_run,
                **{name: _System(name, make, data, start_from, Path(folder)) for name, make in models.items()},
            },
            data.topics,
            data.qrels,
            self.metrics,
            seeds=seeds,
            folds=data.fold_qids if data.trains and self.folds else None,
            baseline=FIRST_STAGE,
            partner=partner,
            correction=correction,
            alpha=self.alpha,
            save_dir=folder,
            verbose=verbose,
        )

    def compare(self, results: ExperimentResults, *, published: str | None = None) -> pd.DataFrame:
        """Return the presets' own figures beside the paper's: `name, measure, own, published`.

        `published` names another of the paper's figures than the protocol's, e.g. `"far RR, zero-shot"`.
        """
        figure, measure = published or self.published or "", self.metrics[0]
        names = [name for name in results.names if name in presets]
        rows = [(name, measure, results.means.at[name, measure], presets[name].published.get(figure)) for name in names]
        return pd.DataFrame(rows, columns=["name", "measure", "own", "published"])

    def fold_qids(self, datasets: Mapping[str, Any] | None = None) -> list[list[str]]:
        """Return the qids of each fold, as `ld.Experiment` takes them; `datasets` as in `run`."""
        return _Data(self, {}, datasets or {}, trains=False).fold_qids

    def training(self, seed: int, *, epochs: int | None = None) -> TrainingArgs:
        """Return the recipe with a seed, and perhaps another number of epochs."""
        return TrainingArgs.preset(self.recipe, seed=int(seed), **({} if epochs is None else {"epochs": epochs}))


def preset_factory(protocol: Protocol, name: str, arguments: Mapping[str, Any]) -> Callable[[int], Any]:
    """Return what makes a preset's model for a seed, with the recipe of the protocol."""
    preset = presets[name]
    if preset.epochs is None:
        return lambda seed: preset(**arguments)
    # Epochs of a preset are those on MS MARCO; every model is trained further in the same way.
    epochs = preset.epochs if protocol.start is None and preset.epochs > 1 else None

    def make(seed: int) -> Any:
        model = preset(**{"seed": seed, **arguments})
        if "training" not in arguments:
            model.training = with_own_rates(protocol.training(seed, epochs=epochs), model)
        return model

    return make


def models_folder(folder: str | Path, name: str, seed: int) -> Path:
    """Return where the run of a protocol keeps a model; models of folds are below it."""
    return Path(folder) / "models" / quote(name, safe=" ()+,=@-_").replace(".", "%2E") / f"seed-{seed}"


def find_model(source: Trained, name: str, seed: int, **arguments: Any) -> Any:
    """Return the trained model of a name and seed, read from a folder with these constructor arguments."""
    if callable(source):
        return source(name, seed)
    return CrossEncoder.load(models_folder(source, name, seed) / MODEL, **arguments)


@dataclass(eq=False)
class _System:
    """A model of a protocol, trained if need be, as a system `(seed, fold) -> pipeline` of `ld.Experiment`."""

    name: str
    make: Callable[[int], Any]
    data: _Data
    start_from: Trained | None
    folder: Path
    made: list[Any] = field(default_factory=list)

    def __call__(self, seed: int, fold: Fold | None = None) -> pt.Transformer:
        model = self.make(seed)
        if self.data.trains and hasattr(model, "fit"):
            check_new(model, self.made)
            self.made.append(model)
            model = self._fitted(self._prepared(model, seed), seed, fold)
        return pt.Transformer.from_df(self.data.candidates) >> model

    def _prepared(self, model: Any, seed: int) -> CrossEncoder:
        """Give a model the protocol's settings."""
        protocol, name = self.data.protocol, self.name
        if not isinstance(model, CrossEncoder) or model.text_field != "text":
            raise ValueError(f"{name!r} must be a reranker of this package with text_field='text', not {model!r}")
        if model.max_query_len != protocol.max_query_len:
            paper = f"in the paper it is {protocol.max_query_len}"
            warn(f"{name!r} has max_query_len={model.max_query_len}; {paper}", UserWarning)
        model.max_doc_len = model.max_doc_len or protocol.max_doc_len
        model.training = replace(model.training or with_own_rates(protocol.training(seed), model), seed=int(seed))
        return model

    def _fitted(self, model: CrossEncoder, seed: int, fold: Fold | None) -> CrossEncoder:
        """Train a model, or read it if its training is finished in the folder: then nothing is retrieved for it."""
        folder = models_folder(self.folder, self.name, seed)
        folder = folder if fold is None else folder / f"fold-{fold.index}"
        protocol = asdict(self.data.protocol)
        note_settings({**settings_of(model), "protocol": protocol, "start": described(self.start_from)}, folder)
        if (folder / FINISHED).is_file():
            return CrossEncoder.load(folder / MODEL, **arguments_of(model, "computing", "call"))
        if self.start_from is not None:
            model.start_from(find_model(self.start_from, self.name, seed))
        return fit_or_load(model, self.data.training(model.recipe, fold), folder)


@dataclass(eq=False)
class _Data:
    """What a protocol trains and tests on. Of several test sets the qids get the set's name in front."""

    protocol: Protocol
    first_stage: pt.Transformer | Mapping[str, pt.Transformer]
    datasets: Mapping[str, Any]  # the user's, by the names of PyTerrier's that they stand for
    trains: bool

    def __post_init__(self) -> None:
        train = [] if self.protocol.train is None else [self.protocol.train]
        known = [part.dataset for part in (*self.protocol.test, *train)] + list(self.protocol.folds)
        if not set(self.datasets) <= set(known):
            raise ValueError(f"datasets= has {list(self.datasets)}, but this protocol uses {known}")

    @cached_property
    def topics(self) -> pd.DataFrame:
        """`qid, query` of all test topics with a relevant document; others count for nothing, as in trec_eval."""
        return pd.concat([self._prefixed(part, topics) for part, topics, _ in self._tests], ignore_index=True)

    @cached_property
    def qrels(self) -> pd.DataFrame:
        """`qid, docno, label` of these."""
        return pd.concat([self._prefixed(part, qrels) for part, _, qrels in self._tests], ignore_index=True)

    @cached_property
    def first_run(self) -> pd.DataFrame:
        """`qid, query, docno, score` of the first stage for the test topics."""
        return pd.concat([run for _, run in self._first_runs], ignore_index=True)

    @cached_property
    def candidates(self) -> pd.DataFrame:
        """The same with the texts, to be reranked."""
        return pd.concat([self._with_text(part, run) for part, run in self._first_runs], ignore_index=True)

    @cached_property
    def fold_qids(self) -> list[list[str]]:
        """The qids of each fold."""
        variant = self.protocol.test[0].topics
        return [self._topics(TopicSet(name, variant))["qid"].tolist() for name in self.protocol.folds]

    def training(self, args: TrainingArgs, fold: Fold | None) -> TrainingData:
        """Return the candidates that the recipe may draw, with their texts and qrels, of a fold the other folds'."""
        part, topics, run, qrels = self._train if fold is None else self._other_folds(fold)
        if args.judged == "all":
            run = add_judged(run, qrels, topics=topics)
        run = self._with_text(part, drawable(run, qrels, args))
        drawn = set(keys_of(run))
        # Qrels of other documents would ask for their text.
        return TrainingData(run, qrels[[key in drawn for key in keys_of(qrels)]])

    @cached_property
    def _tests(self) -> list[tuple[TopicSet, pd.DataFrame, pd.DataFrame]]:
        return [(part, *self._judged(part)) for part in self.protocol.test]

    @cached_property
    def _first_runs(self) -> list[tuple[TopicSet, pd.DataFrame]]:
        return [(part, self._prefixed(part, self._retrieved(part, topics))) for part, topics, _ in self._tests]

    @cached_property
    def _train(self) -> tuple[TopicSet, pd.DataFrame, pd.DataFrame, pd.DataFrame]:
        """The training set, its topics, their candidates and qrels."""
        part, most = self.protocol.train or self.protocol.test[0], self.protocol.max_train_queries
        topics, qrels = self._judged(part)
        leaked = topics["qid"].isin(pd.concat([tested["qid"] for _, tested, _ in self._tests]))
        if leaked.any():
            raise ValueError(f"{leaked.sum()} queries are both in training ({part.dataset}) and in test")
        topics = topics if most is None else topics.head(most)
        return part, topics, self._retrieved(part, topics), qrels[qrels["qid"].isin(topics["qid"])]

    def _other_folds(self, fold: Fold) -> tuple[TopicSet, pd.DataFrame, pd.DataFrame, pd.DataFrame]:
        (part,), topics = self.protocol.test, fold.train_topics
        return part, topics, self.first_run[self.first_run["qid"].isin(topics["qid"])], fold.train_qrels

    def _dataset(self, name: str) -> Any:
        return self.datasets[name] if name in self.datasets else pt.get_dataset(name)

    def _topics(self, part: TopicSet) -> pd.DataFrame:
        topics = self._dataset(part.dataset).get_topics(part.topics)
        return topics[["qid", "query"]].assign(qid=as_strings(topics["qid"])).reset_index(drop=True)

    def _judged(self, part: TopicSet) -> tuple[pd.DataFrame, pd.DataFrame]:
        """Return topics with a relevant document, and their qrels."""
        topics, qrels = self._topics(part), self._dataset(part.dataset).get_qrels(part.qrels)
        qrels = qrels[["qid", "docno", "label"]].assign(qid=as_strings(qrels["qid"]))
        topics = topics[topics["qid"].isin(qrels["qid"][qrels["label"] > 0])]
        if not len(topics):
            raise ValueError(f"no topic of {part.dataset} has a relevant document: check the qids of topics and qrels")
        return topics, qrels[qrels["qid"].isin(topics["qid"])]

    def _retrieved(self, part: TopicSet, topics: pd.DataFrame) -> pd.DataFrame:
        stage = self.first_stage[part.corpus] if isinstance(self.first_stage, Mapping) else self.first_stage
        run = (stage % self.protocol.depth).transform(topics)
        # The topics' own words: retrievers rewrite them to what their query language takes.
        queries = dict(zip(topics["qid"], topics["query"], strict=True))
        qids = as_strings(run["qid"]).tolist()
        out = pd.DataFrame({"qid": qids, "query": [queries[qid] for qid in qids]})
        return out.assign(docno=as_strings(run["docno"]).tolist(), score=run["score"].tolist())

    def _with_text(self, part: TopicSet, run: pd.DataFrame) -> pd.DataFrame:
        fields = list(self.protocol.fields)
        return run.assign(text=texts_of(run, fields, self._dataset(part.dataset).text_loader(fields)))

    def _prefixed(self, part: TopicSet, frame: pd.DataFrame) -> pd.DataFrame:
        return frame if len(self.protocol.test) == 1 else frame.assign(qid=f"{part.name}:" + frame["qid"])


class Protocols(Named[Protocol]):
    """The protocols by name; `table()` shows them all.

    Example:
        >>> protocols["robust04-title"].recipe, protocols["robust04-title"].start
        ('robust04', 'msmarco-document')
    """

    kind = "protocol"

    def table(self) -> pd.DataFrame:
        """Return one row for each protocol, a column for each setting."""
        rows = [
            {
                "name": name,
                "train": protocol.train.dataset if protocol.train else f"{len(protocol.folds)} folds",
                "test": ", ".join(part.dataset for part in protocol.test),
                "depth": protocol.depth,
                "recipe": protocol.recipe,
                "start": protocol.start,
                "metrics": ", ".join(protocol.metrics),
                "alpha": protocol.alpha,
                "note": protocol.note,
            }
            for name, protocol in self.items()
        ]
        return pd.DataFrame(rows)


_MSMARCO = TopicSet("irds:msmarco-document/train")
_MSMARCO_FIELDS = ("url", "title", "body")
_DL = {
    2019: TopicSet("irds:msmarco-document/trec-dl-2019/judged"),
    2020: TopicSet("irds:msmarco-document/trec-dl-2020/judged"),
    2021: TopicSet("irds:msmarco-document-v2/trec-dl-2021/judged"),
}
_ROBUST04 = "irds:disks45/nocr/trec-robust-2004"
_FAR = "far-relevant"


def _deep_learning(*years: int) -> Protocol:
    return Protocol(
        test=tuple(_DL[year] for year in years),
        fields=_MSMARCO_FIELDS,
        metrics=("nDCG@10", "P@10", "AP"),
        train=_MSMARCO,
        published="DL nDCG@10" if len(years) == len(_DL) else None,
        note="trained on MS MARCO v1, also for 2021; the paper's candidates are ANCE's, for 2021 mixed with BM25",
    )


def _robust04(part: str) -> Protocol:
    return Protocol(
        test=(TopicSet(_ROBUST04, part),),
        fields=("title", "body"),
        metrics=("nDCG@20", "P@20", "AP"),
        folds=tuple(f"{_ROBUST04}/fold{number}" for number in range(1, 6)),
        start="msmarco-document",
        recipe="robust04",
        depth=1000,
        published=f"{part} nDCG@20",
        note="negatives come from BM25's best 1000; the depth of reranking is not stated",
    )


protocols = Protocols(
    {
        "msmarco-document": Protocol(
            test=(TopicSet("irds:msmarco-document/dev"),),
            fields=_MSMARCO_FIELDS,
            metrics=("RR@100",),
            train=_MSMARCO,
            alpha=0.01,
            published="dev RR",
            note="the paper's candidates are BM25's on documents expanded by doc2query",
        ),
        "trec-dl": _deep_learning(2019, 2020, 2021),
        "trec-dl-2019": _deep_learning(2019),
        "trec-dl-2020": _deep_learning(2020),
        "trec-dl-2021": _deep_learning(2021),
        "robust04-title": _robust04("title"),
        "robust04-description": _robust04("description"),
        "far-relevant": Protocol(
            test=(TopicSet(_FAR, "dev_official_sample1K", "dev_official_sample1K"),),
            fields=("text",),
            metrics=("RR@100",),
            train=TopicSet(_FAR, "bitext", "bitext"),
            start="msmarco-document",
            max_train_queries=50_000,
            alpha=0.01,
            published="far RR, fine-tuned",
            note="give the data as datasets={'far-relevant': ld.read_far_relevant(folder)}; candidates are BM25's",
        ),
    }
)
"""MS MARCO documents v1 (dev set), TREC DL 2019 to 2021 each and pooled, Robust04 by title and by description with the
five folds of Huston & Croft 2014 (from ir_datasets), and MS MARCO FarRelevant."""
