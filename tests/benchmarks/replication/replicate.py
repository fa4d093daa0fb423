"""The papers' experiments in miniature: tables of systems, trainings and studies, and a loop over their jobs.

A job is a trained system on a test collection. What it finds is written when it is done, a small file for each job:
`outcomes/` holds reciprocal ranks by query, `figures/` what is no ranking, `settings.json` how all was made. Models,
and the states of trainings under way, are in `work/`. `collect` puts the results, which are all that is worth keeping,
into one file of each kind.

Not a `Protocol`: a job here is smaller than its `run`, so that a budget can end between any two, several processes can
share them, and the same model is tested on collections one at a time; and some trainings have a teacher, or segments.
Models are trained, kept and resumed by the same `fit_or_load`.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import platform
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd
import pyterrier as pt
import torch
from filelock import FileLock, Timeout

from pyterrier_longdoc import BiEncoder, CrossEncoder
from pyterrier_longdoc.analysis import relevant_positions
from pyterrier_longdoc.common.files import replacing
from pyterrier_longdoc.common.language import named_tokenizer
from pyterrier_longdoc.common.measures import chance_rr
from pyterrier_longdoc.common.packaged import ENCODER, encoder_folder
from pyterrier_longdoc.data.rotation import rotate
from pyterrier_longdoc.modelling.backbones.architectures import use_attention
from pyterrier_longdoc.modelling.devices import FASTEST, dtype_name, resolve_device, resolve_dtype
from pyterrier_longdoc.training import BestResult, Segments, TeacherScores, TrainingArgs, fit_on_best_segments
from pyterrier_longdoc.training.examples import drawable
from pyterrier_longdoc.training.resume import TrainingData, fit_or_load

from .encoders import as_longformer, first_layers
from .miniature import FIRST, PASSAGE, POSITIONS, QUERY, STRIDE, WHOLE, WINDOW, Miniature, by_absence

OUTCOMES = ("trained", "system", "test", "seed", "qid", "rr")
FIGURES = ("study", "system", "step", "figure", "value", "n")

# Systems.


class System(NamedTuple):
    """A model of the papers."""

    name: str
    """Of its class."""
    arguments: Mapping[str, Any] = {}
    """Of its constructor, as the papers have them (see `presets`) but for the lengths."""
    encoder: Callable[[Any], Any] | None = None
    """Makes its encoder of that of the start; None for that encoder itself, with the start's last layer."""


_WINDOWS = {"window_size": WINDOW, "stride": STRIDE}
_CHUNKS = {"window_size": FIRST}
_ATTN = {"aggregation": "attn", "attention": "elementwise"}
_PRETR = {"aggregation": "transformer", "aggregator": ENCODER}
_RAND = {**_WINDOWS, "aggregation": "transformer", "layers": 2}
_LONGFORMER = partial(as_longformer, window=FIRST)

SYSTEMS: dict[str, System] = {
    "FirstP": System("FirstP", {**_CHUNKS, "max_doc_len": FIRST}),
    "AvgP": System("AvgP", _CHUNKS),
    "MaxP": System("MaxP", _WINDOWS),
    "SumP": System("SumP", _WINDOWS),
    "KMaxP": System("KMaxP", _WINDOWS),
    "PARADE avg": System("PARADE", {**_WINDOWS, "aggregation": "avg"}),
    "PARADE max": System("PARADE", {**_WINDOWS, "aggregation": "max"}),
    "PARADE attn": System("PARADE", {**_WINDOWS, **_ATTN}),
    "PARADE RAND": System("PARADE", _RAND),
    "PARADE PRETR": System("PARADE", {**_WINDOWS, **_PRETR}),
    "PARADE PRETR-Q": System("PARADE", {**_WINDOWS, **_PRETR, "query_states": True, "separators": False}),
    "LateIR": System("LateIR", {**_WINDOWS, "interaction": ENCODER, "aggregator": ENCODER}),
    "CEDR-KNRM": System("CEDR", {**_CHUNKS, "aggregation": "knrm"}),
    "CEDR-PACRR": System("CEDR", {**_CHUNKS, "aggregation": "pacrr"}),
    "CEDR-DRMM": System("CEDR", {**_CHUNKS, "aggregation": "drmm"}),
    "Neural Model 1": System("NeuralModel1", _CHUNKS),
    "LongP": System("LongP"),
    "LongP, 128 tokens": System("LongP", {"max_doc_len": FIRST}),
    "LongP (Longformer)": System("LongP", {}, _LONGFORMER),
    "LongP (Longformer), 128 tokens": System("LongP", {"max_doc_len": FIRST}, _LONGFORMER),
}
"""By their names in `outcomes`, where there are also `UNTRAINED`, `BiEncoder` and `BeST`."""

UNTRAINED = ("random", "BM25", "fewest words")
"""What systems are compared with; `fewest words` is `by_absence`."""

CORE = ("FirstP", "MaxP", "PARADE RAND", "CEDR-KNRM", "PARADE attn", "LongP")
OTHERS = tuple(name for name in SYSTEMS if name not in CORE)

CHUNKS = {f"PARADE attn, {n} chunks": n for n in (2, 3, 4, 5, 6)}
"""Trained and tested on documents of up to six chunks, which are cut after so many."""
STUDENTS = {f"PARADE RAND, {n} layer{'s' if n > 1 else ''}": n for n in (2, 1)}
"""With so many of the start's layers."""
SETTINGS = {
    f"{name} {size}/{stride}": {**SYSTEMS[name].arguments, "window_size": size, "stride": stride}
    for size, stride in ((16, 12), (32, 24), (64, 24), (64, 32), (128, 96))
    for name in ("PARADE PRETR", "PARADE PRETR-Q")
}
"""Other windows and strides, those of Table 8 of Boytsov et al. 2022 in miniature."""

SYSTEMS |= {name: System("PARADE", {**_WINDOWS, **_ATTN, "max_doc_len": n * FIRST}) for name, n in CHUNKS.items()}
SYSTEMS |= {name: System("PARADE", arguments) for name, arguments in SETTINGS.items()}
SYSTEMS |= {name: System("PARADE", _RAND, partial(first_layers, layers=n)) for name, n in STUDENTS.items()}

# Trainings.

SCALE = 10.0
"""The papers' learning rates (1e-5 for the encoder, 1e-4 for heads) are multiplied by it: a small encoder takes and,
with 125 steps in place of thousands, needs larger ones. Chosen on the dev topics, with FirstP alone."""


class Training(NamedTuple):
    """How a system is trained."""

    start: str
    """The training of the same system whose weights it goes on from; "start" for the pairs' cross-encoder."""
    position: str
    """Of the relevant passages in its documents."""
    changes: Mapping[str, Any] = {}
    """Of the recipe."""
    teacher: str | None = None
    """A system whose scores, after the same training without a teacher, it learns."""


TRAININGS = {
    "early": Training("start", "early"),
    "early>far": Training("early", "far"),
    "early>far>far": Training("early>far", "far"),
    "uniform": Training("start", "uniform"),
    "rotated": Training("start", "early", {"augment": rotate}),
    "distilled": Training("start", "early", {"loss": "margin_mse"}, teacher="PARADE RAND"),
}
"""By what stands in `outcomes`: `early>far` is trained on *early*, then on *far*, and `early>far>far` once more on the
same pairs; `distilled` like `early`, but for the teacher's differences of scores in place of a margin of 1
(Hofstätter et al. 2020)."""

# Studies: systems, their training, and the collections they are tested on, in the order in which they are done.

_DEBIASED = ("MaxP", "PARADE attn", "PARADE RAND", "CEDR-KNRM")
"""The systems of the paper's Table 2."""

STUDIES: dict[str, Sequence[tuple[str, str, Sequence[str]]]] = {
    "core": (
        *((name, "none", POSITIONS) for name in UNTRAINED),
        *(row for name in CORE for row in ((name, "early", ("early", "far")), (name, "early>far", ("far",)))),
        *((name, "early>far", ("early",)) for name in CORE),
        *((name, "early", ("uniform",)) for name in CORE),
    ),
    "longer": tuple((name, "early>far>far", ("far",)) for name in CORE),
    "rotated": tuple((name, "rotated", ("far", "early")) for name in _DEBIASED),
    "uniform": tuple((name, "uniform", ("far", "early", "uniform")) for name in ("FirstP", *_DEBIASED)),
    "others": (
        ("BiEncoder", "none", POSITIONS),
        *((f"{name}, 128 tokens", "early", ("early",)) for name in ("LongP", "LongP (Longformer)")),
        *(
            row
            for name in OTHERS
            if not name.endswith("tokens")
            for row in ((name, "early", POSITIONS), (name, "early>far", ("far", "early")))
        ),
    ),
    "distilled": tuple((name, trained, ("early",)) for name in STUDENTS for trained in ("early", "distilled")),
    "best": (("BeST", "uniform", ("uniform",)),),
    "windows": tuple((name, "early", ("early",)) for name in ("PARADE PRETR", "PARADE PRETR-Q", *SETTINGS)),
    "chunks": tuple((name, "early", ("early",)) for name in CHUNKS),
    "positions": (("positions", "none", POSITIONS),),
}


class Job(NamedTuple):
    """A trained system on a test collection."""

    system: str
    trained: str
    test: str
    seed: int

    def __str__(self) -> str:
        return f"{self.system} ({self.trained}) on {self.test}, seed {self.seed}"


def file_name(*parts: Any) -> str:
    """A name among files, of any words."""
    return "~".join(re.sub(r"[^\w.]+", "-", str(part)) for part in parts)


def jobs_of(studies: Sequence[str], seeds: Sequence[int], systems: Sequence[str] = ()) -> list[Job]:
    """All jobs, seed by seed, each study in its order.

    Args:
        studies: names in `STUDIES`.
        seeds: of trainings; what is not trained has seed 0 alone.
        systems: only these; none for all.

    Raises:
        ValueError: for a study that there is not, or a system that is in none of them.
    """
    unknown = [study for study in studies if study not in STUDIES]
    if unknown:
        raise ValueError(f"there is no study {', '.join(map(repr, unknown))}: take {', '.join(STUDIES)}")
    known = dict.fromkeys(system for study in studies for system, _, _ in STUDIES[study])
    unknown = [system for system in systems if system not in known]
    if unknown:
        raise ValueError(f"{', '.join(map(repr, unknown))} is in none of these studies: take {', '.join(known)}")
    jobs = [
        Job(system, trained, test, seed if trained != "none" else 0)
        for seed in seeds
        for study in studies
        for system, trained, tests in STUDIES[study]
        for test in tests
        if not systems or system in systems
    ]
    return list(dict.fromkeys(jobs))


# What they need.


@dataclass(eq=False)
class Replication:
    """Models and results in a folder, with what they are made of.

    Args:
        folder: for all of it.
        data: the collections.
        backbone: a cross-encoder to begin with; None for the first three layers of the packaged sentence encoder, made
            a cross-encoder on the pairs.
        device: None for a GPU if there is one.
        dtype: precision of training and scoring; None for what the device is best at.
        arguments: further arguments of all models, e.g. `batch_size`.
        start_steps: optimiser steps of the cross-encoder on pairs.
        verbose: show progress bars.
    """

    folder: Path
    data: Miniature = field(default_factory=Miniature)
    backbone: str | None = None
    device: str | None = None
    dtype: str | None = None
    arguments: Mapping[str, Any] = field(default_factory=dict)
    start_steps: int = 300
    verbose: bool = False

    def __post_init__(self) -> None:
        self.folder = self.folder.resolve()  # models remember the folder of their encoder
        self.dtype = self.dtype or dtype_name(resolve_dtype(FASTEST, resolve_device(self.device)))
        path, settings = self.folder / "settings.json", self.settings()
        with self.locked("settings"):
            if path.is_file():
                found = json.loads(path.read_text(encoding="utf-8"))["replication"]
                other = [name for name, value in settings["replication"].items() if found.get(name) != value]
                if other:
                    raise ValueError(
                        f"{str(self.folder)!r} holds a replication with other {', '.join(other)} "
                        f"({found.get(other[0])}): give the same, or another folder"
                    )
            else:
                with replacing(path) as part:
                    part.write_text(json.dumps(settings, indent=1), encoding="utf-8")

    def settings(self) -> dict[str, Any]:
        """What makes all outcomes of a folder comparable, and the machine that began it."""
        geometry = {"first window": FIRST, "window": WINDOW, "stride": STRIDE, "document": WHOLE, "query": QUERY}
        packages = ("torch", "transformers", "python-terrier", "pyterrier-pisa")
        replication = {
            "tokens": {**geometry, "passage": list(PASSAGE)},
            "passages": self.data.described,
            "queries and depth": dict(self.data.sizes._asdict()),
            "backbone": self.backbone or f"first {LAYERS} layers of {ENCODER}",
            "steps on pairs": self.start_steps,
            "precision": self.dtype,
        }
        machine = {
            "processor": processor(),
            "device": str(resolve_device(self.device)),
            "python": platform.python_version(),
        }
        versions = {name: importlib.metadata.version(name) for name in packages}
        return {"replication": replication, "machine": machine, "packages": versions}

    @contextmanager
    def locked(self, name: str, timeout: float = -1) -> Iterator[None]:
        """Keeps other processes out; raises `Timeout` where one is in for longer."""
        folder = self.folder / "work" / "locks"
        folder.mkdir(parents=True, exist_ok=True)
        with FileLock(folder / f"{name}.lock", timeout=timeout):
            yield

    @cached_property
    def long_data(self) -> Miniature:
        """Collections of documents that are twice as long."""
        return replace(self.data, longest=2 * WHOLE)

    def data_of(self, system: str) -> Miniature:
        """The collections that a system is trained and tested on."""
        return self.long_data if system in CHUNKS else self.data

    def encoder(self, system: str) -> str:
        """The backbone of a system."""
        make = SYSTEMS[system].encoder
        if make is not None:
            start = self.start.model
            return self._kept(file_name(system), lambda: (make(start.encoder.backbone), start.tokenizer))
        if self.backbone is not None:
            return self.backbone
        return self._kept("start", lambda: (small_encoder(), named_tokenizer(ENCODER)))

    def _kept(self, name: str, make: Callable[[], tuple[Any, Any]]) -> str:
        """The folder of an encoder and its tokenizer, which are made if it is not there."""
        folder = self.folder / "work" / "encoders" / name
        with self.locked("encoders"):
            if not (folder / "config.json").is_file():
                encoder, tokenizer = make()
                tokenizer.save_pretrained(folder)
                encoder.save_pretrained(folder)
        return str(folder)

    @cached_property
    def start(self) -> CrossEncoder:
        """The cross-encoder that all models start from: trained once, whatever their seeds, on pairs of passages."""
        model = self.new("FirstP", 0)
        if self.backbone is not None:
            return model
        model.training = TrainingArgs(
            loss="cross_entropy",
            reduction="mean",
            negatives=3,
            max_negative_rank=None,
            epochs=10,
            max_steps=self.start_steps,
            learning_rates={"encoder.": 2e-4, "": 1e-3},
            schedule="linear",
            warmup=0.1,
            max_grad_norm=1.0,
            seed=42,  # that of the results in tests/benchmarks/replication
            **self._fast(),
        )
        with self.locked("start"):
            return self._fitted(model, TrainingData(*self.data.pairs), self.folder / "work" / "start")

    def new(self, system: str, seed: int) -> CrossEncoder:
        """A system with its encoder's weights."""
        name, arguments, _ = SYSTEMS[system]
        made_with = {"max_query_len": QUERY, "max_doc_len": WHOLE, "device": self.device, "dtype": self.dtype}
        cls = getattr(importlib.import_module("pyterrier_longdoc"), name)
        model = cls(self.encoder(system), **{**made_with, **arguments, **self.arguments, "seed": seed})
        model.verbose = self.verbose
        return model

    def started(self, system: str, seed: int) -> CrossEncoder:
        """A system with the start's weights."""
        model = self.new(system, seed)
        return model if SYSTEMS[system].encoder else model.start_from(self.start)

    def recipe(self, model: CrossEncoder, seed: int, **changes: Any) -> TrainingArgs:
        """The paper's with larger rates, which fall to 0: the last of few steps would be seen in the weights."""
        rates = {name: SCALE * rate for name, rate in model.default_training().learning_rates.items()}
        # The judged documents are among the candidates already.
        own = {"judged": "retrieved", "learning_rates": rates, "schedule": "linear", "seed": seed}
        return TrainingArgs.preset("boytsov2025", **{**own, **self._fast(), **changes})

    def model(self, system: str, trained: str, seed: int) -> CrossEncoder:
        """A trained system, trained now if it is not in the folder."""
        training, data = TRAININGS[trained], self.data_of(system)
        if training.start == "start":
            model = self.started(system, seed)
        else:
            model = self.new(system, seed).start_from(self.model(system, training.start, seed))
        model.training = self.recipe(model, seed, **training.changes)
        run, qrels = data.candidates(training.position, "train"), data.qrels("train")
        if training.teacher is not None:
            with self.locked(file_name(training.teacher, seed)):  # another process may be training it
                teacher = self.model(training.teacher, "early", seed)
            run = TeacherScores(teacher).transform(drawable(run, qrels, model.training))
        return self._fitted(model, TrainingData(run, qrels), self.work(system, trained, seed))

    def work(self, system: str, trained: str, seed: int) -> Path:
        """Where a model is kept."""
        return self.folder / "work" / "models" / file_name(trained, system, seed)

    def best(self, seed: int) -> BestResult:
        """BeST, trained on documents whose relevant passage is anywhere.

        Its recipe is that of all others, for one epoch each iteration, and its segments are to passages what the
        paper's are: 30 to 120 words.
        """
        data, gold = self.data, self.data.collections["uniform"].gold

        def make() -> CrossEncoder:
            model = self.started("MaxP", seed)
            self._attend(model, training=True)
            model.training = self.recipe(model, seed, negative_pool=1, metric="RR")
            return model

        qrels = data.qrels("train")
        run = drawable(data.candidates("uniform", "train"), qrels, make().recipe)
        validation = data.candidates("uniform", "dev"), data.qrels("dev")
        segments, folder = Segments(30, 120), self.work("BeST", "uniform", seed)
        result = fit_on_best_segments(
            make, run, qrels, *validation, segments=segments, iterations=3, gold=gold, folder=folder
        )
        self._attend(result.model, training=False)
        return result

    def _fast(self) -> dict[str, Any]:
        """What only makes training faster."""
        # No document is seen twice, so that dropout would slow it for nothing.
        return {"dtype": self.dtype, "dropout": 0.0, "queries_per_forward": 16, "save_steps": 25}

    def _fitted(self, model: CrossEncoder, data: TrainingData, folder: Path) -> CrossEncoder:
        self._attend(model, training=True)
        trained = fit_or_load(model, data, folder)
        self._attend(trained, training=False)
        return trained

    def _attend(self, model: CrossEncoder, *, training: bool) -> None:
        """On a CPU sdpa is slow backwards, and eager attention slow forwards."""
        backbone: Any = model.model.encoder.backbone
        if resolve_device(self.device).type == "cpu" and backbone.config.model_type == "bert":
            with suppress(ValueError):  # transformers 4 does not change it: training is slower
                use_attention(backbone, "eager" if training else "sdpa")


class Found(NamedTuple):
    """What a job finds."""

    outcomes: pd.DataFrame | None = None
    """`qid, rr`."""
    figures: Sequence[tuple[Any, ...]] = ()
    """Rows of `FIGURES`."""


def ranked(replication: Replication, job: Job) -> Found:
    """Reciprocal ranks of a system."""
    data = replication.data_of(job.system)
    candidates, qrels = data.candidates(job.test, "test"), data.qrels("test")
    if job.system == "random":
        return _by_topic(by_chance(candidates, qrels), data)
    figures: list[tuple[Any, ...]] = []
    if job.system == "BM25":
        run = pt.model.add_ranks(candidates)
    elif job.system == "fewest words":
        run = by_absence(candidates, data.tokenizer)
    elif job.system == "BiEncoder":
        whole = BiEncoder(ENCODER, aggregation="first", window_size=WHOLE, device=replication.device)
        run = whole.transform(candidates)
    elif job.system == "BeST":
        best = replication.best(job.seed)
        steps = best.iterations[["iteration", "precision"]].itertuples(index=False)
        topics = data.topics["train"]["qid"].nunique()
        figures = [("BeST", "BeST", step, "segment precision", value, topics) for step, value in steps]
        run = best.model.transform(candidates)
    else:
        run = replication.model(job.system, job.trained, job.seed).transform(candidates)
    return _by_topic(reciprocal_ranks(run, qrels), data, figures)


def _by_topic(ranks: pd.Series, data: Miniature, figures: Sequence[tuple[Any, ...]] = ()) -> Found:
    topics = data.topics["test"][["qid"]]
    return Found(topics.assign(rr=topics["qid"].map(ranks).fillna(0.0)), figures)


def located(replication: Replication, job: Job) -> Found:
    """How much of the relevant text begins in FirstP's window: as it is known, and as the start model judges."""
    data = replication.data
    collection, topics, qrels = data.collections[job.test], data.topics["test"], data.qrels("test")
    known = collection.gold.merge(qrels[["qid", "docno"]], on=["qid", "docno"])["first_token"]
    asked = {"judge": replication.start, "chunk_tokens": WINDOW, "tokenizer": data.tokenizer}
    found = relevant_positions(topics, qrels, collection.corpus, **asked).matched["first_token"]
    figures = [
        ("positions", estimator, job.test, f"share in first window ({kind})", (tokens < FIRST).mean(), len(tokens))
        for estimator, kind, tokens in (
            ("known places", "known", known),
            ("best chunk, start model", "estimated", found),
        )
    ]
    return Found(figures=figures)


def small_encoder() -> Any:
    """The first layers of the packaged sentence encoder."""
    from transformers import AutoModel

    return first_layers(AutoModel.from_pretrained(encoder_folder(ENCODER)), LAYERS)


LAYERS = 3
"""Of the packaged encoder's six."""


def processor() -> str:
    """The name of this machine's processor."""
    cpus = Path("/proc/cpuinfo")
    names = re.findall(r"model name\s*: (.*)", cpus.read_text()) if cpus.is_file() else []
    return names[0] if names else platform.processor()


# What they find.


def reciprocal_ranks(run: pd.DataFrame, qrels: pd.DataFrame) -> pd.Series:
    """By qid, that of the best relevant document of a run with ranks from 0; queries without one are left out."""
    found = run.merge(qrels[qrels["label"] > 0], on=["qid", "docno"])
    return 1.0 / (found.groupby("qid")["rank"].min() + 1)


def by_chance(run: pd.DataFrame, qrels: pd.DataFrame) -> pd.Series:
    """The mean of the same over all orders of each query's candidates, of which one is relevant: H_n / n."""
    found = run.merge(qrels[qrels["label"] > 0], on=["qid", "docno"])["qid"].unique()
    sizes = run.groupby("qid").size().loc[found]
    return sizes.map(chance_rr)


def read_outcomes(folder: str | Path) -> pd.DataFrame:
    """All outcomes in a folder: `trained, system, test, seed, qid, rr`.

    Raises:
        FileNotFoundError: if there are none.
    """
    return _read(Path(folder), "outcomes", OUTCOMES)


def read_figures(folder: str | Path) -> pd.DataFrame:
    """All figures in a folder: `study, system, step, figure, value, n`.

    Raises:
        FileNotFoundError: if there are none.
    """
    return _read(Path(folder), "figures", FIGURES)


def _read(folder: Path, kind: str, columns: Sequence[str]) -> pd.DataFrame:
    found = [*folder.glob(f"{kind}/*.csv*"), *folder.glob(f"{kind}.csv*")]
    files = sorted(file for file in found if file.suffix != ".part")  # of a writer that was killed
    if not files:
        raise FileNotFoundError(f"{str(folder)!r} has no {kind}: replicate writes them")
    return pd.concat([pd.read_csv(file, dtype={"qid": str})[list(columns)] for file in files], ignore_index=True)


def collect(folder: str | Path, target: str | Path) -> None:
    """Writes the results of a folder into another one: `outcomes.csv.xz`, `figures.csv` and `settings.json`.

    Raises:
        FileNotFoundError: if there are none.
    """
    folder, target = Path(folder), Path(target)
    outcomes, figures = read_outcomes(folder), read_figures(folder)
    write(outcomes, target / "outcomes.csv.xz")
    write(figures, target / "figures.csv")
    with replacing(target / "settings.json") as part:
        part.write_bytes((folder / "settings.json").read_bytes())


def write(frame: pd.DataFrame, path: Path) -> None:
    """Writes a frame as CSV, the same bytes at any time."""
    path.parent.mkdir(parents=True, exist_ok=True)
    ways: dict[str, dict[str, Any]] = {".gz": {"method": "gzip", "mtime": 0}, ".xz": {"method": "xz"}}
    with replacing(path) as part:
        frame.to_csv(part, index=False, compression=ways.get(path.suffix), float_format="%.6g")


# The loop.


def replicate(
    replication: Replication,
    jobs: Sequence[Job],
    *,
    budget: float | None = None,
    tell: Callable[[str], object] = print,
) -> list[Job]:
    """Does the jobs that are not done yet, in their order; several processes may share a folder.

    Args:
        replication: where, and with what.
        jobs: of `jobs_of`.
        budget: seconds after which no further job is begun; None for no end.
        tell: called with a line for each job.

    Returns:
        The jobs that are left.
    """
    end = time.monotonic() + (float("inf") if budget is None else budget)
    while left := [job for job in jobs if not is_done(replication, job)]:
        if time.monotonic() >= end:
            return left
        if not any(_done_now(replication, job, tell) for job in left):
            time.sleep(5)  # other processes have them all
    return []


def is_done(replication: Replication, job: Job) -> bool:
    """Whether a job's results are in the folder."""
    return _file(replication, "figures", job).is_file()


def _file(replication: Replication, kind: str, job: Job) -> Path:
    suffix = {"figures": ".csv", "outcomes": ".csv.gz"}[kind]
    return replication.folder / kind / f"{file_name(*job[1::-1], *job[2:])}{suffix}"


def _done_now(replication: Replication, job: Job, tell: Callable[[str], object]) -> bool:
    """Does a job; False if another process has the system at hand, or has just done it."""
    try:
        # Who tests a model may have to train it first, so that a system is one process's at a time.
        with replication.locked(file_name(job.system, job.seed), timeout=0):
            if is_done(replication, job):
                return False
            begin, cpu = time.monotonic(), time.process_time()
            outcomes, figures = (located if job.system == "positions" else ranked)(replication, job)
            what = f"{job.system}, {job.trained}, {job.test}"
            cost = ("cost", what, job.seed, "CPU seconds", time.process_time() - cpu, torch.get_num_threads())
            if outcomes is not None:
                about: dict[str, Any] = job._asdict()
                write(outcomes.assign(**about)[list(OUTCOMES)], _file(replication, "outcomes", job))
            # Last, as it tells that the job is done.
            write(pd.DataFrame([*figures, cost], columns=list(FIGURES)), _file(replication, "figures", job))
    except Timeout:
        return False
    found = [f"{row[3]} {row[4]:.3f}" for row in figures]
    found += [] if outcomes is None else [f"RR {outcomes['rr'].mean():.3f}"]
    tell(f"{job}: {', '.join(found)} ({time.monotonic() - begin:.0f} s)")
    return True
