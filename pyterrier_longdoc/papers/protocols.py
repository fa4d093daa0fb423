"""An experiment of a paper as one call: what is trained, tested and measured, and how.

From top to bottom: the data of a protocol, `Protocol` itself, its models, and the protocols of the papers by name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pandas as pd
import pyterrier as pt

from ..common.arguments import check_seeds
from ..common.frames import as_strings, check_columns, keys_of, texts_of
from ..common.notices import warn
from ..common.presentation import ShowsChanges, changes
from ..experiment import Experiment, ExperimentResults
from ..experiment.systems import asked_of, called_with
from ..rerankers.base import LongDocReranker
from ..training import TrainingArgs, add_judged, k_fold_fit
from ..training.examples import drawable
from ..training.resume import MODEL, TrainingData, check_new, fit_or_load, note_settings, settings_of
from .presets import Named, presets, with_own_rates

FIRST_STAGE = "first stage"
"""The name of the first stage among the systems of a protocol."""

Factory = Callable[[int], Any]
"""Makes a new model for a seed."""
Source = LongDocReranker | str | Path | Callable[[str, int], Any]
"""Where trained models are: see `Protocol.run`."""


# Data.


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


@dataclass(eq=False)
class ProtocolData:
    """What a protocol trains and tests on. Of several test sets the qids get the set's name in front.

    Args:
        protocol: names the sets.
        first_stage: a retriever, or one for each corpus.
        datasets: the user's own datasets by the names of PyTerrier's that they stand for.
        trains: whether training candidates will be asked for.
    """

    protocol: Protocol
    first_stage: pt.Transformer | Mapping[str, pt.Transformer] | None
    datasets: Mapping[str, Any]
    trains: bool

    def __post_init__(self) -> None:
        known = [part.dataset for part in self.protocol.parts] + list(self.protocol.folds)
        unknown = [name for name in self.datasets if name not in known]
        if unknown:
            raise ValueError(f"datasets= has {unknown[0]!r}, which this protocol does not use; it uses {known}")

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

    def training(self, args: TrainingArgs) -> TrainingData:
        """The candidates that the recipe may draw, with their texts and qrels."""
        return self._drawable(*self._train, args)

    def fold_training(self, args: TrainingArgs) -> TrainingData:
        """The same where models are trained on other folds."""
        (part,) = self.protocol.test
        return self._drawable(part, self.topics, self.first_run, self.qrels, args)

    @cached_property
    def _tests(self) -> list[tuple[TopicSet, pd.DataFrame, pd.DataFrame]]:
        return [(part, *self._judged(part)) for part in self.protocol.test]

    @cached_property
    def _first_runs(self) -> list[tuple[TopicSet, pd.DataFrame]]:
        return [(part, self._prefixed(part, self._retrieved(part, topics))) for part, topics, _ in self._tests]

    @cached_property
    def _train(self) -> tuple[TopicSet, pd.DataFrame, pd.DataFrame, pd.DataFrame]:
        """The training set, its topics, their candidates and qrels."""
        part, most = self.protocol.train, self.protocol.max_train_queries
        if part is None:
            raise ValueError("there are no topics to train on")
        topics, qrels = self._judged(part)
        tested = {qid for _, test_topics, _ in self._tests for qid in test_topics["qid"]}
        leaked = [qid for qid in topics["qid"] if qid in tested]
        if leaked:
            raise ValueError(
                f"{len(leaked)} queries are both in training ({part.dataset}) and in test, e.g. {leaked[0]!r}"
            )
        if most is not None and len(topics) > most:
            topics = topics.head(most)
        return part, topics, self._retrieved(part, topics), qrels[qrels["qid"].isin(topics["qid"])]

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
        topics, qrels = self._topics(part), self._dataset(part.dataset).get_qrels(part.qrels)
        check_columns(qrels, ("qid", "docno", "label"), f"the qrels of {part.dataset}")
        qrels = qrels[["qid", "docno", "label"]].assign(qid=as_strings(qrels["qid"]))
        topics = topics[topics["qid"].isin(qrels["qid"][qrels["label"] > 0])]
        if not len(topics):
            raise ValueError(f"no topic of {part.dataset} has a relevant document: check the qids of topics and qrels")
        return topics, qrels[qrels["qid"].isin(topics["qid"])]

    def _retrieved(self, part: TopicSet, topics: pd.DataFrame) -> pd.DataFrame:
        run = (self._stage(part.corpus) % self.protocol.depth).transform(topics)
        check_columns(run, ("qid", "docno", "score"), f"the candidates for {part.dataset}")
        # The topics' own words: retrievers rewrite them to what their query language takes.
        queries = dict(zip(topics["qid"], topics["query"], strict=True))
        qids = as_strings(run["qid"]).tolist()
        out = pd.DataFrame({"qid": qids, "query": [queries[qid] for qid in qids]})
        return out.assign(docno=as_strings(run["docno"]).tolist(), score=run["score"].tolist())

    def _stage(self, corpus: str) -> Any:
        if not isinstance(self.first_stage, Mapping):
            corpora = {part.corpus for part in (self.protocol.parts if self.trains else self.protocol.test)}
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
        fields = list(self.protocol.fields)
        return run.assign(text=texts_of(run, fields, self._dataset(part.dataset).text_loader(fields)))

    def _drawable(
        self, part: TopicSet, topics: pd.DataFrame, run: pd.DataFrame, qrels: pd.DataFrame, args: TrainingArgs
    ) -> TrainingData:
        """Those retrieved, and judged ones, that the recipe may draw; qrels of others would ask for their text."""
        if args.judged == "all":
            run = add_judged(run, qrels, topics=topics)
        run = self._with_text(part, drawable(run, qrels, args))
        drawn = set(keys_of(run))
        return TrainingData(run, qrels[[key in drawn for key in keys_of(qrels)]])

    def _prefixed(self, part: TopicSet, frame: pd.DataFrame) -> pd.DataFrame:
        return frame if len(self.protocol.test) == 1 else frame.assign(qid=f"{part.name}:" + frame["qid"])


# A protocol.


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

    @property
    def parts(self) -> tuple[TopicSet, ...]:
        """The topics to test and to train on."""
        return self.test if self.train is None else (*self.test, self.train)

    def run(
        self,
        models: Mapping[str, Factory] | Sequence[str],
        first_stage: pt.Transformer | Mapping[str, pt.Transformer],
        folder: str | Path,
        *,
        seeds: Sequence[int] = (0, 1, 2),
        start_from: Source | bool | None = None,
        trained: Source | None = None,
        datasets: Mapping[str, Any] | None = None,
        arguments: Mapping[str, Any] | None = None,
        partner: Mapping[str, str] | None = None,
        correction: str | None = None,
        verbose: bool = False,
    ) -> ExperimentResults:
        """Trains the models with each seed, reranks the candidates and compares.

        As the authors do, the protocols' recipes also train on judged documents that the first stage did not retrieve
        (`judged="all"`); their text is the dataset's. A recipe of one's own decides that for itself.

        Models without `fit` are not trained. Others get the protocol's recipe (unless they have one), its document
        length (unless they have one) and the seed. Presets that the paper trains for more epochs on MS MARCO (two for
        PARADE Transf-RAND-L2) are; the last epoch's weights are kept, without looking at validation data.

        Args:
            models: functions that make a model for a seed, by name: `{"MaxP": lambda seed: ld.MaxP(seed=seed)}`; or
                names of `ld.presets`.
            first_stage: a retriever; a dict with one for each corpus (`"msmarco-document"`, `"msmarco-document-v2"`)
                if there are several.
            folder: for models, runs and results. A second call goes on where the first one was interrupted.
            seeds: 0, 1, 2 in the paper.
            start_from: where the models of the protocol `start` are: the `folder` of its run; a function
                `(name, seed) -> model or its folder`; or one model for all. False trains from the backbones.
            trained: where models are that need no training, e.g. MS MARCO's for a zero-shot test: as `start_from`.
            datasets: own datasets by the names of PyTerrier's that they stand for: anything with `get_topics`,
                `get_qrels` and `text_loader`.
            arguments: further constructor arguments of presets and of trained models, e.g. `{"device": "cuda",
                "batch_size": 128}`.
            partner: for a model the name of its FirstP; None for that of its preset.
            correction: of p-values, see `ld.Experiment`; the paper has none.
            verbose: show progress bars.

        Returns:
            The results, with the first stage as the baseline: `.table`, `.perquery`, `.to_markdown()`, `.run(name,
            seed)`.

        Raises:
            ValueError: if something is missing that only the user can give, or does not fit.
            FileNotFoundError: if a model to start from, or a trained one, is not where it should be.
        """
        check_seeds(seeds)
        if self.start is not None and start_from is None and trained is None:
            raise ValueError(
                f"these models start from those of protocols[{self.start!r}]: give the folder of its run as "
                f"start_from=, or start_from=False to train from the backbones, or trained models as trained="
            )
        factories = self._factories(models, dict(arguments or {}), trained)
        data = ProtocolData(self, first_stage, datasets or {}, trains=trained is None)
        start = None if start_from is False else start_from
        systems = {name: _System(name, make, data, start, Path(folder), verbose) for name, make in factories.items()}
        # Before anything is trained or retrieved.
        for system in systems.values() if data.trains else ():
            system.note_settings(seeds)
        if partner is None:
            of_presets = {name: presets[name].partner for name in factories if name in presets}
            partner = {name: first for name, first in of_presets.items() if first is not None and first in factories}
        return Experiment(
            {FIRST_STAGE: data.first_run, **systems},
            data.topics,
            data.qrels,
            self.metrics,
            seeds=seeds,
            baseline=FIRST_STAGE,
            partner=partner,
            correction=correction,
            alpha=self.alpha,
            save_dir=folder,
            verbose=verbose,
        )

    def compare(self, results: ExperimentResults, *, published: str | None = None) -> pd.DataFrame:
        """The presets' own figures beside the paper's: `name, measure, own, published`.

        Args:
            results: of `run`.
            published: another of the paper's figures, e.g. `"far RR, zero-shot"`.
        """
        figure, measure = published or self.published or "", self.metrics[0]
        names = [name for name in results.names if name in presets]
        rows = [(name, measure, results.means.at[name, measure], presets[name].published.get(figure)) for name in names]
        return pd.DataFrame(rows, columns=["name", "measure", "own", "published"])

    def fold_qids(self, datasets: Mapping[str, Any] | None = None) -> list[list[str]]:
        """The qids of each fold, as `ld.k_fold_fit` and `ld.Experiment` take them; empty where there are no folds.

        Args:
            datasets: see `run`.
        """
        return ProtocolData(self, None, datasets or {}, trains=False).fold_qids

    def training(self, seed: int, *, epochs: int | None = None) -> TrainingArgs:
        """The recipe with a seed.

        Args:
            seed: of the order and choice of examples and of dropout.
            epochs: other than the recipe's.
        """
        return TrainingArgs.preset(self.recipe, seed=int(seed), **({} if epochs is None else {"epochs": epochs}))

    def _factories(self, models: Any, arguments: dict[str, Any], trained: Source | None) -> dict[str, Factory]:
        """By name, what makes a model for a seed: new ones, or the trained ones."""
        if isinstance(models, str) or not isinstance(models, Mapping | Sequence):
            raise ValueError(f"models={models!r} must be a dict of functions by name, or a list of presets' names")
        if not models or FIRST_STAGE in models:
            raise ValueError(f"models= needs at least one model, and none can be named {FIRST_STAGE!r}")
        if trained is not None:
            return {name: partial(find_model, trained, name, **arguments) for name in models}
        if not isinstance(models, Mapping):
            return {name: preset_factory(self, name, arguments) for name in models}
        if arguments:
            raise ValueError("arguments= are for presets and trained models; the functions in models= pass their own")
        return {name: partial(_made_with, factory, name) for name, factory in models.items()}


# Its models.


def _made_with(factory: Any, name: str, seed: int) -> Any:
    """What a user's function makes for a seed."""
    is_function = callable(factory) and not isinstance(factory, pt.Transformer)
    asked = asked_of(factory, ("seed",), f"the function of {name!r}") if is_function else {}
    if "seed" not in asked:
        raise ValueError(f"models= needs a function of the seed for each name, but {name!r} has none")
    return called_with(factory, {asked["seed"].name: seed})()


def preset_factory(protocol: Protocol, name: str, arguments: Mapping[str, Any]) -> Factory:
    """What makes a preset's model for a seed, with the recipe of the protocol."""
    if name not in presets:
        raise ValueError(f"there is no preset {name!r}; known are {', '.join(presets)}")
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


@dataclass(eq=False)
class _System:
    """A model of a protocol, trained if need be, as a factory `seed -> run` of `ld.Experiment`."""

    name: str
    factory: Factory
    data: ProtocolData
    start_from: Any
    folder: Path
    verbose: bool

    def describe(self) -> dict[str, Any]:
        """What a run depends on besides the seed, for `ld.Experiment`, which compares it with a saved run's."""
        data = self.data
        made_from = {"factory": self.factory, "start_from": self.start_from, "protocol": data.protocol}
        return {**made_from, "first_stage": data.first_stage, "datasets": dict(data.datasets)}

    def note_settings(self, seeds: Sequence[int]) -> None:
        """Notes what models are trained with; raises ValueError if the folder has some that were trained otherwise."""
        start, made = self.start_from, list[Any]()
        for seed in seeds:
            model = self.factory(seed)
            if not hasattr(model, "fit"):
                continue
            check_new(model, made)
            made.append(model)
            settings = {
                **settings_of(self._prepared(model, seed)),
                "protocol": asdict(self.data.protocol),
                "start": str(Path(start).resolve()) if isinstance(start, str | Path) else type(start).__name__,
            }
            note_settings(settings, models_folder(self.folder, self.name, seed))

    def __call__(self, seed: int) -> pd.DataFrame:
        model, data, folder = self.factory(seed), self.data, models_folder(self.folder, self.name, seed)
        if not (data.trains and hasattr(model, "fit")):
            return model.transform(data.candidates)
        model = self._prepared(model, seed)
        if self.start_from is not None:
            model.start_from(find_model(self.start_from, self.name, seed))
        if data.protocol.folds:
            train_on, qrels, *_ = data.fold_training(model.recipe)
            folds = k_fold_fit(
                model,
                data.candidates,
                qrels,
                data.fold_qids,
                training_run=train_on,
                folder=folder,
                verbose=self.verbose,
            )
            return folds.run
        return fit_or_load(model, data.training(model.recipe), folder).transform(data.candidates)

    def _prepared(self, model: Any, seed: int) -> LongDocReranker:
        """The model with the protocol's settings."""
        protocol, name = self.data.protocol, self.name
        if not isinstance(model, LongDocReranker):
            raise ValueError(f"{name!r} is a {type(model).__name__}; protocols train this package's models")
        if model.text_field != "text":
            raise ValueError(f"{name!r} reads {model.text_field!r}; here {protocol.fields} are in the column 'text'")
        if model.max_query_len != protocol.max_query_len:
            warn(
                f"{name!r} has max_query_len={model.max_query_len}; in the paper it is {protocol.max_query_len}",
                UserWarning,
            )
        model.max_doc_len = model.max_doc_len or protocol.max_doc_len
        model.training = replace(model.training or with_own_rates(protocol.training(seed), model), seed=int(seed))
        return model


def models_folder(folder: str | Path, name: str, seed: int) -> Path:
    """Where the run of a protocol keeps a model."""
    return Path(folder) / "models" / quote(name, safe=" ()+,=@-_").replace(".", "%2E") / f"seed-{seed}"


def find_model(source: Source, name: str, seed: int, **arguments: Any) -> Any:
    """The trained model of a name and seed.

    Args:
        source: see `Protocol.run`.
        name: of the model.
        seed: that it was trained with.
        **arguments: constructor arguments to change.

    Raises:
        FileNotFoundError: if there is none.
    """
    if isinstance(source, str | Path):
        found: Any = models_folder(source, name, seed) / MODEL
        if not found.is_dir():
            raise FileNotFoundError(f"{str(source)!r} has no finished model {name!r} with seed {seed}: no {found}")
    elif isinstance(source, pt.Transformer):
        found = source
    elif callable(source):
        found = source(name, seed)
    else:
        raise ValueError(f"{source!r} must be a folder, a model, or a function (name, seed) -> model or its folder")
    if isinstance(found, str | Path):
        return LongDocReranker.load(found, **arguments)
    return found.apply_attributes(**arguments) if arguments else found


# The papers' protocols.


class Protocols(Named[Protocol]):
    """The protocols by name; `table()` shows them all.

    Example:
        >>> protocols["robust04-title"].recipe, protocols["robust04-title"].start
        ('robust04', 'msmarco-document')
    """

    kind = "protocol"

    def table(self) -> pd.DataFrame:
        """One row for each protocol, a column for each setting."""
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
