"""The PyTerrier interface of a model: constructor arguments, and `transform` from a frame to scores."""

# Without `from __future__ import annotations`: modules of subclasses need the types of the fields, too.
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, replace
from pathlib import Path
from threading import RLock
from typing import Any, ClassVar, NoReturn

import numpy as np
import pandas as pd
import pyterrier as pt

from ..common.arguments import (
    argument,
    arguments_of,
    changed_names,
    check_checkpoint,
    check_roles,
    check_type,
    validate,
)
from ..common.citations import papers_of
from ..common.coverage import Coverage, Scored
from ..common.frames import (
    OF_WINDOWS,
    Document,
    Question,
    TextField,
    digest_of_text,
    documents_of,
    is_blank,
    questions,
    strings,
    validated,
    window_fields,
    with_scores,
)
from ..common.key import description
from ..common.language import is_visible
from ..common.packaged import check_encoder
from ..common.presentation import HIDDEN, NotebookMixin, changes
from ..common.progress import work_bar
from ..common.warnings import warn_of_coverage, warn_of_queries, warn_of_seen_queries, warn_of_texts, warn_once
from ..modelling.backbones.load import DEFAULT_BACKBONE
from ..modelling.devices import DTYPES, FASTEST, check_device, float32_by_default
from ..modelling.encoder import WindowEncoder
from ..modelling.external import PairScorer
from ..modelling.inputs import Settings
from ..modelling.model import Model
from ..modelling.preselection import WindowSelector
from ..modelling.runtimes import RUNTIMES, check_runtime
from ..modelling.windows import SELECTIONS, Windows
from . import saved

# One lock for all models: a lock of each could not be pickled, and random weights come from torch's global generator.
# It is re-entrant for the models of selectors.
_SETTING_UP = RLock()


class PrecisionWarning(UserWarning):
    """A model scores in bfloat16 because the device is fastest in it."""


@dataclass(eq=False, repr=False)
class Reranker(NotebookMixin, pt.Transformer):
    """Base of the rerankers that score a document by its windows: cross-encoders and bi-encoders.

    Reads a frame with `qid, query, docno` and the text column(s) and returns the same rows, columns and index with
    new `score` (float64) and `rank`. The first `transform` of a non-empty frame loads the weights. A changed attribute
    takes effect at the next `transform`.

    Args:
        backbone: a Hugging Face model name or a folder.
        max_doc_len: truncates documents to this many tokens; None does not truncate. 1,431 in Boytsov et al. 2025.
        max_query_len: truncates queries to this many tokens; 32 in Boytsov et al. 2025. With None, a query can fill the
            part of the backbone's maximum input length that a window of a given size leaves, or a quarter of it if
            windows have no given size (`window_size=None`, `LongP`). None requires the layout `"pair"`.
        text_field: the text column, or a tuple of columns that are joined by a space.
        text_loader: supplies the text if the column is absent: a text loader, or a dataset or index with one.
        batch_size: the maximum number of windows in a batch.
        device: `"cuda"`, `"cuda:1"`, `"cpu"`, ...; None for a GPU if there is one.
        dtype: the precision of the backbone in inference: `"float32"`, `"bfloat16"`, `"float16"`, or `"fastest"` on
            this device. None is float32 on a CPU, so that all CPUs give the same scores, and bfloat16 on a GPU with
            native support. Scores in bfloat16 differ in the third digit. `coverage.dtype` reports the precision.
        verbose: show progress bars; `fit` also reports its training queries and where it resumes.
        windows: a window rule with sizes of its own, e.g. `SlidingWords(150, 100)`; None for the model's own windows.
        max_windows: the maximum number of windows per document; None keeps all.
        selection: which windows to keep: `"first"` or `"first_last_random"` (as in PARADE).
        preselect: scores only the windows that a cheaper method ranks highest for the query, e.g. `BM25Windows(3)`: a
            `FirstK`, `BM25Windows`, `EmbeddingWindows` or `CrossEncoderWindows`. It applies after
            `max_windows`, in `fit` as well. None scores all windows.
        repeat: the columns of `text_field` that are prepended to every window, such as the title:
            `text_field=("title", "body"), repeat="title"`. Each column takes one line. With None, all columns are
            joined before windowing, so only the first windows contain the title.
        repeat_tokens: the maximum number of tokens of `repeat`; longer titles are truncated. These tokens do not count
            towards `window_size` and `max_doc_len`. Every window reserves room for them, so that the windows of a
            document do not depend on its title.
        max_batch_tokens: the maximum number of tokens in a batch, padding included; None for 16,384 on a GPU and 2,048
            on a CPU. If a batch does not fit into a GPU's memory, it is split in two and tried once more.
        runtime: the library that computes the backbone in inference: `"torch"`, or `"openvino"` on a CPU. None uses
            OpenVINO on an x86-64 CPU if it is installed, for a BERT, ELECTRA, RoBERTa, XLM-R, DistilBERT or ModernBERT
            with at least 5 million weights, in a precision in which the CPU is fast. The first call after a change of
            weights exports the backbone; changes through `.data` are not detected. `coverage.runtime` reports the
            library.
        explain: add columns: `window_scores` (the score that each window would have alone), `window_weights` (the
            attention over windows; None for models without attention), `window_spans` (the characters of each window
            in the text, or in the joined columns without those of `repeat`), `best_start` and `best_end` (the
            characters of the highest-scoring window), `term_scores` (the contribution of each query token to the score;
            None for models without), `window_tokenizer` (the tokenizer's name; "" for words), `window_field` (the
            text columns without `repeat`) and `window_digest` (a fingerprint of the text).
        trust_remote_code: run modelling code from the backbone's checkpoint.
        seed: for random initial weights, for the choice of windows and, if the recipe has no seed, for the training.

    Attributes:
        coverage: how much of the text the last `transform` or `fit` read, in which precision, and how much of the
            computation was padding; None before the first call.
    """

    backbone: str | Path | PairScorer = argument(DEFAULT_BACKBONE, role="checkpoint")
    _: KW_ONLY
    windows: Windows | None = argument(None, role="windows")
    max_windows: int | None = argument(None, role="windows", at_least=1)
    selection: str = argument("first", role="windows", choices=SELECTIONS)
    preselect: WindowSelector | None = argument(None, role="windows")
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
    """The argument that sets the size of windows; `coverage.truncated` names it for text that windows cut."""
    encoder_class: ClassVar[type[WindowEncoder]] = WindowEncoder
    settings_class: ClassVar[type[Settings]] = Settings

    def __post_init__(self) -> None:
        check_roles(self)
        self.coverage: Coverage | None = None
        self.warned: set[str] = set()
        self._model: Model | None = None
        self._is_set_up = False  # whether the model matches the current arguments
        self._validating = False  # whether `fit` computes a validation measure
        self._checked()

    def __repr__(self) -> str:
        arguments = changes(self, hidden=("backbone", *HIDDEN))
        backbone = str(self.backbone) if isinstance(self.backbone, Path) else self.backbone
        return f"{type(self).__name__}({', '.join([repr(backbone), *arguments])})"

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_model": None, "_is_set_up": False}

    # Arguments.

    def check(self) -> None:
        """Raise ValueError for arguments that can never work, without loading anything."""
        validate(self)
        self._check_backbone()
        window_fields(self.text_field, self.repeat)
        check_device(self.device)
        check_runtime(self.runtime, self.device, self.dtype)
        check_type(Windows | None, "windows, e.g. SlidingWindows(150, 75)", windows=self.windows)
        if not hasattr(self.text_loader, "text_loader"):
            rule = "a dataset, an index or a transformer that adds the text; for a dict of texts by docno, it is "
            rule += "pt.apply.text(lambda row: texts[row['docno']])"
            check_type(pt.Transformer | None, rule, text_loader=self.text_loader)

    def _check_backbone(self) -> None:
        """Raise ValueError if the backbone cannot be the name of a checkpoint."""
        check_checkpoint(backbone=self.backbone)
        check_encoder(str(self.backbone))

    def cited(self) -> list[str]:
        """Return the keys of the papers behind this model and its selection of windows."""
        return [*super().cited(), *papers_of(self.preselect)]

    def make_windows(self) -> Windows:
        """Return the window rule: `windows`, or one with the given sizes.

        Raises:
            ValueError: if sizes are given together with `windows`, where they would have no effect.
        """
        if self.windows is None:
            windows = self.default_windows()
            return replace(windows, max_windows=self.max_windows, selection=self.selection, seed=self.seed)
        sizes = changed_names(self, saved.WINDOW_ARGUMENTS)
        if sizes:
            raise ValueError(
                f"{', '.join(sizes)} would have no effect with windows={self.windows!r}: set them there, or omit it"
            )
        return self.windows

    def default_windows(self) -> Windows:
        """Return the windows to use without `windows`."""
        self._lacks("windows", "default_windows")

    def _lacks(self, what: str, method: str) -> NoReturn:
        name = type(self).__name__
        raise NotImplementedError(f"{name} names no {what}: use FirstP, MaxP, PARADE, ..., or define its {method}")

    def make_settings(self, **others: Any) -> Settings:
        """Return the settings for the current arguments; a subclass adds `others`.

        Raises:
            ValueError: if arguments do not suit each other.
        """
        windows = self.make_windows()
        limit = self.max_windows if self.windows is None else self.windows.max_windows
        values: dict[str, Any] = {
            "windows_argument": self._sized_by if self.windows is None else f"windows={self.windows!r}",
            "max_windows": limit if limit == windows.max_windows else None,  # FirstP always has one
            "max_doc_len": self.max_doc_len,
            "max_query_len": self.max_query_len,
            "repeat_tokens": 0 if self.repeat is None else self.repeat_tokens,
            "batch_size": self.batch_size,
            "max_batch_tokens": self.max_batch_tokens,
            "preselect": self.preselect,
            "device_name": self.device or ("cpu" if self.runtime == "openvino" else None),
            "dtype_name": self.dtype,
            "runtime": self.runtime,
        }
        return self.settings_class(windows, **{**values, **others})

    def _checked(self) -> Settings:
        """Return the settings for the current arguments, after all checks of these."""
        self.check()
        return self.make_settings()

    # Model.

    @property
    def model(self) -> Model:
        """The model in memory, loaded if necessary and set up by the current arguments.

        Raises:
            ValueError: if arguments do not fit the backbone, or require other weights than the trained ones.
        """
        with _SETTING_UP:
            if self._model is None or not self._is_set_up:
                settings = self._checked()
                _ = settings.device  # raises an error before anything is loaded
                with float32_by_default():
                    self._model = self._set_up(self._model, settings)
                self._is_set_up = True
            return self._model

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self.__dataclass_fields__:
            self._is_set_up = False
            if isinstance(value, list):  # what changes in place would go unnoticed
                value = tuple(value)
            elif isinstance(value, np.ndarray):
                value = value.copy()
                value.flags.writeable = False
        super().__setattr__(name, value)

    def to_cpu(self) -> None:
        """Move the weights to the CPU's memory until the model is used again."""
        if self._model is not None:
            self._model.cpu()
            self._is_set_up = False

    def _set_up(self, model: Model | None, settings: Settings) -> Model:
        """Return a model for the current arguments: the existing one if possible, otherwise a new one."""
        raise NotImplementedError

    def describe(self) -> dict[str, Any]:
        """Return what the scores of this transformer depend on besides query and text, JSON-able.

        This includes the contents of the weights, the current arguments, and the kind and precision of the device.

        Raises:
            NoKeyError: if a part has no identity, such as a step of the tokenizer in Python.
        """
        model, arguments = self.model, arguments_of(self, "weights", "head", "input")
        return {
            "class": type(self).__name__,
            "arguments": {name: description(value) for name, value in arguments.items()},
            **model.describe(),
        }

    # Scoring.

    def transform(self, inp: pd.DataFrame) -> pd.DataFrame:
        """Score every row.

        Args:
            inp: `qid, query, docno` and the text columns; other columns are kept, except explanations of
                an earlier score.

        Returns:
            A new frame with the same rows, order, index and columns, and with `score` and `rank`.

        Raises:
            pt.validate.InputValidationError: if a column is missing.
            ValueError: if arguments contradict each other or do not fit the backbone.
            FloatingPointError: if a score is not finite.
        """
        validated(inp, self.text_field, self.text_loader, self)
        if not len(inp):
            return with_scores(inp, [], **(self._explanation({}, []) if self.explain else {}))
        queries, texts = self.queries(inp), self.documents(inp)
        if self.model.trained_queries and not self._validating:
            warn_of_seen_queries(self, self.model.trained_queries, queries)
        with work_bar(type(self).__name__, " characters", shown=self.verbose) as bar:
            scored = self.score(queries, texts, bar)
        self.coverage = coverage = scored.coverage  # another thread may change the attribute
        if coverage.dtype == "bfloat16" and self.dtype in (None, FASTEST):
            message = (
                f"{type(self).__name__} computes in bfloat16, in which this device is fastest: scores differ from "
                f"those in float32 in the third digit. Set dtype='float32' to avoid this, or dtype='bfloat16' to "
                f"silence this warning."
            )
            warn_once(self, message, PrecisionWarning)
        coverage.add_rows(inp["qid"], (not is_visible(query.text) for query in queries), map(is_blank, texts))
        warn_of_coverage(self, coverage)
        columns = self._explanation(scored.columns, texts) if self.explain else {}
        return with_scores(inp, scored.scores, **columns)

    def _explanation(self, columns: dict[str, list[Any]], texts: Sequence[Document]) -> dict[str, Any]:
        """Return the columns that `explain` adds, also to an empty frame."""
        tokenizer = str(getattr(self.model.tokenizer, "name_or_path", "")) if texts else ""
        field = " ".join(window_fields(self.text_field, self.repeat))
        found = {name: columns.get(name, []) for name in (*OF_WINDOWS, *self.encoder_class.explains)}
        return {
            **found,
            **{name: np.array(found[name], dtype="int64") for name in ("best_start", "best_end")},
            "window_tokenizer": [tokenizer] * len(texts),
            "window_field": [field] * len(texts),
            "window_digest": [digest_of_text(text.text) for text in texts],
        }

    def rank(self, query: str, texts: Sequence[str]) -> pd.DataFrame:
        """Rank plain texts for one query.

        It uses `instruction` for all texts and ignores `instruction_field`.

        Args:
            query: the query.
            texts: N texts; `text_field` must be a single column whose name is not one of the result's.

        Returns:
            A frame with `number` (the position in `texts`), `score`, `rank` and `text`, best first, plus the columns of
            `explain`.

        Example:
            `ld.MaxP().rank("what holds atoms together", [paper1, paper2]).head(1)`
        """
        check_type(str, "a text", query=query)
        if not isinstance(texts, Sequence) or isinstance(texts, str) or not all(isinstance(t, str) for t in texts):
            raise ValueError("texts must be a list of texts")
        own = ("qid", "query", "docno", "number", "score", "rank")
        if not isinstance(self.text_field, str) or self.text_field in own:
            names = ", ".join(own)
            raise ValueError(f"rank needs one text column other than {names}, but text_field={self.text_field!r}")
        numbers, field = range(len(texts)), getattr(self, "instruction_field", None)
        empty = {} if field in (None, *own, self.text_field) else {field: ""}
        frame = pd.DataFrame({"qid": "1", "query": query, "number": numbers, "rank": numbers, **empty})
        # Left to itself, pandas takes an empty list for numbers and refuses halves of surrogate pairs.
        column = pd.Series(list(texts), dtype=object)
        frame = frame.assign(docno=frame["number"].astype(str), **{self.text_field: column})
        found = self.transform(frame).sort_values("rank", ignore_index=True)
        found = found.drop(columns=["qid", "query", "docno", *empty])
        first = ["number", "score", "rank", self.text_field]
        return found[[*first, *found.columns.difference(first, sort=False)]]

    def queries(self, frame: pd.DataFrame) -> Sequence[Question]:
        """Return the query of each row."""
        queries = strings(frame["query"], "query")
        warn_of_queries(self, queries)
        return questions(queries)

    def documents(self, frame: pd.DataFrame) -> Sequence[Document]:
        """Return the text of each row, with its title if `repeat` is set."""
        texts = documents_of(frame, self.text_field, self.repeat, self.text_loader)
        warn_of_texts(self, frame, texts)
        return texts

    def score(self, queries: Sequence[str | Question], texts: Sequence[str | Document], bar: Any = None) -> Scored:
        """Score R query-text pairs; `bar` is a tqdm progress bar."""
        return self.model.score(queries, texts, explain=self.explain, bar=bar)

    def summary(self, candidates: pd.DataFrame) -> Coverage:
        """Return the coverage that `transform` would report for these candidates, without computing scores.

        Texts are tokenized and divided into windows, and windows are preselected, as in `transform`. Weights are loaded
        if necessary.

        Args:
            candidates: as for `transform`.

        Raises:
            pt.validate.InputValidationError: if a column is missing.
            ValueError: if arguments contradict each other or do not fit the backbone.
        """
        validated(candidates, self.text_field, self.text_loader, self)
        if not len(candidates):
            return Coverage()
        queries, texts = self.queries(candidates), self.documents(candidates)
        with work_bar(f"{type(self).__name__} summary", " characters", shown=self.verbose) as bar:
            coverage = self.model.coverage_of(queries, texts, bar)
        coverage.add_rows(candidates["qid"], (not is_visible(query.text) for query in queries), map(is_blank, texts))
        return coverage
