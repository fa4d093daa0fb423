"""The PyTerrier face of a model: from its arguments and a frame to scores, and `fit`."""

# Without `from __future__ import annotations`: modules of subclasses need the types of the fields, too.
import copy
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass, fields, replace
from functools import partial
from pathlib import Path
from threading import RLock
from typing import Any, ClassVar, NoReturn

import numpy as np
import pandas as pd
import pyterrier as pt
import torch

from ..common.arguments import (
    argument,
    arguments_of,
    changed,
    changed_names,
    check_checkpoint,
    check_roles,
    check_type,
    validate,
)
from ..common.citations import papers_of
from ..common.coverage import Coverage, Explanation, Scored
from ..common.files import full_path
from ..common.frames import (
    Text,
    TextField,
    digest_of_text,
    documents_of,
    is_blank,
    strings,
    validated,
    window_fields,
    with_scores,
)
from ..common.presentation import HIDDEN, NotebookMixin, changes, composed, described
from ..common.progress import work_bar
from ..common.servers import BackendError
from ..common.warnings import warn, warn_of_coverage, warn_of_inputs, warn_once
from ..modelling.backbones.architectures import BackboneOptions
from ..modelling.backbones.load import DEFAULT_BACKBONE, Backbone, load_backbone
from ..modelling.devices import DTYPES, FASTEST, resolve_device, resolve_dtype
from ..modelling.encoder import WindowEncoder
from ..modelling.external import ExternalScorer
from ..modelling.inputs import Settings
from ..modelling.layout import InputLayout, resolve_layout
from ..modelling.model import Model
from ..modelling.preselection import Preselection, check_preselection
from ..modelling.quantized import draw_windows, quantize
from ..modelling.runtimes import RUNTIMES, check_runtime, default_device
from ..modelling.templates import Template, resolve_template
from ..modelling.weights import HeadSpec, exchange_head, start_from
from ..modelling.windows import SELECTIONS, Windows
from ..training import (
    ContinuedTrainingWarning,
    LeftOutWarning,
    TrainedOn,
    TrainingArgs,
    evaluate,
    history_frame,
    prepare,
    train,
    training_settings,
)
from ..training.queries import check_validation
from ..training.recipe import papers_of_recipe
from ..training.resume import STATE_FILE, is_first_process
from . import saved
from .export import export_classifier
from .origins import Checkpoint, Scorer, origin_of
from .score_cache import score_with_cache

POOLINGS = ("cls", "mean", "last")

# One lock for all models: a lock of each could not be pickled, and random weights come from torch's global generator.
# It is re-entrant for the models of selectors.
_SETTING_UP = RLock()


class UntrainedWarning(UserWarning):
    """A model with random weights is used as if it were trained."""


class PrecisionWarning(UserWarning):
    """A model scores in bfloat16, in which the device is fastest."""


@dataclass(eq=False, repr=False)
class Reranker(NotebookMixin, pt.Transformer):
    """Base of the rerankers that score a document by its windows: cross-encoders and bi-encoders.

    Reads a frame with `qid, query, docno` and the text column(s) and returns the same rows, columns and index with
    new `score` (float64) and `rank`. The first `transform` of a non-empty frame loads the weights. A changed attribute
    takes effect at the next `transform`.

    Args:
        windows: how documents are cut, e.g. `SlidingWords(150, 100)`; replaces `window_size` and `stride`.
        max_windows: keep at most this many windows of a document; None keeps all.
        selection: which windows to keep: `"first"` or `"first_last_random"` (PARADE's choice).
        preselect: reads only the windows that a cheaper method finds best for the query, e.g. `BM25Windows(3)`: a
            `FirstK`, `BM25Windows`, `EmbeddingWindows`, `MaxSimWindows`, `CrossEncoderWindows`,
            `WordEmbeddingWindows` or `KeyBlocks`. It chooses among the windows that `max_windows` leaves, in `fit`,
            too. None reads all.
        max_doc_len: read only so many tokens of a document; None reads all. Boytsov et al. 2025 read 1431.
        max_query_len: read only so many tokens of a query; 32 in Boytsov et al. 2025. None reads all that fits next to
            windows of a given size in the backbone's longest input, or in a quarter of it if windows have no given size
            (`window_size=None`, `LongP`). None needs the layout `"pair"`.
        text_field: the column with the text, or a tuple of columns that are joined by a space.
        repeat: the columns of `text_field` that are read with every window of the others, such as the title:
            `text_field=("title", "body"), repeat="title"`. Each column is one line before the window. None joins all
            columns to one text: a window in the middle is read without the title.
        repeat_tokens: most tokens of `repeat` that are read with a window; longer titles are cut at their end. These
            tokens do not count in `window_size` and `max_doc_len`. Every window leaves room for them, so that the title
            does not change the windows of a document.
        text_loader: supplies the text if the column is absent: a text loader, or a dataset or index with one.
        batch_size: most windows in one pass through the backbone.
        max_batch_tokens: most tokens in one pass; None for 16,384 on a GPU and 2,048 on a CPU. When memory runs out,
            passes become smaller by themselves.
        device: `"cuda"`, `"cuda:1"`, `"cpu"`, ...; None for a GPU if there is one.
        dtype: precision of the backbone when it scores: `"float32"`, `"bfloat16"`, `"float16"`, or `"fastest"` for the
            device's fastest. None is float32 on a CPU, so that all CPUs give the same scores, and bfloat16 on a GPU
            that has it natively. Scores in bfloat16 differ in the third digit; `coverage.dtype` names the precision.
        runtime: the library that computes the backbone outside `fit`: `"torch"`, or on a CPU `"openvino"`. None takes
            OpenVINO on an x86-64 CPU where it is installed, for a BERT, ELECTRA, RoBERTa, XLM-R, DistilBERT or
            ModernBERT of 5 million weights or more, in a precision in which the CPU is fast. The first scores after a
            change of weights wait for the export. `coverage.runtime` names the choice.
        explain: add columns: `window_scores` (the score each window would have alone), `window_weights` (attention
            over windows, None for models without), `window_spans` (characters of each window in the text, or in the
            joined text of several columns without those of `repeat`), `best_start` and `best_end` (characters of the
            window with the highest score), `term_scores` (the share of each query token in the score, None for models
            that cannot tell), `window_tokenizer` (the tokenizer's name; "" for words), `window_field` (the text
            column(s) without `repeat`), `window_digest` (a fingerprint of the text that was cut).
        trust_remote_code: run modelling code from the backbone's checkpoint.
        verbose: show progress bars; `fit` also tells what it trains on and where it goes on.
        seed: of random first weights, of the choice of windows and, if the recipe has none, of the training.

    Attributes:
        coverage: how much of the text the last `transform` or `fit` read, in which precision, and how much of the
            computation was padding; None before.
    """

    backbone: str | Path | ExternalScorer = argument(DEFAULT_BACKBONE, role="checkpoint")
    _: KW_ONLY
    windows: Windows | None = argument(None, role="windows")
    max_windows: int | None = argument(None, role="windows", at_least=1)
    selection: str = argument("first", role="windows", choices=SELECTIONS)
    preselect: Preselection | None = argument(None, role="windows")
    max_doc_len: int | None = argument(None, role="windows", at_least=1)
    max_query_len: int | None = argument(32, role="input", at_least=1)
    text_field: TextField = argument("text", role="input")
    repeat: TextField | None = argument(None, role="input")
    repeat_tokens: int = argument(32, role="input", at_least=1, needs="repeat")
    text_loader: Any = argument(None, role="call")
    batch_size: int = argument(64, role="computing", at_least=1)
    max_batch_tokens: int | None = argument(None, role="computing", at_least=1)
    device: str | None = argument(None, role="computing")
    dtype: str | None = argument(None, role="computing", choices=(None, *DTYPES))
    runtime: str | None = argument(None, role="computing", choices=(None, *RUNTIMES))
    explain: bool = argument(False, role="call")
    trust_remote_code: bool = argument(False, role="weights")
    verbose: bool = argument(False, role="call")
    seed: int = argument(42, role="weights")

    _sized_by: ClassVar[str] = ""
    """The argument that sets the size of windows; `coverage.cut` names it for text that windows cut."""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        cls.__doc__ = composed(cls.__doc__, *(base.__doc__ for base in cls.__bases__ if issubclass(base, Reranker)))

    def __post_init__(self) -> None:
        check_roles(self)
        self.coverage: Coverage | None = None
        self.warned: set[str] = set()
        self._model: Model | None = None
        self._model_arguments: list[Any] | None = None  # the arguments of the last set-up
        self.check()

    def __repr__(self) -> str:
        arguments = changes(self, hidden=("backbone", *HIDDEN))
        backbone = str(self.backbone) if isinstance(self.backbone, Path) else self.backbone
        return f"{type(self).__name__}({', '.join([repr(backbone), *arguments])})"

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_model": None, "_model_arguments": None}

    # Its arguments.

    def check(self) -> None:
        """Raise ValueError for arguments that can never work, without loading anything."""
        validate(self)
        self._check_backbone()
        window_fields(self.text_field, self.repeat)
        torch.device(self.device or "cpu")  # refuses what is no device
        check_runtime(self.runtime, self.device, self.dtype)
        check_type(Windows | None, "windows, e.g. SlidingWindows(150, 75)", windows=self.windows)
        check_preselection(self.preselect, self.make_windows())
        if not hasattr(self.text_loader, "text_loader"):
            rule = "a transformer that adds the text, or have a method text_loader (as datasets and indexes do)"
            check_type(pt.Transformer | None, rule, text_loader=self.text_loader)

    def _check_backbone(self) -> None:
        """Raise ValueError if the backbone cannot be the name of a checkpoint."""
        check_checkpoint(backbone=self.backbone)

    def cited(self) -> list[str]:
        """Return the keys of the papers behind this model and its selection of windows."""
        return [*super().cited(), *papers_of(self.preselect)]

    def refuse(self, *names: str, why: str) -> None:
        """Raise ValueError if arguments that this class cannot use differ from their defaults."""
        changes = changed_names(self, names)
        if changes:
            raise ValueError(f"{', '.join(changes)} would have no effect: {type(self).__name__} {why}")

    def make_windows(self) -> Windows:
        """Return how documents are cut: `windows`, or windows of the given sizes.

        Raises:
            ValueError: if sizes are given next to `windows`, where they would have no effect.
        """
        if self.windows is None:
            windows = self.default_windows()
            return replace(windows, max_windows=self.max_windows, selection=self.selection, seed=self.seed)
        sizes = changed_names(self, saved.WINDOW_ARGUMENTS)
        if sizes:
            self.refuse(*sizes, why=f"has windows={self.windows!r}: set them in windows, or leave windows out")
        return self.windows

    def default_windows(self) -> Windows:
        """Return the windows to use without `windows`."""
        self._lacks("windows", "default_windows")

    def _lacks(self, what: str, method: str) -> NoReturn:
        name = type(self).__name__
        raise NotImplementedError(f"{name} names no {what}: use FirstP, MaxP, PARADE, ..., or define its {method}")

    def settings(self) -> Settings:
        """Return what is read and how scores are computed, by the current arguments."""
        device, windows = resolve_device(self.device or default_device(self.runtime)), self.make_windows()
        limit = self.max_windows if self.windows is None else self.windows.max_windows
        return Settings(
            windows,
            windows_argument=self._sized_by if self.windows is None else f"windows={self.windows!r}",
            max_windows=limit if limit == windows.max_windows else None,  # FirstP always has one
            max_doc_len=self.max_doc_len,
            max_query_len=self.max_query_len,
            repeat_tokens=0 if self.repeat is None else self.repeat_tokens,
            batch_size=self.batch_size,
            max_batch_tokens=self.max_batch_tokens,
            preselect=self.preselect,
            device=device,
            dtype=resolve_dtype(self.dtype, device),
            runtime=self.runtime,
        )

    # Its model.

    @property
    def model(self) -> Model:
        """The model in memory, loaded if necessary and set up by the current arguments.

        Raises:
            ValueError: if arguments do not fit the backbone, or need other weights than the trained ones.
        """
        arguments = []
        for f in fields(self):
            value = getattr(self, f.name)
            # A copy of lists and arrays, because these may change in place.
            arguments.append(tuple(value) if isinstance(value, list | np.ndarray) else value)
        with _SETTING_UP:
            if self._model is None or self._model_arguments != arguments:
                self._model_arguments = None  # a failure below may come after changes to the model
                self.check()
                self._model = self._set_up(self._model)
                self._model_arguments = arguments
            return self._model

    def to_cpu(self) -> None:
        """Move the weights to the CPU's memory until the model is used again."""
        if self._model is not None:
            self._model.cpu()
            self._model_arguments = None

    def _set_up(self, model: Model | None) -> Model:
        """Return a model for the current arguments: the present one if it can serve, else a new one."""
        raise NotImplementedError

    def describe(self) -> dict[str, Any]:
        """Return what the scores of this transformer depend on besides query and text, JSON-able.

        This includes the contents of the weights, the current arguments, and the kind and precision of the device.

        Raises:
            ValueError: if the tokenizer has a step in Python, which may change unnoticed.
        """
        model, arguments = self.model, arguments_of(self, "weights", "head", "input")
        return {
            "class": type(self).__name__,
            "arguments": {name: described(value) for name, value in saved.without_paths(arguments).items()},
            **model.describe(),
        }

    # From a frame to scores.

    def transform(self, inp: pd.DataFrame) -> pd.DataFrame:
        """Score every row.

        Args:
            inp: `qid, query, docno` and the text column(s); any other columns are kept, but for an earlier model's
                explanation.

        Returns:
            A new frame: same rows, order, index and columns, with `score` and `rank`.

        Raises:
            pt.validate.InputValidationError: if a column is missing.
            ValueError: for arguments that do not fit together or the backbone.
            FloatingPointError: if a score is not finite.
        """
        validated(inp, self.text_field, self.text_loader, self)
        if not len(inp):
            return with_scores(inp, [], **(self._explanation_columns([], []) if self.explain else {}))
        queries, texts = strings(inp["query"], "query"), self.documents(inp)
        if self.verbose:
            with work_bar(type(self).__name__, " characters", shown=True) as bar:
                scored = self.score(queries, texts, bar)
        else:
            scored = self.score(queries, texts)
        self.coverage = coverage = scored.coverage  # another thread may change the attribute
        if coverage.dtype == "bfloat16" and self.dtype in (None, FASTEST):
            message = (
                f"{type(self).__name__} computes in bfloat16, in which this device is fastest: scores differ from "
                f"those in float32 in the third digit. dtype='float32' avoids this, dtype='bfloat16' this warning."
            )
            warn_once(self, message, PrecisionWarning)
        coverage.add_rows(inp, map(is_blank, texts))
        warn_of_coverage(self, coverage)
        columns = self._explanation_columns(scored.explanations, texts) if self.explain else {}
        return with_scores(inp, scored.scores, **columns)

    def _explanation_columns(
        self, explanations: list[Explanation], texts: Sequence[Text]
    ) -> dict[str, list[Any] | np.ndarray]:
        """Return the columns that `explain` adds."""
        best = np.array([explanation.spans[explanation.best] for explanation in explanations], "int64").reshape(-1, 2)
        tokenizer = str(getattr(self.model.tokenizer, "name_or_path", "")) if explanations else ""
        field = " ".join(window_fields(self.text_field, self.repeat))
        return {
            "window_scores": [explanation.scores for explanation in explanations],
            "window_weights": [explanation.weights for explanation in explanations],
            "window_spans": [explanation.spans for explanation in explanations],
            "best_start": best[:, 0],
            "best_end": best[:, 1],
            "term_scores": [explanation.term_scores for explanation in explanations],
            "window_tokenizer": [tokenizer] * len(explanations),
            "window_field": [field] * len(explanations),
            "window_digest": list(map(digest_of_text, texts)),
        }

    def rank(self, query: str, texts: Sequence[str]) -> pd.DataFrame:
        """Rank plain texts for one query.

        Args:
            query: the query.
            texts: N texts; `text_field` must be one column, of which results make no other use.

        Returns:
            Rows `number` (of the text in the list), `score`, `rank` and `text`, best first; with `explain` its columns.

        Example:
            `ld.MaxP().rank("what holds atoms together", [paper1, paper2]).head(1)`
        """
        check_type(str, "a text", query=query)
        if not isinstance(texts, Sequence) or isinstance(texts, str) or not all(isinstance(t, str) for t in texts):
            raise ValueError("texts must be a list of texts")
        if not isinstance(self.text_field, str):
            raise ValueError(f"rank has one text for each document, and text_field={self.text_field!r} names several")
        own = ("qid", "query", "docno", "number", "score", "rank")
        if self.text_field in own:
            raise ValueError(
                f"rank makes the columns {', '.join(own)} itself: give another text_field=, such as 'text'"
            )
        frame = pd.DataFrame({"qid": "1", "query": query, "number": range(len(texts))})
        # Left to itself, pandas takes an empty list for numbers and refuses halves of surrogate pairs.
        column = pd.Series(list(texts), dtype=object)
        frame = frame.assign(docno=frame["number"].astype(str), **{self.text_field: column})
        found = self.transform(frame).sort_values("rank", ignore_index=True).drop(columns=["qid", "query", "docno"])
        first = ["number", "score", "rank", self.text_field]
        return found[[*first, *found.columns.difference(first, sort=False)]]

    def documents(self, frame: pd.DataFrame) -> Sequence[Text]:
        """Return the text of each row, with its title if titles are read with each window."""
        texts = documents_of(frame, self.text_field, self.repeat, self.text_loader)
        warn_of_inputs(self, frame, texts)
        return texts

    def score(self, queries: Sequence[str], texts: Sequence[Text], bar: Any = None) -> Scored:
        """Score R pairs of query and text; a tqdm bar shows the progress if given."""
        return self.model.score(queries, texts, explain=self.explain, bar=bar)

    def summary(self, candidates: pd.DataFrame) -> Coverage:
        """Return what `transform` of the same frame would read, and what not and why, without encoding.

        Texts are tokenised and cut into windows as in the run, so that the numbers are those of `coverage` afterwards;
        windows are selected, too, if the model does so. Weights are loaded if necessary.

        Args:
            candidates: as for `transform`.

        Raises:
            pt.validate.InputValidationError: if a column is missing.
            ValueError: for arguments that do not fit together or the backbone.
        """
        validated(candidates, self.text_field, self.text_loader, self)
        if not len(candidates):
            return Coverage()
        queries, texts = strings(candidates["query"], "query"), self.documents(candidates)
        with work_bar(f"{type(self).__name__} summary", " characters", shown=self.verbose) as bar:
            coverage = self.model.coverage_of(queries, texts, bar)
        coverage.add_rows(candidates, map(is_blank, texts))
        return coverage


@dataclass(eq=False, repr=False)
class CrossEncoder(Reranker, pt.Estimator):
    """Base of the cross-encoding rerankers; use `FirstP`, `MaxP`, `PARADE` and so on.

    Scores are logits. A changed attribute keeps the weights, unless it needs other weights.

    Args:
        backbone: a Hugging Face model or a folder: a cross-encoder (BERT, ELECTRA, RoBERTa, XLM-R, CamemBERT,
            DeBERTa, DistilBERT, ModernBERT), without its last layer, or a plain encoder, which needs `fit` first. Or,
            for models that aggregate scores, a scorer without weights here: `ScoreServer`, `PairScorer`. Default: a
            public MS MARCO passage cross-encoder.
        pooling: the window's vector, from the last layer's states: `"cls"` (the first token's), `"mean"` (of all
            tokens, query and special ones included) or `"last"` (the last token's). A cross-encoder's classification
            head is then left out, and the model must be trained. None: as the checkpoint was trained, with its
            classification head; without one, `"mean"` for JINA and language models, as in Boytsov et al. 2025, and
            `"cls"` for the others.
        template: the words around a query and a window, for language models: the name of one (`"qwen3-reranker"`,
            `"mxbai-rerank-v2"`, `"bge-reranker-v2-gemma"`, `"monot5"`; `"yes-no"` asks a chat model, `"plain"` is for a
            model before its training), a `Template`, or a text with `{query}` and `{text}`. None takes it from the
            checkpoint's files. If they name none, a language model that was trained to rank is refused, and any other
            reads `"plain"`.
        layout: how a query and a window become one input. `"pair"` is the tokenizer's layout for two texts, with which
            cross-encoders were trained, `"padded"` the fixed layout of Boytsov et al. 2025; or an `InputLayout`, or the
            name of another one that a preset uses.
        score_cache: a file that stores scores by weights, settings, query and text. A second run of the same model over
            the same texts reads them, and an interrupted run goes on: each block of texts is written when it is done.
            Not used with `explain`, in the validation of `fit`, or for a class with code of your own but no `describe`
            of its own.
        training: the recipe of `fit`; None for `TrainingArgs()`.

    Attributes:
        trained_on: the queries of the last `fit`, and why it left out others; None before.

    Example:
        `bm25 >> ld.CrossEncoder.load("folder")` is the model that was saved there, whatever its class.
    """

    _: KW_ONLY
    pooling: str | None = argument(None, role="weights", choices=POOLINGS)
    template: str | Template | None = argument(None, role="weights")
    layout: str | InputLayout = argument("pair", role="input")
    score_cache: str | Path | None = argument(None, role="call")
    training: TrainingArgs | None = argument(None, role="call")

    _starts_trained: ClassVar[str] = (
        "with a cross-encoder as backbone and its own pooling, FirstP, MaxP, PARADE with avg, max or attn, CEDR with "
        "knrm and others start trained"
    )
    """For the warning of an untrained model."""
    head_name: ClassVar[str] = ""
    encoder_class: ClassVar[type[WindowEncoder]] = WindowEncoder

    def _explanation_columns(
        self, explanations: list[Explanation], texts: Sequence[Text]
    ) -> dict[str, list[Any] | np.ndarray]:
        """See the base class; with what the encoder alone explains."""
        names = self.encoder_class.explains
        extra = {name: [explanation.extra[name] for explanation in explanations] for name in names}
        return {**super()._explanation_columns(explanations, texts), **extra}

    def __post_init__(self) -> None:
        self._validating = False
        self.trained_on: TrainedOn | None = None
        super().__post_init__()

    def __repr__(self) -> str:
        model, text = self._model, super().__repr__()
        if model is None:
            return text
        if model.source:
            text = saved.load_call(self, model)
        if model.encoder.quantized is not None:
            return f"{text[:-1]}, int8 {model.encoder.quantized.digest[:8]})"
        if (model.trained or model.started) and not model.source:
            return f"{text[:-1]}, {'trained' if model.trained else 'started'} {model.fingerprint(contents=False)[:8]})"
        return text

    def __getstate__(self) -> dict[str, Any]:
        model = self._model
        if model is not None and model.device.type != "cpu":
            model = copy.deepcopy(model).cpu()
        return {**super().__getstate__(), "_model": model}

    # What a subclass defines.

    def head_spec(self) -> HeadSpec:
        """Return name and options of the head."""
        if not self.head_name:
            self._lacks("head", "head_spec")
        return self.head_name, {}

    def load_backbone(self) -> Backbone:
        """Load the pre-trained part."""
        options = self._backbone_options()
        return load_backbone(str(self.backbone), trust_remote_code=self.trust_remote_code, options=options)

    def _backbone_options(self) -> BackboneOptions:
        """Return how the pre-trained part is used where there is a choice."""
        template = None if self.template is None else resolve_template(self.template)
        return BackboneOptions(pooling=self.pooling, template=template)

    def default_training(self) -> TrainingArgs:
        """Return the recipe to use without `training`."""
        return TrainingArgs()

    # Its arguments.

    @property
    def origin(self) -> Checkpoint | Scorer:
        """The origin of the scores: a checkpoint, or a scorer without weights here."""
        return origin_of(self)

    def cited(self) -> list[str]:
        """Return the keys of the papers behind this model, its selection of windows and its last training."""
        trained = [] if self._model is None else papers_of_recipe(self._model.recipe)
        return [*super().cited(), *trained]

    def _check_backbone(self) -> None:
        self.origin.check()

    def check(self) -> None:
        """See the base class."""
        super().check()
        check_type(TrainingArgs | None, "TrainingArgs(...), or None for the default recipe", training=self.training)
        check_type(str | Path | None, "a file", score_cache=self.score_cache)
        self.score_cache = full_path(self.score_cache)
        windows, layout = self.make_windows(), resolve_layout(self.layout)
        layout.check(windows, self.preselect, self.max_query_len, repeats=self.repeat is not None)
        if self.template is not None:
            resolve_template(self.template)
            if layout.is_for_pairs:
                raise ValueError(f"layout={self.layout!r} is for [CLS] query [SEP] text [SEP]; it has no template")

    def settings(self) -> Settings:
        """See the base class."""
        return replace(super().settings(), layout=resolve_layout(self.layout))

    def weight_arguments(self) -> dict[str, Any]:
        """Return the arguments that the weights depend on, besides those of the head."""
        values = arguments_of(self, "checkpoint") | arguments_of(self, "weights")
        return saved.without_paths({name: value for name, value in values.items() if name not in self.head_spec()[1]})

    # Its model.

    def _set_up(self, model: Model | None) -> Model:
        """See the base class."""
        arguments, head, settings = self.weight_arguments(), self.head_spec(), self.settings()
        if model is None or model.weight_arguments != arguments:
            if model is not None and model.trained:
                *names, last = arguments
                self._refuse_change(f"{', '.join(names)} or {last}")
            backbone, encoder = self.origin.load()
            how = {"weight_arguments": arguments, "seed": self.seed, "encoder": encoder}
            return Model.from_backbone(backbone, head, settings, **how)
        if model.head_spec != head and not exchange_head(model, head, self.seed):
            self._refuse_change("the aggregation")
        model.use(settings)
        return model

    def _refuse_change(self, what: str) -> NoReturn:
        name = type(self).__name__
        raise ValueError(
            f"this {name} holds trained weights, and a change of {what} would lose them: make a new {name}(...) instead"
        )

    def _refuse_quantized(self, what: str) -> None:
        if self._model is not None and self._model.encoder.quantized is not None:
            raise ValueError(f"{self!r} is quantized and cannot be {what}: take the model that it was made from")

    @property
    def is_trained(self) -> bool:
        """Whether `fit` or `load` gave the weights."""
        return self._model is not None and self._model.trained

    def score(self, queries: Sequence[str], texts: Sequence[Text], bar: Any = None) -> Scored:
        """See the base class; scores in the `score_cache` are read from it."""
        model = self.model
        if not model.ready:
            message = f"{type(self).__name__} has randomly initialised layers: its scores mean nothing before fit"
            warn_once(self, f"{message} ({self._starts_trained}).", UntrainedWarning)
        if self.score_cache is not None and not self.explain and not self._validating:
            return score_with_cache(self, model, queries, texts, bar)
        try:
            return model.score(queries, texts, explain=self.explain, bar=bar)
        except BackendError as error:
            if self.score_cache is None and not self.explain:
                error.args = (f"{error}. score_cache=FILE (and the server's model=) keeps what is scored before",)
            raise

    # Training.

    def fit(
        self,
        topics_or_res_tr: pd.DataFrame,
        qrels_tr: pd.DataFrame,
        topics_or_res_va: pd.DataFrame | None = None,
        qrels_va: pd.DataFrame | None = None,
    ) -> "CrossEncoder":
        """Train all weights end to end on the document score, with the recipe in `training`.

        Args:
            topics_or_res_tr: training candidates: `qid, query, docno`, the text column(s), and `score` or `rank`.
            qrels_tr: `qid, docno, label`; candidates without a label > 0 are negatives. With the recipe's
                `judged="all"` judged documents that are no candidates count, too, for queries with a candidate, if the
                `text_loader` has them.
            topics_or_res_va: validation candidates; the weights with the best `metric` on them are kept.
            qrels_va: labels of the validation candidates.

        Returns:
            This transformer.

        Raises:
            ValueError: if there is nothing to train or to validate on, if a label, score or text is wrong, or if the
                recipe does not fit the data or the checkpoint folder.
            FloatingPointError: if the loss is not finite.
            TypeError: for a `ScoreServer` or a `PairScorer`, whose weights are not here.
            ImportError: if the recipe needs accelerate or peft and they are missing.

        A trained model goes on from its weights with a `ContinuedTrainingWarning`, unless `start_from` gave them. An
        interrupted training keeps the best validated weights, else those of the last step. If the recipe names a
        checkpoint folder, a killed training goes on when the program is started again, and a finished one when the
        limit that ended it is raised: `max_steps`, `epochs` or `patience`.

        Afterwards `trained_on` tells which queries were trained on, and `coverage` how much was read of the texts in
        the examples. With `verbose` each is a line; without, a `LeftOutWarning` says if queries or judged documents
        were left out.
        """
        self.origin.need_weights("trained")
        self._refuse_quantized("trained")
        recipe = self.recipe
        validate, validated_on = self._validation(topics_or_res_va, qrels_va, recipe.metric)
        validated(topics_or_res_tr, self.text_field, self.text_loader, self)
        columns = {"text_field": self.text_field, "text_loader": self.text_loader}
        data = prepare(topics_or_res_tr, qrels_tr, recipe, texts=self.documents, **columns)
        model, resumes = self._model, recipe.checkpoint and (Path(recipe.checkpoint) / STATE_FILE).is_file()
        if model is not None and model.trained and not model.started and not resumes:
            problem = f"this {type(self).__name__} is trained already: fit goes on from its weights"
            warn(f"{problem}; to train afresh, make a new one", ContinuedTrainingWarning)
        self.trained_on = replace(data.trained_on, validated=validated_on)
        name, reports = type(self).__name__, self.verbose and is_first_process()
        if reports:
            pt.tqdm.write(f"{name}: {self.trained_on}")
        elif not self.verbose and data.trained_on.is_partial:
            warn(f"{name} is not trained on all queries or judged documents (see .trained_on).", LeftOutWarning)
        model = self.model
        try:
            with model.counting(recipe.dtype) as coverage:
                train(
                    model,
                    data,
                    recipe,
                    validate=validate,
                    on_step=partial(model.mark_trained, recipe.as_dict()),
                    history=model.history,
                    settings=partial(training_settings, self, topics_or_res_va, qrels_va),
                    verbose=self.verbose,
                )
        finally:
            coverage.add_rows(*data.draws())
            self.coverage = coverage  # not that of the last validation
            warn_of_coverage(self, coverage, " in fit")
        if coverage.documents and reports:
            pt.tqdm.write(f"{name}: trained on {coverage}")
        return self

    def _validation(
        self, results: pd.DataFrame | None, qrels: pd.DataFrame | None, metric: str
    ) -> tuple[Callable[[], float] | None, int]:
        """Return the function that gives the validation's metric, and the number of its queries.

        The data is checked now, not after the first epoch.
        """
        if results is None and qrels is None:
            return None, 0
        if results is None or qrels is None:
            raise ValueError("validation needs both candidates and qrels, or neither")
        validated(results, self.text_field, self.text_loader, self)
        queries = check_validation(results, qrels)

        def validate() -> float:
            # No later run has these weights: their scores need no place in the cache.
            # Each validation has other weights, which are not worth an export.
            with changed(self, runtime="torch", _validating=True):
                return evaluate(self.transform(results), qrels, metric)

        return validate, queries

    def start_from(self, other: Reranker) -> "CrossEncoder":
        """Take over another model's weights, those of its head only if it is of the same kind; return this transformer.

        CEDR is so trained after the plain ranker, and a model for a small collection after one for a large collection.

        Args:
            other: a model with the same kind of backbone. From a `BiEncoder` only the backbone's weights are taken: the
                model must be trained.

        Raises:
            ValueError: if it is no model of this package, or has another kind of backbone or another vocabulary.
        """
        rule = "a reranker of this package in memory; CrossEncoder.load(...) restores a saved one"
        check_type(Reranker, rule, other=other)
        for reranker in (self, other):
            if isinstance(reranker, CrossEncoder):
                reranker.origin.need_weights("started from another model, nor another one from it")
        self._refuse_quantized("started from another model")
        model, other_model = self.model, other.model
        if model.tokenizer.get_vocab() != other_model.tokenizer.get_vocab():
            raise ValueError(f"{other!r} and {self!r} have tokenizers with different vocabularies")
        difference = start_from(model, other_model, self.seed)
        if difference is not None:
            raise ValueError(
                f"{self!r} and {other!r} have encoders of different kinds: give both the same backbone and pooling "
                f"({difference})"
            )
        return self

    def quantize(self, candidates: pd.DataFrame, *, windows: int = 200) -> "CrossEncoder":
        """Return a copy that computes its backbone in int8 with OpenVINO, for CPUs with int8 instructions.

        The scales of activations are set once, by a few windows of these candidates. Afterwards a score depends on
        query and text only. Scores differ from those in float32 in the second digit; `coverage.dtype` is `"int8"`. The
        copy can be saved, but not trained.

        Args:
            candidates: as for `transform`.
            windows: how many windows to calibrate on, drawn by the model's seed.

        Raises:
            ValueError: for a model that OpenVINO cannot compute, for too few windows, or if int8 changes their ranking
                too much.
            ImportError: without NNCF.
        """
        self.origin.need_weights("quantized")
        validated(candidates, self.text_field, self.text_loader, self)
        clone = self.apply_attributes(device="cpu", dtype=None, runtime=None)
        queries, texts = strings(candidates["query"], "query"), self.documents(candidates)
        drawn = draw_windows(clone.model, queries, texts, windows, int(self.seed))
        quantize(clone.model, *drawn, verbose=self.verbose)
        clone._model_arguments = None  # set it up again: its precision has changed
        return clone

    @property
    def history(self) -> pd.DataFrame:
        """One row for each epoch and each validation so far; `training.plot_history` draws it.

        Columns: `epoch`, `step`, `loss` (mean since the last row), `learning_rate`, `documents_per_second` and, with
        validation data, `validation`.
        """
        return history_frame([] if self._model is None else self._model.history)

    @property
    def recipe(self) -> TrainingArgs:
        """The recipe of `fit`: `training` or the model's default, with the model's seed if it has none."""
        recipe = self.training or self.default_training()
        return recipe if recipe.seed is not None else recipe.with_seed(int(self.seed))

    # Copies: in memory, on disk, on the hub.

    def apply_attributes(self, **attributes: Any) -> "CrossEncoder":
        """Return a copy with other constructor arguments, trained weights included."""
        clone = type(self)(**{**arguments_of(self), **attributes})
        clone._model = copy.deepcopy(self._model)
        return clone

    def save(self, folder: str | Path) -> None:
        """Write the model to a folder: config.json, model.safetensors, tokenizer, model card, training.json.

        Args:
            folder: created if it does not exist; `load` restores the model from it.

        Raises:
            ValueError: for a backbone with remote code, whose code would be missing from the folder.
            TypeError: for a `ScoreServer` or a `PairScorer`, whose weights are not here.
        """
        saved.save(self, Path(folder))

    def save_adapter(self, folder: str | Path, *, upon: str | None = None) -> None:
        """Write a trained model as a small difference from its backbone.

        `load` restores it like any other model, if it finds the same backbone. A matrix that was trained with LoRA is
        kept as a product of low rank in fp16, any other in a byte a weight: scores change in the third or fourth digit.

        Args:
            folder: created if it does not exist.
            upon: another adapter, on the hub or in this package, from which this model has gone on: only what its
                encoder has changed since is written, and `load` needs both.
        """
        self.origin.need_weights("saved")
        self._refuse_quantized("saved as an adapter")
        saved.write_adapter(self, Path(folder), upon)

    def export(self, folder: str | Path) -> None:
        """Write a standard checkpoint: a classifier with one label, whose logit is the score of a query and a passage.

        transformers (`AutoModelForSequenceClassification`), the `CrossEncoder` of sentence-transformers and servers of
        such models load it, and so does this class, as its backbone. FirstP, MaxP, SumP, AvgP, KMaxP and SoftMaxP can
        be exported. Windows and the truncation of queries are not part of the checkpoint; its model card names them.
        The classifier of a BERT or RoBERTa that was trained without one gets a layer that changes nothing: its tanh is
        computed where it is linear, to an error of 1e-5.

        Args:
            folder: a new or an empty folder.

        Raises:
            ValueError: for a model that this format cannot express; the message says why.
            TypeError: for a `ScoreServer` or a `PairScorer`, whose weights are not here.
        """
        export_classifier(self, Path(folder))

    @classmethod
    def load(cls, name: str | Path, *, revision: str | None = None, **parameters: Any) -> Any:
        """Restore a model that `save` or `push_to_hub` wrote.

        Args:
            name: a folder, a model on the Hugging Face hub, or a model in this package, e.g.
                `"longdoc:maxp"`.
            revision: branch, tag or commit on the hub.
            **parameters: constructor arguments to change, e.g. `device="cpu"`.

        Returns:
            A transformer of this class, or of a subclass outside this package; `CrossEncoder.load` restores any class.

        Raises:
            ValueError: if it is no model that this package saved, if it is of another class, or if its own code is not
                imported yet; the message names the module.
        """
        reranker, model = saved.load(cls, CrossEncoder, name, revision, parameters)
        reranker._model = model
        return reranker

    def push_to_hub(
        self,
        repo_id: str,
        *,
        private: bool = False,
        license: str | None = None,
        datasets: Sequence[str] | None = None,
        commit_message: str = "Upload model",
        artifact: bool = False,
        format: str = "longdoc",
    ) -> str:
        """Save the model and upload it to the Hugging Face hub, with the token of `hf auth login`.

        Args:
            repo_id: `user/name`; made if need be.
            private: make it private.
            license: of the weights, for the model's card, e.g. `"mit"`.
            datasets: what it was trained on, for the card, e.g. `["irds/msmarco-document"]`.
            commit_message: of the upload.
            artifact: also write it to the data set of this name, where `pt.Artifact.from_hf(repo_id)` looks for it.
            format: `"longdoc"`, as `save` writes it, or `"standard"`, as `export` does.

        Returns:
            The model's address.
        """
        if format not in ("longdoc", "standard") or (artifact and format == "standard"):
            raise ValueError(f"format={format!r} must be 'longdoc', or 'standard' without artifact=True")
        how: Any = {"private": private, "commit_message": commit_message, "license": license, "datasets": datasets}
        return saved.upload(self, repo_id, artifact=artifact, export=format == "standard", **how)
