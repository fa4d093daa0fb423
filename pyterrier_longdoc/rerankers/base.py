"""The base of all cross-encoding rerankers: score and fit."""

from __future__ import annotations

import copy
import dataclasses
import json
import shutil
import tempfile
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
from safetensors.torch import load_file

from ..common.arguments import argument
from ..common.coverage import Coverage, Explanation
from ..common.frames import TextField, rerank, strings, texts_of, validated
from ..common.presentation import WithBackbone
from ..modelling.backbones.load import DEFAULT_BACKBONE, Backbone, load_backbone
from ..modelling.checkpoint import (
    ADAPTER_FILE,
    Adapter,
    HeadSpec,
    Weights,
    compress,
    fingerprint,
    load_pretrained,
    read_config,
    restore,
    save_pretrained,
)
from ..modelling.devices import check_devices, resolve_devices, resolve_dtype
from ..modelling.preselection import Preselection, check_preselection
from ..modelling.runtimes import check_backend, check_last_layer, default_device, default_dtype
from ..modelling.scorer import LongDocScorer
from ..modelling.windows import Windows, windows_from_config, windows_to_config
from ..training import (
    TrainingArgs,
    check_qrels,
    evaluate,
    history_frame,
    make_groups,
    train,
    training_settings,
)
from .checks import check_only_windows, check_settings
from .score_cache import ScoreCache, score_with_cache
from .selectors import FOLDER as PRESELECT
from .selectors import preselection_from_config


class WithCheckpoints:
    """How rerankers are saved and loaded."""

    def save(self: Any, folder: str | Path) -> None:
        """Writes the model to a folder: config.json, model.safetensors, tokenizer, model card, training.json.

        Args:
            folder: made if need be; `load` restores the model from it.

        Raises:
            ValueError: for a backbone with remote code, whose code would be missing from the folder.
        """
        if self.trust_remote_code:
            raise ValueError("a model whose backbone runs remote code cannot be saved: its code is not ours to store")
        self._check()
        save_reranker(self, self._load_weights(), folder)

    @classmethod
    def load(cls, name: str | Path, *, revision: str | None = None, **parameters: Any) -> Any:
        """Restores a model that `save` or `push_to_hub` wrote.

        Args:
            name: a folder, a model on the Hugging Face hub, or one that comes with this package, e.g.
                `"longdoc:docstrings-maxp"`.
            revision: branch, tag or commit on the hub.
            **parameters: constructor arguments to change, e.g. `device="cpu"`.

        Returns:
            A transformer of this class, or of a subclass that is not this package's own; `LongDocReranker.load`
            restores any class.

        Raises:
            ValueError: if that is not a model saved by this package, or one of another class.
        """
        from . import cross as longp  # noqa: F401 - so that the classes are known

        return load_reranker(cls, LongDocReranker, name, revision=revision, parameters=parameters)

    def push_to_hub(self, repo_id: str, *, private: bool = False, commit_message: str = "Upload model") -> str:
        """Saves the model and uploads it to the Hugging Face hub, with the token of `huggingface-cli login`.

        Args:
            repo_id: `user/name`; made if need be.
            private: make it private.
            commit_message: of the upload.

        Returns:
            The model's address.
        """
        import huggingface_hub

        api = huggingface_hub.HfApi()
        with tempfile.TemporaryDirectory() as folder:
            self.save(folder)
            api.create_repo(repo_id, private=private, exist_ok=True)
            return str(api.upload_folder(repo_id=repo_id, folder_path=folder, commit_message=commit_message))


def save_reranker(model: Any, weights: Weights, folder: str | Path, *, adapter: Adapter | None = None) -> None:
    """Writes a reranker's checkpoint.

    Args:
        model: the transformer.
        weights: its weights, which fit its arguments.
        folder: made if need be.
        adapter: the weights as a difference from the backbone's, which is then stored.
    """
    parameters = {k: v for k, v in model._parameters().items() if k not in model._runtime}
    parameters = {k: str(v) if isinstance(v, Path) else v for k, v in parameters.items()}
    if model.windows is not None:
        parameters["windows"] = windows_to_config(model.windows)
    if model.preselect is None:
        shutil.rmtree(Path(folder) / PRESELECT, ignore_errors=True)  # of a model that was here before
    else:
        parameters["preselect"] = model.preselect.to_config(Path(folder))
    training = None
    if weights.history:
        training = {"args": weights.recipe, "history": weights.history}
    save_pretrained(
        folder,
        weights.scorer,
        weights.backbone,
        name=type(model).__name__,
        parameters=parameters,
        head={
            "name": weights.head[0],
            "options": weights.head[1],
            "built_from": weights.scorer.head.built_from(),
            "ready": weights.ready,
        },
        training=training,
        adapter=adapter,
    )


def save_adapter(model: Any, folder: str | Path, *, rank: int = 16) -> None:
    """Writes a model that was trained with LoRA as a small difference from its backbone.

    `load` restores it like any other model, if it finds the same backbone. Weights are stored in fp16, which changes
    scores in the third or fourth digit.

    Args:
        model: a `LongDocReranker`.
        folder: made if need be.
        rank: the highest rank of a difference: the sum of the ranks of the trainings it went through.

    Raises:
        ValueError: if the difference has a higher rank, as after a training without LoRA.

    Example:
        `ld.save_adapter(maxp, "my-maxp")`, then `ld.MaxP.load("my-maxp")`.
    """
    weights = model._load_weights()
    fresh = type(model)(**{**model._parameters(), "device": "cpu"})
    base = _pretrained_state(fresh._load_weights().scorer)
    state = {name: value.detach().cpu() for name, value in weights.scorer.state_dict().items()}
    stored = compress(state, base, rank=rank)
    save_reranker(model, weights, folder, adapter=Adapter(stored, fingerprint(base)))


def load_reranker(
    cls: type, base: type, name: str | Path, *, revision: str | None = None, parameters: dict[str, Any]
) -> Any:
    """Restores a reranker from its checkpoint.

    Args:
        cls: the class that is asked for.
        base: the class of all rerankers, which may ask for any.
        name: a folder, a model on the Hugging Face hub, or one of this package.
        revision: branch, tag or commit on the hub.
        parameters: constructor arguments to change.

    Raises:
        ValueError: if that is not a model saved by this package, or one of another class.
    """
    folder, config = read_config(name, revision=revision)
    known = {c.__name__: c for c in _all_classes(base)}
    saved: Any = known.get(config["class"])
    if saved is None:
        raise ValueError(f"{str(name)!r} holds a {config['class']!r}; known are {', '.join(sorted(known))}")
    if saved is not cls and saved not in _accepted(cls, base):
        raise ValueError(f"{str(name)!r} holds a {saved.__name__}, not a {cls.__name__}: use {saved.__name__}.load")
    arguments = dict(config["parameters"])
    if "windows" in arguments:
        arguments["windows"] = windows_from_config(arguments["windows"])
    preselect = arguments.pop("preselect", None)
    if preselect is not None and "preselect" not in parameters:
        arguments["preselect"] = preselection_from_config(preselect, folder)
    for name in ("text_field", "answers"):
        if isinstance(arguments.get(name), list):
            arguments[name] = tuple(arguments[name])
    model = saved(**{**arguments, **parameters})
    # What the weights were made for, whatever `parameters` ask for: the first transform compares the two.
    original = saved(**{**arguments, "trust_remote_code": model.trust_remote_code})
    made_for = original._made_for()
    head = (config["head"]["name"], config["head"]["options"])
    if "adapter" in config:
        scorer, backbone = _with_adapter(original, folder, config["adapter"]["base"])
    else:
        scorer, backbone = load_pretrained(folder, config, saved._scorer_class)
    training = folder / "training.json"
    past = json.loads(training.read_text(encoding="utf-8")) if training.is_file() else {"args": None, "history": []}
    model._loaded = Weights(
        scorer,
        backbone,
        made_for,
        head,
        ready=config["head"]["ready"],
        trained=True,
        history=past["history"],
        recipe=past["args"],
    )
    return model


def _with_adapter(model: Any, folder: Path, base: str) -> tuple[LongDocScorer, Backbone]:
    """The model on its backbone, changed by what `save_adapter` wrote."""
    weights = model._load_weights()
    before = _pretrained_state(weights.scorer)
    if fingerprint(before) != base:
        raise ValueError(
            f"the adapter in {str(folder)!r} was made for other weights than those of the backbone {model.backbone!r}"
        )
    try:
        weights.scorer.load_state_dict(restore(load_file(folder / ADAPTER_FILE), before), strict=True)
    except Exception as error:
        raise ValueError(f"the adapter in {str(folder)!r} does not fit config.json: {error}") from error
    return weights.scorer, weights.backbone


def _pretrained_state(scorer: LongDocScorer) -> dict[str, torch.Tensor]:
    """The weights to which LoRA adds: the backbone's, and those of a pre-trained aggregator."""
    head: Any = scorer.head
    prefixes = ("encoder.backbone.", *(f"head.{name}." for name in head.pretrained()))
    return {name: value.cpu() for name, value in scorer.state_dict().items() if name.startswith(prefixes)}


def _accepted(cls: type, base: type) -> list[type]:
    """Subclasses that a checkpoint for `cls` may name: all of the base class, else users' own.

    That SumP is written as a MaxP with another head does not make its checkpoints MaxPs.
    """
    ours = "pyterrier_longdoc."
    return [c for c in _all_classes(cls) if cls is base or not c.__module__.startswith(ours)]


def _all_classes(cls: Any) -> list[type]:
    return [c for child in cls.__subclasses__() for c in (child, *_all_classes(child))]


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
            CPU, so that all CPUs give the same scores, and for bfloat16 on a GPU that has it natively; `"fastest"` for
            what the device is best at: bfloat16 also on CPUs with AMX or AVX512_BF16. `coverage.dtype` tells which it
            was; in bfloat16 scores differ in the third digit.
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

    backbone: str | Path = argument(DEFAULT_BACKBONE, role="checkpoint")
    _: KW_ONLY
    windows: Windows | None = argument(None, role="windows")
    max_windows: int | None = argument(None, role="windows")
    selection: str = argument("first", role="windows")
    preselect: Preselection | None = argument(None, role="windows")
    max_doc_len: int | None = argument(None, role="windows")
    max_query_len: int = argument(32, role="input")
    pad_query: bool = argument(False, role="input")
    text_field: TextField = argument("text", role="input")
    text_loader: Any = argument(None, role="call")
    batch_size: int = argument(64, role="computing")
    max_batch_tokens: int | None = argument(None, role="computing")
    device: str | Sequence[str] | None = argument(None, role="computing")
    dtype: str | None = argument(None, role="computing")
    backend: str = argument("torch", role="computing")
    explain: bool = argument(False, role="call")
    score_cache: str | Path | None = argument(None, role="call")
    training: TrainingArgs | None = argument(None, role="call")
    trust_remote_code: bool = argument(False, role="weights")
    verbose: bool = argument(False, role="call")
    seed: int = argument(42, role="weights")

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
        args = self.recipe
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

    @property
    def recipe(self) -> TrainingArgs:
        """What `fit` follows: `training`, or the model's default."""
        return self.training or self._default_training()

    @property
    def is_trained(self) -> bool:
        """Whether `fit`, `load` or `start_from` gave the weights; others start from the checkpoint."""
        return self._loaded is not None and self._loaded.trained

    def load_weights(self) -> Weights:
        """As `load_scorer`, with the history and what is known of the weights."""
        self._check()
        return self._load_weights()

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
