"""An experiment of a paper as one call: its data, training, tests and measures."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, cast
from weakref import WeakSet

import pandas as pd
import pyterrier as pt

from ..common.arguments import arguments_of, check_arguments, check_seeds
from ..common.files import folder_name
from ..common.frames import as_strings, keys_of, labels_of, texts_of
from ..common.presentation import ShowsChanges, described
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
"""Source of trained models: the folder of a protocol's run, or a function `(name, seed) -> model`."""


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
        """Name of the collection, e.g. `"msmarco-document"`."""
        return self.dataset.removeprefix("irds:").partition("/")[0]

    @property
    def name(self) -> str:
        """Short name, e.g. `"trec-dl-2019"`."""
        return next((part for part in self.dataset.split("/")[1:] if part != "judged"), self.dataset)


@dataclass(frozen=True, repr=False)
class Protocol(ShowsChanges):
    """How a collection is used: data, candidates, texts, recipe, folds, measures.

    Attributes:
        test: topics to test on; those of several sets are pooled.
        fields: of the documents, joined by a space.
        metrics: measures, first the one of the paper's Table 1.
        train: topics to train on; None if the models are trained on other folds.
        folds: names of datasets whose topics are the folds.
        start: the protocol whose models, of the same configuration and seed, are trained further; None to start from
            backbones.
        recipe: name of the recipe, see `training.recipes`.
        depth: candidates for each query, of the first stage.
        max_train_queries: train on the first queries of the file, at most so many; None for all.
        max_query_len: most tokens of a query.
        max_doc_len: most tokens of a document; FirstP reads 477.
        alpha: significance level of the paired t-test.
        published: the paper's figure that `compare` puts beside your own.
        note: points that the paper leaves open or does otherwise.
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
        verbose: bool = False,
    ) -> ExperimentResults:
        """Train the models with each seed, rerank the candidates and compare.

        As the authors do, the protocols' recipes also train on judged documents that the first stage did not retrieve
        (`judged="all"`), with the text of the dataset. Your own recipe decides that for itself.

        Models without `fit` are not trained. Others get the seed and, unless they have their own, the protocol's
        recipe and document length. Presets have the paper's epochs on MS MARCO (two for PARADE Transf-RAND-L2); the
        weights of the last epoch are kept, without validation data.

        Args:
            models: functions that make a new model for a seed, by name: `{"MaxP": lambda seed: ld.MaxP(seed=seed)}`;
                or names of `ld.presets`.
            first_stage: a retriever; a dict with one for each corpus (`"msmarco-document"`, `"msmarco-document-v2"`)
                if there are several.
            folder: for models, runs and results. After an interruption a second call goes on.
            seeds: 0, 1, 2 in the paper.
            start_from: source of the models of the protocol `start`: the `folder` of its run, or a function
                `(name, seed) -> model`. To train from the backbones: `dataclasses.replace(protocol, start=None)`.
            trained: source of models that need no training, as `start_from`, e.g. MS MARCO's for a zero-shot test.
            datasets: your datasets by the names of PyTerrier's that they replace: anything with `get_topics`,
                `get_qrels` and `text_loader`.
            arguments: more constructor arguments of presets and of trained models in a folder, e.g.
                `{"device": "cuda", "batch_size": 128}`.
            verbose: show progress bars.

        Returns:
            The results, with the first stage as the baseline and the presets' FirstP as their partners; `retest` takes
            others, and a correction, which the paper has not.
        """
        check_seeds(seeds)
        if arguments and (isinstance(models, Mapping) if trained is None else not isinstance(trained, str | Path)):
            raise ValueError("arguments= are for presets and trained models in a folder; functions pass their own")
        if self.start is not None and start_from is None and trained is None:
            start = f"protocols[{self.start!r}]"
            raise ValueError(f"models start from those of {start}: give its folder as start_from=, or trained=")
        if trained is not None:
            models = {name: partial(find_model, trained, name, **(arguments or {})) for name in models}
        elif not isinstance(models, Mapping):
            models = {name: preset_factory(self, name, arguments or {}) for name in models}
        for name, make in models.items():
            if isinstance(make, pt.Transformer):
                raise ValueError(
                    f"models[{name!r}] must be a function of a seed: lambda seed: {type(make).__name__}(...)"
                )
        data = _Data(self, first_stage, datasets or {}, trains=trained is None)
        partners = {name: presets[name].partner for name in models if name in presets}
        systems = {name: _System(name, make, data, start_from, Path(folder)) for name, make in models.items()}
        for system in systems.values() if data.trains else ():
            for seed in seeds:
                system.note(seed)
        return Experiment(
            {FIRST_STAGE: data.first_run, **systems},
            data.topics,
            data.qrels,
            self.metrics,
            seeds=seeds,
            folds=data.fold_qids if data.trains and self.folds else None,
            baseline=FIRST_STAGE,
            partner={name: first for name, first in partners.items() if first is not None and first in models},
            alpha=self.alpha,
            save_dir=folder,
            verbose=verbose,
        )

    def compare(self, results: ExperimentResults) -> pd.DataFrame:
        """Return the presets' own figures beside the paper's: `name, measure, own, published`."""
        figure, measure = self.published or "", self.metrics[0]
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
    """Return a function that makes a preset's model for a seed, with the recipe of the protocol."""
    preset = presets[name]
    if preset.epochs is None:
        return lambda seed: preset(**arguments)
    # Epochs of a preset are those on MS MARCO; later training is the same for every model.
    epochs = preset.epochs if protocol.start is None and preset.epochs > 1 else None

    def make(seed: int) -> Any:
        model = preset(**{"seed": seed, **arguments})
        if "training" not in arguments:
            model.training = with_own_rates(protocol.training(seed, epochs=epochs), model)
        return model

    return make


def models_folder(folder: str | Path, name: str, seed: int) -> Path:
    """Return a model's folder in the run of a protocol; models of folds are below it."""
    return Path(folder) / "models" / folder_name(name) / f"seed-{seed}"


def find_model(source: Trained, name: str, seed: int, **arguments: Any) -> Any:
    """Return the trained model of a name and seed, read from a folder with these constructor arguments."""
    if callable(source):
        return source(name, seed)
    return CrossEncoder.load(models_folder(source, name, seed) / MODEL, **arguments)


@dataclass(eq=False)
class _System:
    """A model of a protocol, trained if necessary, as a system `(seed, fold) -> pipeline` of `ld.Experiment`."""

    name: str
    make: Callable[[int], Any]
    data: _Data
    start_from: Trained | None
    folder: Path
    models: WeakSet[Any] = field(default_factory=WeakSet)  # made so far

    def __call__(self, seed: int, fold: Fold | None = None) -> pt.Transformer:
        model = self.make(seed)
        if self.data.trains and hasattr(model, "fit"):
            check_new(model, self.models)
            self.models.add(model)
            model = self._fit(self._configure(model, seed), seed, fold)
        return pt.Transformer.from_df(self.data.candidates) >> model

    def note(self, seed: int) -> None:
        """Note the settings of a model in its folder, which must not hold a model with other settings."""
        model, start = self.make(seed), self.start_from
        if hasattr(model, "fit"):
            if self.data.protocol.train is None and not self.data.protocol.folds:
                raise ValueError("the protocol has neither train= nor folds=: give one, or trained models as trained=")
            start = str(Path(start).resolve()) if isinstance(start, str | Path) else described(start)
            settings = settings_of(self._configure(model, seed))
            folder = models_folder(self.folder, self.name, seed)
            note_settings({**settings, "protocol": asdict(self.data.protocol), "start": start}, folder)

    def _configure(self, model: Any, seed: int) -> CrossEncoder:
        """Give a model the protocol's settings."""
        protocol, name = self.data.protocol, self.name
        if not isinstance(model, CrossEncoder):
            raise ValueError(f"{name!r} must be a reranker of this package, not {model!r}")
        if model.max_query_len != protocol.max_query_len:
            paper = f"in the paper it is {protocol.max_query_len}"
            warn(f"{name!r} has max_query_len={model.max_query_len}; {paper}", UserWarning)
        model.max_doc_len = model.max_doc_len or protocol.max_doc_len
        model.training = replace(model.training or with_own_rates(protocol.training(seed), model), seed=int(seed))
        return model

    def _fit(self, model: CrossEncoder, seed: int, fold: Fold | None) -> CrossEncoder:
        """Return the finished model of the folder, or train it."""
        folder = models_folder(self.folder, self.name, seed)
        folder = folder if fold is None else folder / f"fold-{fold.index}"
        if (folder / FINISHED).is_file():
            return CrossEncoder.load(folder / MODEL, **arguments_of(model, "computing", "call"))
        if self.start_from is not None:
            model.start_from(find_model(self.start_from, self.name, seed))
        return fit_or_load(model, self.data.training(model.recipe, fold), folder)


@dataclass(eq=False)
class _Data:
    """The data of a protocol. With several test sets each qid begins with the name of its set."""

    protocol: Protocol
    first_stage: pt.Transformer | Mapping[str, pt.Transformer]
    datasets: Mapping[str, Any]  # the user's, by the names of PyTerrier's that they replace
    trains: bool

    def __post_init__(self) -> None:
        parts = [*self.protocol.test, *([self.protocol.train] if self.protocol.train else [])]
        names = [*(part.dataset for part in parts), *self.protocol.folds]
        for name in self.datasets:
            check_arguments("str", choices=names, datasets=name)

    @cached_property
    def topics(self) -> pd.DataFrame:
        """`qid, query` of all test topics with a relevant document; others do not count, as in trec_eval."""
        return pd.concat([self._prefix_qids(part, topics) for part, topics, _ in self._tests], ignore_index=True)

    @cached_property
    def qrels(self) -> pd.DataFrame:
        """`qid, docno, label` of the test topics."""
        return pd.concat([self._prefix_qids(part, qrels) for part, _, qrels in self._tests], ignore_index=True)

    @cached_property
    def first_run(self) -> pd.DataFrame:
        """`qid, query, docno, score` of the first stage for the test topics."""
        return pd.concat([run for _, run in self._first_runs], ignore_index=True)

    @cached_property
    def candidates(self) -> pd.DataFrame:
        """The first run with texts, to be reranked."""
        return pd.concat([self._add_text(part, run) for part, run in self._first_runs], ignore_index=True)

    @cached_property
    def fold_qids(self) -> list[list[str]]:
        """The qids of each fold."""
        variant = self.protocol.test[0].topics
        return [self._topics(TopicSet(name, variant))["qid"].tolist() for name in self.protocol.folds]

    def training(self, args: TrainingArgs, fold: Fold | None) -> TrainingData:
        """Return the candidates that the recipe may draw, with texts and qrels; for a fold those of the other folds."""
        part, topics, run, qrels = self._train if fold is None else self._other_folds(fold)
        if args.judged == "all":
            run = add_judged(run, qrels, topics=topics)
        run = self._add_text(part, drawable(run, qrels, args))
        keys = set(keys_of(run))
        # Qrels of other documents would need their text.
        return TrainingData(run, qrels[[key in keys for key in keys_of(qrels)]])

    @cached_property
    def _tests(self) -> list[tuple[TopicSet, pd.DataFrame, pd.DataFrame]]:
        return [(part, *self._topics_and_qrels(part)) for part in self.protocol.test]

    @cached_property
    def _first_runs(self) -> list[tuple[TopicSet, pd.DataFrame]]:
        return [(part, self._prefix_qids(part, self._retrieve(part, topics))) for part, topics, _ in self._tests]

    @cached_property
    def _train(self) -> tuple[TopicSet, pd.DataFrame, pd.DataFrame, pd.DataFrame]:
        """The training set, its topics, their candidates and qrels."""
        part, limit = cast(TopicSet, self.protocol.train), self.protocol.max_train_queries
        topics, qrels = self._topics_and_qrels(part)
        overlap = topics["qid"].isin(pd.concat([test_topics["qid"] for _, test_topics, _ in self._tests]))
        if overlap.any():
            raise ValueError(f"{overlap.sum()} queries are both in training ({part.dataset}) and in test")
        topics = topics if limit is None else topics.head(limit)
        return part, topics, self._retrieve(part, topics), qrels[qrels["qid"].isin(topics["qid"])]

    def _other_folds(self, fold: Fold) -> tuple[TopicSet, pd.DataFrame, pd.DataFrame, pd.DataFrame]:
        (part,), topics = self.protocol.test, fold.train_topics
        return part, topics, self.first_run[self.first_run["qid"].isin(topics["qid"])], fold.train_qrels

    def _dataset(self, name: str) -> Any:
        return self.datasets[name] if name in self.datasets else pt.get_dataset(name)

    def _topics(self, part: TopicSet) -> pd.DataFrame:
        topics = self._dataset(part.dataset).get_topics(part.topics)
        return topics[["qid", "query"]].assign(qid=as_strings(topics["qid"])).reset_index(drop=True)

    def _topics_and_qrels(self, part: TopicSet) -> tuple[pd.DataFrame, pd.DataFrame]:
        """Return topics with a relevant document, and their qrels."""
        topics, qrels = self._topics(part), self._dataset(part.dataset).get_qrels(part.qrels)
        qrels = qrels[["qid", "docno", "label"]].assign(qid=as_strings(qrels["qid"]))
        topics = topics[topics["qid"].isin(qrels["qid"][labels_of(qrels, "qrels") > 0])]
        return topics, qrels[qrels["qid"].isin(topics["qid"])]

    def _retrieve(self, part: TopicSet, topics: pd.DataFrame) -> pd.DataFrame:
        stage = self.first_stage[part.corpus] if isinstance(self.first_stage, Mapping) else self.first_stage
        run = (stage % self.protocol.depth).transform(topics)
        # The topics' own words: retrievers rewrite them in their query language.
        queries = dict(zip(topics["qid"], topics["query"], strict=True))
        qids = as_strings(run["qid"]).tolist()
        out = pd.DataFrame({"qid": qids, "query": [queries[qid] for qid in qids]})
        return out.assign(docno=as_strings(run["docno"]).tolist(), score=run["score"].tolist())

    def _add_text(self, part: TopicSet, run: pd.DataFrame) -> pd.DataFrame:
        fields = list(self.protocol.fields)
        return run.assign(text=texts_of(run, fields, self._dataset(part.dataset).text_loader(fields)))

    def _prefix_qids(self, part: TopicSet, frame: pd.DataFrame) -> pd.DataFrame:
        return frame if len(self.protocol.test) == 1 else frame.assign(qid=f"{part.name}:" + frame["qid"])


class Protocols(Named[Protocol]):
    """The protocols by name; `table()` shows them all.

    Example:
        >>> protocols["robust04-title"].recipe, protocols["robust04-title"].start
        ('robust04', 'msmarco-document')
    """

    def table(self) -> pd.DataFrame:
        """Return one row for each protocol, a column for each setting."""
        rows = []
        for name, protocol in self.items():
            train = protocol.train.dataset if protocol.train else f"{len(protocol.folds)} folds"
            data = {"train": train, "test": ", ".join(part.dataset for part in protocol.test)}
            columns = ("depth", "recipe", "start", "metrics", "alpha", "note")
            settings = {column: getattr(protocol, column) for column in columns}
            rows.append({"name": name, **data, **settings, "metrics": ", ".join(protocol.metrics)})
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
