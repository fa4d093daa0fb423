"""An experiment of a paper as one call: what is trained, tested and measured, and how."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pandas as pd
import pyterrier as pt

from .base import LongDocReranker
from .experiment import Experiment, ExperimentResults
from .papers import presets, with_own_rates
from .protocol_data import ProtocolData, TopicSet
from .training.args import TrainingArgs
from .training.folds import k_fold_fit
from .training.kept import MODEL, check_new, fit_kept, keep_settings, recipe_of, settings_and_recipe
from .training.presets import recipes
from .training.seeds import check_seeds

FIRST_STAGE = "first stage"
"""The name of the first stage among the systems of a protocol."""

Factory = Callable[[int], Any]
"""Makes a new model for a seed."""
Source = LongDocReranker | str | Path | Callable[[str, int], Any]
"""Where trained models are: see `Protocol.run`."""


@dataclass(frozen=True)
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
        max_train_queries: train on so many queries, chosen at random; None for all.
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
        data = self._data(first_stage, datasets or {}, self.train if trained is None else None)
        start = None if start_from is False else start_from
        systems = {
            name: _System(self, name, factory, data, start, trained is not None, Path(folder), verbose)
            for name, factory in factories.items()
        }
        # Finished runs are read without asking the factories, so that only this tells whether they are the same.
        if trained is None:
            for system in systems.values():
                for seed in seeds:
                    system.keep_settings(seed)
        return Experiment(
            {FIRST_STAGE: data.first_run, **systems},
            data.topics,
            data.qrels,
            self.metrics,
            seeds=seeds,
            baselines=[FIRST_STAGE],
            partner=_partners(factories) if partner is None else partner,
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
        figure, measure = published or self.published, self.metrics[0]
        rows = [
            (name, measure, results.means.at[name, measure], presets[name].published.get(figure or ""))
            for name in results.names
            if name in presets
        ]
        return pd.DataFrame(rows, columns=["name", "measure", "own", "published"])

    def fold_qids(self, datasets: Mapping[str, Any] | None = None) -> list[list[str]]:
        """The qids of each fold, as `ld.k_fold_fit` and `ld.Experiment` take them; empty where there are no folds.

        Args:
            datasets: see `run`.
        """
        return self._data(None, datasets or {}, None).fold_qids

    def training(self, seed: int, *, epochs: int | None = None) -> TrainingArgs:
        """The recipe with a seed.

        Args:
            seed: of the order and choice of examples and of dropout.
            epochs: other than the recipe's.
        """
        (args,) = recipes(self.recipe, seed=int(seed))
        return args if epochs is None else replace(args, epochs=epochs)

    def _data(self, first_stage: Any, datasets: Mapping[str, Any], train: TopicSet | None) -> ProtocolData:
        known = [part.dataset for part in (*self.test, *([self.train] if self.train else []))] + list(self.folds)
        unknown = [name for name in datasets if name not in known]
        if unknown:
            raise ValueError(f"datasets= has {unknown[0]!r}, which this protocol does not use; it uses {known}")
        return ProtocolData(
            train, self.test, self.folds, self.fields, self.depth, self.max_train_queries, first_stage, datasets
        )

    def _factories(self, models: Any, arguments: dict[str, Any], trained: Source | None) -> dict[str, Factory]:
        """By name, what makes a model for a seed: new ones, or the trained ones."""
        if isinstance(models, str) or not isinstance(models, Mapping | Sequence):
            raise ValueError(f"models={models!r} must be a dict of functions by name, or a list of presets' names")
        if not models or FIRST_STAGE in models:
            raise ValueError(f"models= needs at least one model, and none can be named {FIRST_STAGE!r}")
        if trained is not None:
            return {name: partial(find_model, trained, name, **arguments) for name in models}
        if not isinstance(models, Mapping):
            return {name: self._preset_factory(name, arguments) for name in models}
        if arguments:
            raise ValueError("arguments= are for presets and trained models; the functions in models= pass their own")
        wrong = [
            name for name, factory in models.items() if isinstance(factory, pt.Transformer) or not callable(factory)
        ]
        if wrong:
            raise ValueError(f"models= needs a function of the seed for each name, but {wrong[0]!r} has none")
        return dict(models)

    def _preset_factory(self, name: str, arguments: dict[str, Any]) -> Factory:
        if name not in presets:
            raise ValueError(f"there is no preset {name!r}; known are {', '.join(presets)}")
        preset = presets[name]
        if preset.epochs is None:
            return lambda seed: preset(**arguments)
        # Epochs of a preset are those on MS MARCO; every model is trained further in the same way.
        epochs = preset.epochs if self.start is None and preset.epochs > 1 else None

        def make(seed: int) -> Any:
            model = preset(**{"seed": seed, **arguments})
            if "training" not in arguments:
                model.training = with_own_rates(self.training(seed, epochs=epochs), model)
            return model

        return make


@dataclass(eq=False)
class _System:
    """A model of a protocol, as a factory `seed -> run` of `ld.Experiment`."""

    protocol: Protocol
    name: str
    factory: Factory
    data: ProtocolData
    start_from: Any
    is_trained: bool
    folder: Path
    verbose: bool
    _last: weakref.ref | None = field(default=None, init=False)

    def keep_settings(self, seed: int) -> None:
        """Notes what a model is trained with; raises ValueError if the folder has one that was trained otherwise."""
        model = self.factory(seed)
        if hasattr(model, "fit"):
            start = self.start_from
            shown = str(Path(start).resolve()) if isinstance(start, str | Path) else type(start).__name__
            settings = {
                **settings_and_recipe(self._prepared(model, seed)),
                "protocol": repr(self.protocol),
                "start": shown,
            }
            keep_settings(settings, models_folder(self.folder, self.name, seed))

    def __call__(self, seed: int) -> pd.DataFrame:
        model, data = self.factory(seed), self.data
        if self.is_trained or not hasattr(model, "fit"):
            return model.transform(data.candidates)
        check_new(model, [self._last and self._last()])
        self._last = weakref.ref(model)  # keeps no trained model in memory
        model, own = self._prepared(model, seed), models_folder(self.folder, self.name, seed)
        if self.start_from is not None:
            model.start_from(find_model(self.start_from, self.name, seed))
        if self.protocol.folds:
            folds = k_fold_fit(model, data.candidates, data.qrels, data.fold_qids, folder=own, verbose=self.verbose)
            return folds.run
        return fit_kept(model, data.training(recipe_of(model)), own).transform(data.candidates)

    def _prepared(self, model: Any, seed: int) -> LongDocReranker:
        """The model with the protocol's settings."""
        protocol, name = self.protocol, self.name
        if not isinstance(model, LongDocReranker):
            raise ValueError(f"{name!r} is a {type(model).__name__}; protocols train this package's models")
        if model.text_field != "text":
            raise ValueError(f"{name!r} reads {model.text_field!r}; here {protocol.fields} are in the column 'text'")
        length = protocol.max_query_len
        if model.max_query_len != length:
            message = f"{name!r} reads {model.max_query_len} tokens of a query; in the paper {length}"
            warnings.warn(message, UserWarning, stacklevel=2)
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
        return LongDocReranker.load(found, **arguments)
    if not callable(source):
        raise ValueError(f"{source!r} must be a folder, a model, or a function (name, seed) -> model or its folder")
    found = source if isinstance(source, pt.Transformer) else source(name, seed)
    if isinstance(found, str | Path):
        return LongDocReranker.load(found, **arguments)
    return found.apply_attributes(**arguments) if arguments else found


def _partners(names: Mapping[str, Any]) -> dict[str, str]:
    """The FirstP of each preset, where it is among the models."""
    partners = {name: presets[name].partner for name in names if name in presets}
    return {name: partner for name, partner in partners.items() if partner is not None and partner in names}
