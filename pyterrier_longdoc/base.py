"""The base of all cross-encoding rerankers: score and fit."""

from __future__ import annotations

import copy
import dataclasses
import warnings
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pandas as pd
import pyterrier as pt
import torch

from .backbones import DEFAULT_BACKBONE, Backbone, load_backbone
from .devices import check_devices, resolve_devices, resolve_dtype
from .frames import TextField, check_only_windows, check_settings, rerank, strings, texts_of, validated
from .preselection import Preselection, check_preselection
from .presentation import WithBackbone
from .reports import Coverage, Explanation
from .runtimes import check_backend, check_last_layer, default_device, default_dtype
from .saving import WithCheckpoints
from .score_cache import ScoreCache, score_with_cache
from .scorer import LongDocScorer
from .training import TrainingArgs, check_qrels, evaluate, history_frame, make_groups, train
from .training.identity import training_settings
from .weights import HeadSpec, Weights
from .windows import Windows


class UntrainedWarning(UserWarning):
    """A model is used that has random weights where a trained one should be."""


@dataclass(eq=False, repr=False)
class LongDocReranker(WithBackbone, WithCheckpoints, pt.Estimator):
    """Base of the cross-encoding rerankers; use `FirstP`, `MaxP`, `PARADE` and so on.

    Reads a frame with `qid, query, docno` and the text column(s) and returns the same rows, columns and index with
    new `score` (float64 logits) and `rank`. Weights are loaded at the first `transform` of a non-empty frame.
    Changing an attribute takes effect at the next `transform`; the weights stay. Tokens of texts are remembered from
    one `transform` to the next, in up to 64 MB.

    Args:
        backbone: a Hugging Face model or a folder: a cross-encoder (BERT, ELECTRA, RoBERTa, XLM-R, CamemBERT,
            DeBERTa, DistilBERT, ModernBERT), whose layers up to the last one are used, or a plain encoder, which
            needs `fit` first. Default: a public MS MARCO passage cross-encoder.
        windows: how documents are cut, e.g. `SlidingWords(150, 100)`; replaces `window_size` and `stride`.
        max_windows: keep at most this many windows of a document; None keeps all.
        selection: which of them: `"first"` or `"first_last_random"` (PARADE's choice).
        preselect: reads only the windows that a cheaper method finds best for the query, e.g. `BM25Windows(3)`; of
            `FirstK`, `BM25Windows`, `EmbeddingWindows`, `CrossEncoderWindows` and `KeyBlocks`. After `max_windows`, in
            `fit` too. None reads all.
        max_doc_len: read only so many tokens of a document; None reads all. Boytsov et al. 2025 read 1431.
        max_query_len: read only so many tokens of a query; 32 in Boytsov et al. 2025.
        pad_query: the papers' fixed input layout, query padded to `max_query_len` and window to its full size;
            False is the layout that the backbone was trained with.
        text_field: the column with the text, or a tuple of columns that are joined by a space.
        text_loader: supplies the text where the column is absent: a text loader, or a dataset or index with one.
        batch_size: most windows in one pass through the backbone.
        max_batch_tokens: most tokens in one pass; None for 16,384 on a GPU and 2,048 on a CPU. Where memory runs out,
            passes are made smaller by themselves.
        device: `"cuda"`, `"cpu"`, ...; a list of GPUs, e.g. `["cuda:0", "cuda:1"]`, shares a `transform` among them
            (`fit` uses the first; see README for training on several). None for all GPUs, or the CPU if there is none.
        dtype: precision of the backbone when it scores: `"float32"`, `"bfloat16"` or `"float16"`; None for float32 on a
            CPU, so that all CPUs give the same scores, and for bfloat16 on a GPU that has it natively; `"fastest"` for what
            the device is best at: bfloat16 also on CPUs with AMX or AVX512_BF16. `coverage.dtype` tells which it was; in
            bfloat16 scores differ in the third digit.
        backend: what computes the backbone outside `fit`: `"torch"`, `"compile"` (`torch.compile`), and on a CPU
            `"openvino"`, `"onnx"` (ONNX Runtime) or `"onnx-int8"` (linear layers in 8 bits: scores are approximate).
            Others than torch are for BERT, ELECTRA, RoBERTa, XLM-R, DistilBERT and ModernBERT; the first scores after
            a change of weights wait for the compilation or export.
        explain: add columns: `window_scores` (the score each window would have alone), `window_weights` (attention
            over windows, None for models without), `window_spans` (characters of each window in the text; of several
            text columns, in the joined text), `best_start` and `best_end` (characters of the window with the highest
            score), `query_terms` (what each query token adds to the score, None for models that cannot tell).
        score_cache: a file in which scores are kept: a second run of the same model over the same texts reads them,
            and an interrupted one goes on. Keyed by weights, settings, query and text; not used with `explain`.
        training: the recipe of `fit`; None for that of Boytsov et al. 2025.
        trust_remote_code: run modelling code that the backbone's checkpoint brings along.
        verbose: show progress bars.
        seed: of weights that start at random and of the choice of windows.

    Attributes:
        coverage: how much of the text the last `transform` read, with which precision, and how much of what was
            computed was padding; None before.
    """

    backbone: str | Path = DEFAULT_BACKBONE
    _: KW_ONLY
    windows: Windows | None = None
    max_windows: int | None = None
    selection: str = "first"
    preselect: Preselection | None = None
    max_doc_len: int | None = None
    max_query_len: int = 32
    pad_query: bool = False
    text_field: TextField = "text"
    text_loader: Any = None
    batch_size: int = 64
    max_batch_tokens: int | None = None
    device: str | Sequence[str] | None = None
    dtype: str | None = None
    backend: str = "torch"
    explain: bool = False
    score_cache: str | Path | None = None
    training: TrainingArgs | None = None
    trust_remote_code: bool = False
    verbose: bool = False
    seed: int = 42

    _scorer_class: ClassVar[type[LongDocScorer]] = LongDocScorer
    _of_weights: ClassVar[tuple[str, ...]] = ("backbone", "trust_remote_code", "seed")
    _runtime: ClassVar[tuple[str, ...]] = (
        "text_loader", "device", "backend", "training", "verbose", "trust_remote_code", "windows", "preselect",
        "score_cache",
    )  # fmt: skip

    def __post_init__(self) -> None:
        self.coverage: Coverage | None = None
        self._loaded: Weights | None = None  # PyTerrier takes an attribute _x for the value of an argument x
        self._warned_untrained = False
        self._warned_cut = False
        self._check()

    # What a subclass says of itself.

    def _head_spec(self) -> HeadSpec:
        """Name and options of the head."""
        raise NotImplementedError(f"{type(self).__name__} names no head; use FirstP, MaxP, PARADE, ...")

    def _default_windows(self) -> Windows:
        """Windows where `windows` is not given."""
        raise NotImplementedError(f"{type(self).__name__} names no windows; use FirstP, MaxP, PARADE, ...")

    def _check(self) -> None:
        """Raises ValueError for arguments that can never work, without loading anything."""
        check_settings(self)
        if not isinstance(self.training, TrainingArgs | None):
            raise ValueError(f"training={self.training!r} must be TrainingArgs(...), or None for the default recipe")
        check_preselection(self.preselect, self._make_windows())
        check_devices(self.device, self._works_on_several())
        check_backend(self.backend, self.device, self.dtype)
        if self.backend != "torch":
            check_last_layer(
                self.backend, type(self).__name__, self._scorer_class is LongDocScorer, self._head_spec()[0]
            )

    def _works_on_several(self) -> bool:
        """Whether several devices may share a run: not where states are remembered, or forms of the model are made."""
        return self.backend == "torch" and self._scorer_class is LongDocScorer

    def _load_backbone(self) -> Backbone:
        """The pre-trained part."""
        return load_backbone(str(self.backbone), trust_remote_code=self.trust_remote_code)

    def _made_for(self) -> tuple[Any, ...]:
        """Values of the arguments that decide about the weights besides the head's."""
        values = (getattr(self, name) for name in self._of_weights)
        return tuple(str(value) if isinstance(value, Path) else value for value in values)

    def _default_training(self) -> TrainingArgs:
        """The recipe where `training` is not given."""
        return TrainingArgs()

    # PyTerrier's contract.

    def transform(self, inp: pd.DataFrame) -> pd.DataFrame:
        """Scores every row.

        Args:
            inp: `qid, query, docno` and the text column(s); any other columns are kept.

        Returns:
            A new frame: same rows, order, index and columns, with `score` and `rank`.

        Raises:
            pt.validate.InputValidationError: if a column is missing.
            ValueError: for arguments that do not fit together or the backbone.
            FloatingPointError: if a score is not finite.
        """
        return rerank(self, inp, self._score)

    def fuse_feature_union(self, other: pt.Transformer, is_left: bool) -> pt.Transformer | None:
        """Lets `(self ** other).compile()` encode each distinct (query, window) once for both.

        Args:
            other: another reranker, or fused ones, with the same encoder: untrained from the same backbone, or with
                equal weights. Windows and heads may differ; what else is read, precision and device may not.
            is_left: whether this transformer's feature comes first.

        Returns:
            The fused transformer; None where `other` does not fit, and for models that look at tokens or do more than
            score windows (`CEDR`, `NeuralModel1`, `LateIR`, `MORESPlus`, `Birch`, `LongP`, `explain`, `score_cache`).
        """
        from .fused import fuse  # which imports this module

        return fuse(self, other) if is_left else fuse(other, self)

    def fit(
        self,
        topics_or_res_tr: pd.DataFrame,
        qrels_tr: pd.DataFrame,
        topics_or_res_va: pd.DataFrame | None = None,
        qrels_va: pd.DataFrame | None = None,
    ) -> LongDocReranker:
        """Trains all weights end to end on the document score, with the recipe in `training`.

        Args:
            topics_or_res_tr: training candidates: `qid, query, docno`, the text column(s), and `score` or `rank`.
            qrels_tr: `qid, docno, label`; candidates without a label > 0 are negatives.
            topics_or_res_va: validation candidates; with them the weights with the best `metric` are kept.
            qrels_va: labels of the validation candidates.

        Returns:
            This transformer.

        Raises:
            ValueError: if no training query has a positive and a negative candidate, none is judged in validation, or
                the recipe does not fit the data or the checkpoint folder.
            FloatingPointError: if the loss is not finite.
            OSError: if the state cannot be written to the checkpoint folder.
            ImportError: if the recipe needs accelerate or peft and they are missing.

        Interrupted after the first step, the model keeps what it has learned: the best weights so far if some were
        validated, else those of the last step. Killed, it continues when the program is started again, if the recipe
        names a checkpoint folder.
        """
        args = self.training or self._default_training()
        validate = self._validation(topics_or_res_va, qrels_va, args.metric)
        fields = validated(topics_or_res_tr, self.text_field, self.text_loader, self)
        queries = strings(topics_or_res_tr["query"], "query")
        texts = texts_of(topics_or_res_tr, fields, self.text_loader)
        groups = make_groups(topics_or_res_tr.assign(query=queries), texts, qrels_tr, args)
        self._check()
        weights = self._load_weights()
        train(
            weights.scorer,
            groups,
            args,
            validate=validate,
            on_step=partial(weights.mark_trained, args.as_dict()),
            history=weights.history,
            settings=partial(training_settings, self, topics_or_res_va, qrels_va),
            verbose=self.verbose,
        )
        return self

    def _validation(
        self, results: pd.DataFrame | None, qrels: pd.DataFrame | None, metric: str
    ) -> Callable[[], float] | None:
        """What tells the figure of merit, after a look at its data: not only when the first epoch is over."""
        if results is None and qrels is None:
            return None
        if results is None or qrels is None:
            raise ValueError("validation needs both candidates and qrels, or neither")
        validated(results, self.text_field, self.text_loader, self)
        check_qrels(qrels)
        if not set(qrels["qid"].astype(str)) & set(results["qid"].astype(str)):
            raise ValueError("the validation qrels judge none of the validation candidates' queries: check the qids")
        return lambda: evaluate(self.transform(results), qrels, metric)

    def load_scorer(self) -> LongDocScorer:
        """The model in memory, loaded if need be and set up by the current arguments.

        Raises:
            ValueError: if arguments do not fit the backbone, or ask for other weights than the trained ones.
        """
        self._check()
        return self._load_weights().scorer

    def _load_weights(self) -> Weights:
        made_for = self._made_for()
        head, windows = self._head_spec(), self._make_windows()
        reading = {name: getattr(self, name) for name in ("max_doc_len", "max_query_len", "pad_query")}
        weights = self._loaded
        if weights is None or weights.made_for != made_for:
            if weights is not None and weights.trained:
                raise self._would_lose_training(f"{', '.join(self._of_weights[:-1])} or {self._of_weights[-1]}")
            weights = Weights.from_backbone(
                self._load_backbone(),
                head,
                windows,
                made_for=made_for,
                seed=self.seed,
                scorer_class=self._scorer_class,
                **reading,
            )
        elif weights.head != head and not weights.exchange_head(head, self.seed):
            raise self._would_lose_training("the aggregation")
        scorer = weights.scorer
        scorer.read_with(windows, **reading)
        scorer.select_with(self.preselect)
        scorer.encoder.batch_size, scorer.encoder.max_batch_tokens = self.batch_size, self.max_batch_tokens
        devices = resolve_devices(self.device or default_device(self.backend))
        scorer.devices = tuple(devices if self._works_on_several() else devices[:1])
        scorer.to(scorer.devices[0])
        scorer.encoder.runtime.use(self.backend, scorer.encoder.backbone)
        self._loaded = weights
        return weights

    def start_from(self, other: LongDocReranker) -> LongDocReranker:
        """Takes over another model's weights, its head's only if that is of the same kind; returns this transformer.

        So CEDR is trained after the plain ranker, and a model for a small collection after one for a large collection.

        Args:
            other: a model with the same kind of backbone.

        Raises:
            ValueError: if the backbones are not of the same kind.
        """
        if not self._load_weights().adopt(other._load_weights()):
            raise ValueError(f"{other!r} and {self!r} have encoders of different kinds: give both the same backbone")
        return self

    @property
    def history(self) -> pd.DataFrame:
        """One row for each epoch and each validation so far; `training.plot_history` draws it.

        Columns: `epoch`, `step`, `loss` (mean since the last row), `learning_rate`, `documents_per_second` and, with
        validation data, `validation`.
        """
        return history_frame([] if self._loaded is None else self._loaded.history)

    def apply_attributes(self, **attributes: Any) -> LongDocReranker:
        """A copy with other constructor arguments, trained weights included."""
        clone = type(self)(**{**self._parameters(), **attributes})
        clone._loaded = copy.deepcopy(self._loaded)
        return clone

    def __getstate__(self) -> dict[str, Any]:
        state = dict(self.__dict__)
        if self._loaded is not None and self._loaded.scorer.device.type != "cpu":
            state["_loaded"] = copy.deepcopy(self._loaded)
            state["_loaded"].scorer.cpu()
        return state

    def _parameters(self) -> dict[str, Any]:
        return {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}

    def _make_windows(self) -> Windows:
        if self.windows is None:
            windows, given = self._default_windows(), self.max_windows
            return replace(windows, max_windows=given, selection=self.selection, seed=self.seed)
        check_only_windows(self)
        return self.windows

    def _would_lose_training(self, what: str) -> ValueError:
        name = type(self).__name__
        return ValueError(
            f"this {name} holds trained weights, and a change of {what} would lose them: make a new {name}(...) instead"
        )

    def _score(
        self, queries: list[str], texts: list[str], on_rows: Callable[[int], None] | None
    ) -> tuple[np.ndarray, list[Explanation], Coverage]:
        self._check()
        weights = self._load_weights()
        self._warn_untrained(weights)
        scorer = weights.scorer
        dtype = self._precision(scorer)
        if self.explain:
            scores, explanations = scorer.explain(queries, texts, dtype=dtype, on_rows=on_rows)
            return scores, explanations, scorer.coverage
        if self.score_cache is not None:
            cache = ScoreCache(self.score_cache)
            scores, coverage = score_with_cache(cache, weights, queries, texts, dtype=dtype, on_rows=on_rows)
            return scores, [], coverage
        return scorer.score(queries, texts, dtype=dtype, on_rows=on_rows), [], scorer.coverage

    def _precision(self, scorer: LongDocScorer) -> torch.dtype:
        return resolve_dtype(self.dtype or default_dtype(self.backend), scorer.device)

    def _warn_untrained(self, weights: Weights) -> None:
        if weights.ready or self._warned_untrained:
            return
        self._warned_untrained = True
        warnings.warn(
            f"{self!r} has randomly initialised layers: its scores mean nothing before fit (with a cross-encoder as "
            f"backbone FirstP, MaxP, PARADE with avg, max or attn, CEDR with knrm and others start trained).",
            UntrainedWarning,
            stacklevel=6,
        )
