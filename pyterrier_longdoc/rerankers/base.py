"""What all rerankers of this package share: from a frame to scores, `fit`, `save` and `load`."""

# Without `from __future__ import annotations`: what the fields here are must be known in the modules of subclasses too.
import copy
import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, asdict, dataclass, fields, replace
from functools import partial
from hashlib import blake2b
from numbers import Integral
from pathlib import Path
from typing import Any, ClassVar, cast

import numpy as np
import pandas as pd
import pyterrier as pt

from ..common.arguments import (
    OF_THE_MODEL,
    argument,
    arguments_of,
    changed_names,
    check_checkpoint,
    check_choice,
    check_given,
    check_positive,
    check_roles,
    plain,
)
from ..common.citations import papers_of
from ..common.coverage import Coverage, Explanation, Scored
from ..common.documents import Text, is_blank
from ..common.frames import (
    TextField,
    TruncationWarning,
    check_no_bytes,
    documents_of,
    field_names,
    strings,
    validated,
    window_fields,
    with_scores,
)
from ..common.notices import Told, added_up, count_empty, is_news, warn, warn_of_cuts, warn_of_empty
from ..common.presentation import HIDDEN, Presented, changed_arguments
from ..common.progress import work_bar
from ..common.registry import VOUCH, look_up, own_code, own_code_in
from ..modelling.backbones.architectures import BackboneOptions
from ..modelling.backbones.load import DEFAULT_BACKBONE, Backbone, load_backbone
from ..modelling.backbones.templates import Template, resolve_template
from ..modelling.checkpoint import (
    Adapter,
    HeadSpec,
    Source,
    Weights,
    load_adapter,
    load_weights,
    note_training,
    read_config,
    save_weights,
)
from ..modelling.devices import FASTEST, check_device, check_dtype, dtype_name, resolve_device, resolve_dtype
from ..modelling.encoder import WindowEncoder
from ..modelling.fingerprint import fingerprint
from ..modelling.foreign import ForeignScorer, foreign_weights
from ..modelling.heads import registered_heads
from ..modelling.layout import InputLayout, resolve_layout
from ..modelling.preselection import FOLDER as PRESELECT_FOLDER
from ..modelling.preselection import Preselection, check_preselection, preselection_from_config
from ..modelling.runtimes import check_last_layer, check_runtime, default_device
from ..modelling.scorer import LongDocScorer
from ..modelling.settings import Settings
from ..modelling.texts import written
from ..modelling.windows import Windows, windows_from_config, windows_to_config
from ..training import (
    ContinuedTrainingWarning,
    LeftOutWarning,
    Texts,
    TrainedOn,
    TrainingArgs,
    add_judged,
    evaluate,
    history_frame,
    make_groups,
    train,
    training_settings,
)
from ..training.queries import ValidatedOn, check_validation, trained_on
from ..training.recipe import papers_of_recipe
from ..training.resume import is_first_process, is_resumed
from .score_cache import ScoreCache, score_with_cache
from .summary import Summary, summarise

POOLINGS = ("cls", "mean", "last")


class UntrainedWarning(UserWarning):
    """A model is used that has random weights where a trained one should be."""


class PrecisionWarning(UserWarning):
    """A model scores in bfloat16 because the device is best at it."""


@dataclass(eq=False, repr=False)
class WindowReranker(Presented, pt.Transformer):
    """Base of the rerankers that score a document by its windows: cross-encoders and bi-encoders.

    Reads a frame with `qid, query, docno` and the text column(s) and returns the same rows, columns and index with
    new `score` (float64) and `rank`. Weights are loaded at the first `transform` of a non-empty frame. Changing an
    attribute takes effect at the next `transform`. Tokens of texts are remembered from one `transform` to the next, in
    up to 64 MB.

    Args:
        windows: how documents are cut, e.g. `SlidingWords(150, 100)`; replaces `window_size` and `stride`.
        max_windows: keep at most this many windows of a document; None keeps all.
        selection: which of them: `"first"` or `"first_last_random"` (PARADE's choice).
        max_doc_len: read only so many tokens of a document; None reads all. Boytsov et al. 2025 read 1431.
        max_query_len: read only so many tokens of a query; 32 in Boytsov et al. 2025. None reads all that fits: windows
            of a given size have it, and queries have the rest of the backbone's longest input; windows of no given size
            (`window_size=None`, `LongP`) leave a quarter of it to queries. Not for layouts other than `"pair"`.
        text_field: the column with the text, or a tuple of columns that are joined by a space.
        repeat: those of these columns that are read with each window of the others, the title for instance:
            `text_field=("title", "body"), repeat="title"`. Each is a line before the window, next to `window_size` and
            `max_doc_len`, which are of the others alone. None: all columns are one text, and a window in its middle is
            read without the title.
        repeat_tokens: most tokens of what is read with each window, which is cut at its end; the room is kept in all
            windows, so that no document's windows depend on its title.
        text_loader: supplies the text where the column is absent: a text loader, or a dataset or index with one.
        batch_size: most windows in one pass through the backbone.
        max_batch_tokens: most tokens in one pass; None for 16,384 on a GPU and 2,048 on a CPU. Where memory runs out,
            passes are made smaller by themselves.
        device: `"cuda"`, `"cuda:1"`, `"cpu"`, ...; None for a GPU if there is one.
        dtype: precision of the backbone when it scores: `"float32"`, `"bfloat16"` or `"float16"`; None for float32 on a
            CPU, so that all CPUs give the same scores, and for bfloat16 on a GPU that has it natively; `"fastest"` for
            what the device is best at: bfloat16 also on CPUs with AMX or AVX512_BF16. `coverage.dtype` tells which it
            was; in bfloat16 scores differ in the third digit.
        explain: add columns: `window_scores` (the score each window would have alone), `window_weights` (attention
            over windows, None for models without), `window_spans` (characters of each window in the text; of several
            text columns, in the joined text, in which those of `repeat` have no part), `best_start` and `best_end`
            (characters of the window with the highest score), `query_terms` (what each query token adds to the score,
            None for models that cannot tell).
        trust_remote_code: run modelling code that the backbone's checkpoint brings along.
        verbose: show progress bars; `fit` also tells what it trains on and where it goes on.
        seed: of weights that start at random, of the choice of windows and, if the recipe names none, of the training.

    Attributes:
        coverage: how much of the text the last `transform` or `fit` read, with which precision, and how much of what
            was computed was padding; None before.
    """

    backbone: str | Path | ForeignScorer = argument(DEFAULT_BACKBONE, role="checkpoint")
    _: KW_ONLY
    windows: Windows | None = argument(None, role="windows")
    max_windows: int | None = argument(None, role="windows")
    selection: str = argument("first", role="windows")
    max_doc_len: int | None = argument(None, role="windows")
    max_query_len: int | None = argument(32, role="input")
    text_field: TextField = argument("text", role="input")
    repeat: TextField | None = argument(None, role="input")
    repeat_tokens: int = argument(32, role="input")
    text_loader: Any = argument(None, role="call")
    batch_size: int = argument(64, role="computing")
    max_batch_tokens: int | None = argument(None, role="computing")
    device: str | None = argument(None, role="computing")
    dtype: str | None = argument(None, role="computing")
    explain: bool = argument(False, role="call")
    trust_remote_code: bool = argument(False, role="weights")
    verbose: bool = argument(False, role="call")
    seed: int = argument(42, role="weights")

    def __post_init__(self) -> None:
        check_roles(self)
        self.coverage: Coverage | None = None
        self.warned: Told = set()
        self._current: tuple[list[Any], LongDocScorer] | None = None  # arguments, and the model set up by them
        self.check()

    def __repr__(self) -> str:
        shown = changed_arguments(self, ("backbone", *HIDDEN))
        backbone = str(self.backbone) if isinstance(self.backbone, Path) else self.backbone
        return f"{type(self).__name__}({', '.join([repr(backbone), *shown])})"

    def __setattr__(self, name: str, value: Any) -> None:
        # Sizes that come from an array: they are written as JSON when the model is saved.
        super().__setattr__(name, plain(value))

    def check(self) -> None:
        """Raises ValueError for arguments that can never work, without loading anything."""
        self.check_backbone()
        window_fields(self.text_field, self.repeat)
        self._check_repeat()
        check_dtype(self.dtype)
        check_device(self.device)
        check_given(batch_size=self.batch_size)
        sizes = ("window_size", "stride", "max_windows", "max_doc_len", "max_query_len", "max_batch_tokens")
        check_positive(**{name: value for name, value in arguments_of(self).items() if name in sizes})
        if isinstance(self.seed, bool) or not isinstance(self.seed, Integral):
            raise ValueError(f"seed={self.seed!r} must be a whole number")
        if not isinstance(self.windows, Windows | None):
            raise ValueError(f"windows={self.windows!r} must be windows, e.g. SlidingWindows(150, 75)")
        loader = self.text_loader
        if not (loader is None or isinstance(loader, pt.Transformer) or hasattr(loader, "text_loader")):
            raise ValueError(
                f"text_loader={loader!r} must be a transformer that adds the text, or have a method text_loader "
                f"(as datasets and indexes do)"
            )

    def _check_repeat(self) -> None:
        check_given(repeat_tokens=self.repeat_tokens)
        if not self.repeats and changed_names(self, ("repeat_tokens",)):
            raise ValueError(
                f"repeat_tokens={self.repeat_tokens} would have no effect: nothing is read with each window without "
                f"repeat"
            )

    @property
    def repeats(self) -> bool:
        """Whether anything is read with each window besides its own tokens."""
        return self.repeat is not None

    def cited(self) -> list[str]:
        """The keys of the papers behind this model, with those of what selects its windows."""
        return [*super().cited(), *papers_of(getattr(self, "preselect", None))]

    def check_backbone(self) -> None:
        """Raises ValueError for what cannot be the name of a checkpoint."""
        check_checkpoint(backbone=self.backbone)

    @property
    def is_foreign(self) -> bool:
        """Whether somebody else scores the windows: a served model, a function, a transformer."""
        return isinstance(self.backbone, ForeignScorer)

    def make_windows(self) -> Windows:
        """How documents are cut: `windows`, or what the sizes say.

        Raises:
            ValueError: if sizes are given next to `windows`, where they would have no effect.
        """
        if self.windows is None:
            windows = self.default_windows()
            return replace(windows, max_windows=self.max_windows, selection=self.selection, seed=self.seed)
        both = changed_names(self, ("window_size", "stride", "max_windows", "selection"))
        if both:
            raise ValueError(
                f"{' and '.join(both)} would have no effect next to windows={self.windows!r}: set them in windows, "
                f"or leave windows out"
            )
        return self.windows

    def default_windows(self) -> Windows:
        """Windows where `windows` is not given."""
        raise NotImplementedError(
            f"{type(self).__name__} names no windows: use FirstP, MaxP, PARADE, ..., or define its default_windows"
        )

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
        validated(inp, self.text_field, self.text_loader, self)
        if not len(inp):
            return with_scores(inp, [], **(_columns([]) if self.explain else {}))
        queries, texts = strings(inp["query"], "query"), self.documents(inp)
        with work_bar(type(self).__name__, " tokens", shown=self.verbose) as bar:
            scored = self.score_pairs(queries, texts, bar)
        self.coverage = scored.coverage
        if self.coverage.dtype == "bfloat16" and self.dtype in (None, FASTEST):
            message = (
                f"{type(self).__name__} computes in bfloat16, at which this device is best: scores differ "
                f"from those in float32 in the third digit. dtype='float32' gives these, dtype='bfloat16' is silent."
            )
            self._warn_once(message, PrecisionWarning)
        self.warn_of_losses(self.coverage)
        warn_of_empty(self, self.coverage, inp, map(is_blank, texts))
        return with_scores(inp, scored.scores, **(_columns(scored.explanations) if self.explain else {}))

    def documents(self, frame: pd.DataFrame) -> Sequence[Text]:
        """The text of each row, with what is read with each of its windows."""
        return documents_of(frame, self.text_field, self.repeat, self.text_loader)

    def warn_of_losses(self, coverage: Coverage, task: str = "") -> None:
        """Warns of text that was not read, though nobody asked for a choice of windows; once for each cause.

        Args:
            coverage: of a run.
            task: what the model was used for, where that is not plain.
        """
        preselect, layout = getattr(self, "preselect", None), getattr(self, "layout", "pair")
        asked = self.max_windows if self.windows is None else self.windows.max_windows
        if asked is None and preselect is None:  # the class itself keeps one window, as FirstP does
            coverage = replace(coverage, tokens_passed_over=0)
        causes = [f"max_doc_len={self.max_doc_len}"] if coverage.tokens_beyond else []
        if coverage.tokens_lost > coverage.tokens_beyond:
            causes.append(self._cut_by())
        of_documents, of_queries = " and ".join(causes), self._queries_cut_by() if coverage.queries_cut else ""
        if resolve_layout(layout).shared_budget:
            of_documents = of_queries = f"layout={layout!r}, with which query and text share one input"
        of_repeats = f"repeat_tokens={self.repeat_tokens}"
        losses = coverage.losses(of_documents, of_queries, of_repeats)
        if losses:
            cut_by = [of_documents] * bool(coverage.tokens_lost) + [of_queries] * bool(coverage.queries_cut)
            cut_by += [of_repeats] * bool(coverage.repeats_cut)
            cut_by += ["the server"] * bool(coverage.windows_cut)
            warn_of_cuts(self, self.warned, cut_by, f"{task} did not read {losses}")

    def summary(self, candidates: pd.DataFrame) -> Summary:
        """What `transform` of the same frame would read, what it would not read and why, and about how long it takes.

        Texts are tokenised and cut into windows as in the run, so that the numbers are those of `coverage` afterwards;
        that of a large frame takes a while, which `verbose` shows. A model that selects windows does so for all of
        them. The time is estimated from some documents that are scored, for about two seconds, with all that is
        remembered in memory left aside; scores that are in the `score_cache` do not count. Weights are loaded if need
        be. Apart from that nothing changes: neither `coverage` nor the score cache, and no warning is used up.

        Args:
            candidates: as for `transform`.

        Raises:
            pt.validate.InputValidationError: if a column is missing.
            ValueError: for arguments that do not fit together or the backbone.
        """
        validated(candidates, self.text_field, self.text_loader, self)
        if not len(candidates):
            return summarise(self, [], [])
        queries, texts = strings(candidates["query"], "query"), self.documents(candidates)
        with work_bar(f"{type(self).__name__} summary", " characters", shown=self.verbose) as bar:
            found = summarise(self, queries, texts, bar)
        count_empty(found.coverage, candidates, map(is_blank, texts))
        return found

    def unread(self, coverage: Coverage) -> list[tuple[str, int, str]]:
        """What of a run is not read: so many tokens of `"queries"`, `"documents"` or `"repeated"`, and the argument."""
        preselect, layout = getattr(self, "preselect", None), getattr(self, "layout", "pair")
        of_queries = coverage.query_tokens - coverage.query_tokens_read
        if resolve_layout(layout).shared_budget:
            by, of_documents = f"layout={layout!r}", coverage.tokens - coverage.tokens_read
            rows = [("queries", of_queries, by), ("documents", of_documents, by)]
            return [row for row in rows if row[1]]
        cut = self._cut_by() if coverage.tokens_lost + coverage.tokens_passed_over else ""
        asked = [] if self.max_windows is None else [f"max_windows={self.max_windows}"]
        if self.windows is not None and self.windows.max_windows is not None:
            asked = [cut]
        asked += [] if preselect is None else [f"preselect={preselect!r}"]
        tokens = {f"max_doc_len={self.max_doc_len}": coverage.tokens_beyond}
        for by, more in (
            (" and ".join(asked) or cut, coverage.tokens_passed_over),
            (cut, coverage.tokens_lost - coverage.tokens_beyond),
        ):
            tokens[by] = tokens.get(by, 0) + more
        rows = [("queries", of_queries, self._queries_cut_by() if of_queries else "")]
        rows += [("documents", lost, by) for by, lost in tokens.items()]
        repeated = coverage.repeated_tokens - coverage.repeated_tokens_read
        rows.append(("repeated", repeated, f"repeat_tokens={self.repeat_tokens}"))
        return [row for row in rows if row[1]]

    def _cut_by(self) -> str:
        """What keeps the windows from covering all of a text."""
        if self.windows is not None:
            return f"windows={self.windows!r}"
        if hasattr(self, "window_size"):
            return f"window_size={self.load_scorer().settings.windows.largest}"
        return "the longest input of the backbone"

    def _queries_cut_by(self) -> str:
        """What keeps a query from being read whole."""
        if self.max_query_len is None:
            return f"the longest input of the backbone, which takes {self.load_scorer().settings.max_query_len}"
        return f"max_query_len={self.max_query_len}"

    def score_pairs(self, queries: Sequence[str], texts: Sequence[Text], bar: Any = None) -> Scored:
        """Scores R pairs of query and text.

        Args:
            queries: R queries.
            texts: R texts.
            bar: a tqdm bar for the work, in tokens.
        """
        return self.load_scorer().score(queries, texts, explain=self.explain, bar=bar)

    def load_scorer(self) -> LongDocScorer:
        """The model in memory, loaded if need be and set up by the current arguments.

        Raises:
            ValueError: if arguments do not fit the backbone, or ask for other weights than the trained ones.
        """
        given = [getattr(self, f.name) for f in fields(self)]
        # A copy of lists and arrays, which may be changed in place.
        arguments = [tuple(value) if isinstance(value, list | np.ndarray) else value for value in given]
        if self._current is not None and arguments == self._current[0]:
            scorer = self._current[1]
            scorer.back_to_its_device()
            return scorer
        self.check()
        scorer = self.set_up()
        self._current = arguments, scorer
        return scorer

    def set_up(self) -> LongDocScorer:
        """Loads the model if need be and sets it up by the current arguments; see `load_scorer`."""
        raise NotImplementedError

    def settings(self) -> Settings:
        """What is read and how it is computed, by the current arguments."""
        names = {f.name for f in fields(Settings)} - {"windows", "device", "dtype"}
        given = {name: value for name, value in arguments_of(self).items() if name in names}
        given["repeat_tokens"] = self.repeat_tokens if self.repeats else 0
        if "layout" in given:
            given["layout"] = resolve_layout(given["layout"])
        if self.is_foreign:  # nothing is computed here
            return Settings(self.make_windows(), **given)
        device = resolve_device(self.device or default_device(given.get("runtime", "torch")))
        return Settings(self.make_windows(), device=device, dtype=resolve_dtype(self.dtype, device), **given)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_current": None}

    def to_config(self) -> dict[str, Any]:
        """The arguments that make the model what it is, JSON-able; read back by `from_config`."""
        parameters = _without_paths(arguments_of(self, *OF_THE_MODEL))
        del parameters["trust_remote_code"]  # whoever loads a model decides that for themselves
        if self.windows is not None:
            parameters["windows"] = windows_to_config(self.windows)
        for name in ("layout", "template"):
            if isinstance(parameters.get(name), InputLayout | Template):
                parameters[name] = asdict(parameters[name])
        return parameters

    def describe(self) -> dict[str, Any]:
        """Who this transformer is: all that its scores depend on besides query and text, JSON-able.

        Weights count by their contents, arguments as they are now, and with them the device's kind and precision.
        Not called `identity`, because every PyTerrier transformer has a static method of that name.

        Raises:
            ValueError: if the tokenizer has a step in Python, of which it cannot be told whether it stays the same.
        """
        scorer = self.load_scorer()
        tokenizer = written(scorer.tokenizer.backend_tokenizer)
        if tokenizer is None:
            raise ValueError(
                "scores of this model cannot be kept, because a step of its tokenizer is written in Python, of which "
                "it cannot be told whether it stays the same: leave score_cache out"
            )
        settings, arguments = scorer.settings, arguments_of(self, "weights", "head", "input")
        return {
            "class": type(self).__name__,
            "arguments": {name: repr(value) for name, value in _without_paths(arguments).items()},
            "windows": windows_to_config(settings.windows),
            "max_doc_len": settings.max_doc_len,
            "max_query_len": settings.max_query_len,
            "preselect": None if settings.preselect is None else settings.preselect.identity(),
            "layout": repr(scorer.layout),
            "weights": self._weights_fingerprint(),
            "tokenizer": blake2b(tokenizer).hexdigest(),
            "computed": [settings.device.type, dtype_name(settings.dtype), settings.runtime],
            **own_code(self, *arguments.values(), settings.windows, settings.preselect),
        }

    def _weights_fingerprint(self) -> Any:
        return fingerprint(self.load_scorer().state_dict())

    def _warn_once(self, message: str, category: type[Warning]) -> None:
        if is_news(self.warned, category, type(self).__name__):
            warn(message, category)


def from_config(parameters: dict[str, Any]) -> dict[str, Any]:
    """The constructor arguments that `to_config` described."""
    arguments: dict[str, Any] = {}
    for name, value in parameters.items():
        arguments[name] = tuple(value) if isinstance(value, list) else value  # JSON has no tuples
    if arguments.get("windows") is not None:
        arguments["windows"] = windows_from_config(arguments["windows"])
    if isinstance(arguments.get("layout"), dict):
        arguments["layout"] = InputLayout(**arguments["layout"])
    if isinstance(arguments.get("template"), dict):
        arguments["template"] = Template(**arguments["template"])
    arguments.pop("trust_remote_code", None)  # no folder may ask for it
    return arguments


def _without_paths(arguments: dict[str, Any]) -> dict[str, Any]:
    return {name: str(value) if isinstance(value, Path) else value for name, value in arguments.items()}


def _columns(explanations: list[Explanation]) -> dict[str, list[Any] | np.ndarray]:
    best = np.array([explanation.spans[explanation.best] for explanation in explanations], "int64").reshape(-1, 2)
    return {
        "window_scores": [explanation.scores for explanation in explanations],
        "window_weights": [explanation.weights for explanation in explanations],
        "window_spans": [explanation.spans for explanation in explanations],
        "best_start": best[:, 0],
        "best_end": best[:, 1],
        "query_terms": [explanation.query_terms for explanation in explanations],
    }


@dataclass(eq=False, repr=False)
class LongDocReranker(WindowReranker, pt.Estimator):
    """Base of the cross-encoding rerankers; use `FirstP`, `MaxP`, `PARADE` and so on.

    Scores are logits. The weights stay when an attribute changes that does not decide about them.

    Args:
        backbone: a Hugging Face model or a folder: a cross-encoder (BERT, ELECTRA, RoBERTa, XLM-R, CamemBERT,
            DeBERTa, DistilBERT, ModernBERT), whose layers up to the last one are used, or a plain encoder, which
            needs `fit` first. Or a scorer that has no weights here, for models that aggregate scores: `ScoreServer`,
            `PairScorer`. Default: a public MS MARCO passage cross-encoder.
        pooling: what of the last layer's states is a window's vector: `"cls"` (the first token's), `"mean"` (of all
            tokens, query and special ones included) or `"last"` (the last token's), as it is: a cross-encoder's
            classification head is left out, so that the model must be trained. None: what the checkpoint was trained
            with, head included; else `"mean"` for JINA and language models as in Boytsov et al. 2025, and `"cls"`.
        preselect: reads only the windows that a cheaper method finds best for the query, e.g. `BM25Windows(3)`; of
            `FirstK`, `BM25Windows`, `EmbeddingWindows`, `CrossEncoderWindows` and `KeyBlocks`. After `max_windows`, in
            `fit` too. None reads all.
        template: the words around a query and a window, for language models: the name of one (`"qwen3-reranker"`,
            `"mxbai-rerank-v2"`, `"bge-reranker-v2-gemma"`, `"monot5"`; `"yes-no"` asks a chat model, `"plain"` is for a
            model that is to be trained), a `Template`, or a text with `{query}` and `{text}`. None: what the
            checkpoint's own files say, as those of sentence-transformers do; a language model of which that is not
            known is refused, and another one that was trained for nothing yet reads `"plain"`.
        layout: how a query and a window become one input. `"pair"` is the tokenizer's own layout for two texts, with
            which cross-encoders were trained, `"padded"` the fixed layout of Boytsov et al. 2025; an `InputLayout`, or
            the name of another one that a preset uses.
        runtime: what computes the backbone outside `fit`: `"torch"`, `"compile"` (`torch.compile`), or on a CPU
            `"openvino"`. Others than torch are for BERT, ELECTRA, RoBERTa, XLM-R, DistilBERT and ModernBERT; the first
            scores after a change of weights wait for the compilation or export.
        score_cache: a file in which scores are kept: a second run of the same model over the same texts reads them,
            and an interrupted one goes on: what was scored is written every few seconds, or after each document that
            takes longer. Keyed by weights, settings, query and text; not used with `explain`, nor to validate in `fit`,
            nor by models with code of one's own whose class has no `describe` of its own.
        training: the recipe of `fit`; None for `TrainingArgs()`.

    All other arguments: see :class:`~pyterrier_longdoc.rerankers.base.WindowReranker`.

    Attributes:
        trained_on: which queries the last `fit` learned from, and why not from the others; None before.
    """

    _: KW_ONLY
    pooling: str | None = argument(None, role="weights")
    template: str | Template | None = argument(None, role="weights")
    preselect: Preselection | None = argument(None, role="windows")
    layout: str | InputLayout = argument("pair", role="input")
    runtime: str = argument("torch", role="computing")
    score_cache: str | Path | None = argument(None, role="call")
    training: TrainingArgs | None = argument(None, role="call")

    head_name: ClassVar[str] = ""
    encoder_class: ClassVar[type[WindowEncoder]] = WindowEncoder

    def __post_init__(self) -> None:
        self._loaded: Weights | None = None  # PyTerrier takes an attribute _x for the value of an argument x
        self._caches = True
        self.trained_on: TrainedOn | None = None
        super().__post_init__()

    def __repr__(self) -> str:
        weights, shown = self._loaded, super().__repr__()
        if weights is None or not (weights.trained or weights.adopted):
            return shown
        if weights.source is None:
            return f"{shown[:-1]}, {'trained' if weights.trained else 'started'} {weights.digest()})"
        source, saved = weights.source
        given = {name: value for name, value in arguments_of(self).items() if name not in HIDDEN}
        changed = changed_names(self, given.keys() - saved.keys())
        changed += [name for name, value in saved.items() if repr(given[name]) != value]
        return f"{type(self).__name__}.load({', '.join([source, *(f'{name}={given[name]!r}' for name in changed)])})"

    # What a subclass says of itself.

    def head_spec(self) -> HeadSpec:
        """Name and options of the head."""
        if not self.head_name:
            raise NotImplementedError(
                f"{type(self).__name__} names no head: use FirstP, MaxP, PARADE, ..., or define its head_spec"
            )
        return self.head_name, {}

    def _load_backbone(self) -> Backbone:
        """The pre-trained part."""
        options = self._backbone_options()
        return load_backbone(str(self.backbone), trust_remote_code=self.trust_remote_code, options=options)

    def _backbone_options(self) -> BackboneOptions:
        """How the pre-trained part is used where it leaves a choice."""
        template = None if self.template is None else resolve_template(self.template)
        return BackboneOptions(pooling=self.pooling, template=template)

    def default_training(self) -> TrainingArgs:
        """The recipe where `training` is not given."""
        return TrainingArgs()

    def check_backbone(self) -> None:
        """See the base class; somebody else's scorer must suit the model's head, and arguments must have an effect."""
        backbone = self.backbone
        if not isinstance(backbone, ForeignScorer):
            if isinstance(backbone, pt.Transformer) or (callable(backbone) and not isinstance(backbone, type)):
                raise ValueError(f"backbone={backbone!r} scores by itself: give it as ld.PairScorer(...)")
            if str(backbone).startswith(("http://", "https://")):
                raise ValueError("backbone is an address: give a served model as ld.ScoreServer(url)")
            super().check_backbone()
            return
        head = registered_heads().get(self.head_spec()[0])
        if self.encoder_class is not WindowEncoder or not getattr(head, "from_scores", False):
            raise ValueError(
                f"{type(self).__name__} needs more of a window than a score, and {backbone!r} gives no more: use "
                f"FirstP, MaxP, SumP, AvgP, KMaxP, Birch or LongP (a head of your own says from_scores = True)"
            )
        own = arguments_of(self, "weights", "computing").keys() - {"batch_size", "seed"}
        without_effect = [*changed_names(self, own), *(["layout"] if resolve_layout(self.layout).is_for_pairs else [])]
        if without_effect:
            raise ValueError(
                f"{', '.join(sorted(without_effect))} would have no effect: {backbone!r} alone decides how a query and "
                f"a window are read and scored"
            )

    def check(self) -> None:
        """See the base class."""
        super().check()
        if self.pooling is not None:
            check_choice("pooling", self.pooling, POOLINGS)
        if not isinstance(self.training, TrainingArgs | None):
            raise ValueError(f"training={self.training!r} must be TrainingArgs(...), or None for the default recipe")
        if not isinstance(self.score_cache, str | Path | None) or self.score_cache == "":
            raise ValueError(f"score_cache={self.score_cache!r} must be the name of a file, or None")
        windows = self.make_windows()
        check_preselection(self.preselect, windows)
        resolve_layout(self.layout).check(windows, self.preselect, self.max_query_len, repeats=self.repeats)
        if self.template is not None:
            resolve_template(self.template)
            if resolve_layout(self.layout).is_for_pairs:
                raise ValueError(f"layout={self.layout!r} is for [CLS] query [SEP] text [SEP]; it has no template")
        check_runtime(self.runtime, self.device, self.dtype)
        if self.runtime != "torch":
            one_encoder = self.encoder_class is WindowEncoder
            check_last_layer(self.runtime, type(self).__name__, one_encoder, self.head_spec()[0])

    # The model in memory.

    def made_for(self) -> dict[str, Any]:
        """The arguments that decide about the weights besides the head's."""
        given = arguments_of(self, "checkpoint") | arguments_of(self, "weights")
        return _without_paths({name: value for name, value in given.items() if name not in self.head_spec()[1]})

    def load_weights(self) -> Weights:
        """As `load_scorer`, with where the weights came from."""
        self.load_scorer()
        return cast(Weights, self._loaded)

    def _weights_fingerprint(self) -> Any:
        if isinstance(self.backbone, ForeignScorer):
            return self.backbone.identity()
        return self.load_weights().fingerprint()

    def set_up(self) -> LongDocScorer:
        """See the base class."""
        made_for, head, settings = self.made_for(), self.head_spec(), self.settings()
        weights = self._loaded
        self._current = None  # what fails below may have changed the model already
        if weights is None or weights.made_for != made_for:
            if weights is not None and weights.trained:
                *names, last = made_for
                raise self._would_lose_training(f"{', '.join(names)} or {last}")
            weights = self._new_weights(made_for, head, settings)
        elif weights.head != head and not weights.exchange_head(head, self.seed):
            raise self._would_lose_training("the aggregation")
        weights.scorer.use(settings)
        self._loaded = weights
        return weights.scorer

    def _new_weights(self, made_for: dict[str, Any], head: HeadSpec, settings: Settings) -> Weights:
        if not isinstance(self.backbone, ForeignScorer):
            backbone, cls = self._load_backbone(), self.encoder_class
            return Weights.from_backbone(backbone, head, settings, made_for=made_for, seed=self.seed, encoder=cls)
        warning = self.backbone.warning()
        if warning is not None:
            self._warn_once(warning, TruncationWarning)
        return foreign_weights(self.backbone, head, settings, made_for=made_for, seed=self.seed)

    def _refuse_foreign(self, what: str) -> None:
        if self.is_foreign:
            raise TypeError(f"{self!r} cannot be {what}: its weights are not here, but with {self.backbone!r}")

    def _would_lose_training(self, what: str) -> ValueError:
        name = type(self).__name__
        return ValueError(
            f"this {name} holds trained weights, and a change of {what} would lose them: make a new {name}(...) instead"
        )

    def score_pairs(self, queries: Sequence[str], texts: Sequence[Text], bar: Any = None) -> Scored:
        """See the base class."""
        weights = self.load_weights()
        if not weights.ready:
            message = (
                f"{self!r} has randomly initialised layers: its scores mean nothing before fit (with a cross-encoder "
                f"as backbone and its own pooling, FirstP, MaxP, PARADE with avg, max or attn, CEDR with knrm and "
                f"others start trained)."
            )
            self._warn_once(message, UntrainedWarning)
        if self.score_cache is None or self.explain or not self._caches:
            return super().score_pairs(queries, texts, bar)
        identity = self.describe()
        own = own_code_in(identity)
        if own:
            message = (
                f"score_cache={str(self.score_cache)!r} is left alone: nobody can tell whether the code of "
                f"{', '.join(own)} is that of the scores in it. Leave score_cache out. {VOUCH}."
            )
            self._warn_once(message, UserWarning)
            return super().score_pairs(queries, texts, bar)
        return score_with_cache(ScoreCache(self.score_cache), weights.scorer, identity, queries, texts, bar=bar)

    # Training.

    def fit(
        self,
        topics_or_res_tr: pd.DataFrame,
        qrels_tr: pd.DataFrame,
        topics_or_res_va: pd.DataFrame | None = None,
        qrels_va: pd.DataFrame | None = None,
    ) -> "LongDocReranker":
        """Trains all weights end to end on the document score, with the recipe in `training`.

        Args:
            topics_or_res_tr: training candidates: `qid, query, docno`, the text column(s), and `score` or `rank`.
            qrels_tr: `qid, docno, label`; candidates without a label > 0 are negatives. With the recipe's
                `judged="all"` also judged documents that are no candidates are trained on; a query that has no
                candidate at all is not.
            topics_or_res_va: validation candidates; with them the weights with the best `metric` are kept.
            qrels_va: labels of the validation candidates.

        Returns:
            This transformer.

        Raises:
            ValueError: if no training query has a positive and a negative candidate, or in validation none a positive
                one (the message says why), a label or score is no number, the text of judged documents is missing and
                there is no `text_loader`, the `text_loader` fails for a document that is drawn, or the recipe does
                not fit the data or the checkpoint folder.
            FloatingPointError: if the loss is not finite.
            TypeError: for a `ScoreServer` or a `PairScorer`, whose weights are not here.
            OSError: if the state cannot be written to the checkpoint folder.
            ImportError: if the recipe needs accelerate or peft and they are missing.

        A model that is trained already, by `fit` or `load`, goes on from its weights and says so
        (`ContinuedTrainingWarning`), unless `start_from` gave them. Interrupted after the first step, the model keeps
        what it has learned: the best weights so far if some were validated, else those of the last step. Killed, it
        continues when the program is started again, if the recipe names a checkpoint folder; finished, when what ended
        it is raised: `max_steps`, `epochs` or `patience`.

        Where the text column is absent, `text_loader` is asked for the texts of each step's own examples.

        Afterwards `trained_on` tells which queries were trained on (a `LeftOutWarning` says if not all were), and
        `coverage` what was read of the texts that were drawn (after a kill: since then). With `verbose` each is a line,
        and the first no warning.
        """
        self._refuse_foreign("trained")
        args = self.recipe
        started = self._loaded is not None and self._loaded.adopted  # then the weights were asked for
        if self.is_trained and not started and not is_resumed(args):
            warn(
                f"this {type(self).__name__} is trained already: fit goes on from its weights; to train afresh, make a "
                f"new one",
                ContinuedTrainingWarning,
            )
        validate, validation = self._validation(topics_or_res_va, qrels_va, args.metric)
        validated(topics_or_res_tr, self.text_field, self.text_loader, self)
        run = self.training_candidates(topics_or_res_tr, qrels_tr)
        texts = self._training_texts(run)
        groups = make_groups(run, qrels_tr, args)
        added, labels = len(run) - len(topics_or_res_tr), [group.labels for group in groups]
        self.trained_on = trained_on(run, qrels_tr, labels, args, added=added, validation=validation)
        deeper = "; retrieve deeper, or take TrainingArgs(judged='all')" if self.trained_on.not_retrieved else ""
        said = f"{self.trained_on}{deeper}"
        if self.verbose:
            self._tell(said)
        # In folds and for seeds that are one system, as often as for one model.
        elif self.trained_on.used < self.trained_on.queries and is_news(set(), LeftOutWarning):
            warn(f"{type(self).__name__}: {said}", LeftOutWarning)
        given = Coverage()
        if not texts.loaded:
            warn_of_empty(self, given, *texts.without(field_names(self.text_field)), " in fit")
        weights = self.load_weights()
        with weights.scorer.counting(args.dtype) as coverage:
            try:
                train(
                    weights.scorer,
                    groups,
                    texts,
                    args,
                    validate=validate,
                    on_step=partial(weights.mark_trained, args.as_dict()),
                    history=weights.history,
                    settings=partial(training_settings, self, topics_or_res_va, qrels_va, texts=texts),
                    verbose=self.verbose,
                )
            finally:
                if texts.loaded:  # those that were drawn: nobody has seen the others
                    warn_of_empty(self, given, *texts.without([]), " in fit")
                self.coverage = coverage = Coverage.total([coverage, given])
        if coverage.documents:
            self._tell(f"trained on {coverage}")
        self.warn_of_losses(coverage, " in fit")
        return self

    def _training_texts(self, run: pd.DataFrame) -> Texts:
        """The texts of candidates; those that are in the frame are looked at now, not only when they are drawn."""
        fields = field_names(self.text_field)
        loaded = not set(fields) <= set(run.columns)
        for name in [] if loaded else fields:
            check_no_bytes(run[name], name)
        return Texts(run, self.documents, loaded)

    def _tell(self, line: str) -> None:
        if self.verbose and is_first_process():
            pt.tqdm.write(f"{type(self).__name__}: {line}")

    def training_candidates(self, results: pd.DataFrame, qrels: pd.DataFrame) -> pd.DataFrame:
        """The candidates that `fit` trains on: with the judged documents that were not retrieved if the recipe says so.

        Args:
            results: as `fit` takes them.
            qrels: as `fit` takes them.

        Raises:
            ValueError: if such documents' text is missing and there is no `text_loader`.
        """
        if self.recipe.judged == "retrieved":
            return results
        return add_judged(results, qrels, text_field=self.text_field, text_loader=self.text_loader)

    def _validation(
        self, results: pd.DataFrame | None, qrels: pd.DataFrame | None, metric: str
    ) -> tuple[Callable[[], float] | None, ValidatedOn | None]:
        """What tells the figure of merit, and on how many queries.

        The data is looked at now, not only when the first epoch is over.
        """
        if results is None and qrels is None:
            return None, None
        if results is None or qrels is None:
            raise ValueError("validation needs both candidates and qrels, or neither")
        validated(results, self.text_field, self.text_loader, self)
        queries = check_validation(results, qrels)

        def validate() -> float:
            # The cache would fill with scores of weights that no later run has.
            self._caches = False
            try:
                with added_up():  # rows without text are told of once in a training
                    return evaluate(self.transform(results), qrels, metric)
            finally:
                self._caches = True

        return validate, queries

    def start_from(self, other: WindowReranker) -> "LongDocReranker":
        """Takes over another model's weights, its head's only if that is of the same kind; returns this transformer.

        So CEDR is trained after the plain ranker, and a model for a small collection after one for a large collection.

        Args:
            other: a model with the same kind of backbone. Of a `BiEncoder` the backbone's weights are taken, on which
                the model must be trained.

        Raises:
            ValueError: if that is no model of this package, or the backbones or vocabularies are not of the same kind.
        """
        if not isinstance(other, WindowReranker):
            raise ValueError(
                f"start_from needs a reranker of this package in memory, not {other!r}; LongDocReranker.load(...) "
                f"restores a saved one"
            )
        for model in (self, other):
            if isinstance(model, LongDocReranker):
                model._refuse_foreign("started from another model, nor another one from it")
        weights, its_scorer = self.load_weights(), other.load_scorer()
        if weights.scorer.tokenizer.get_vocab() != its_scorer.tokenizer.get_vocab():
            raise ValueError(f"{other!r} and {self!r} have tokenizers with different vocabularies")
        if isinstance(other, LongDocReranker):
            difference = weights.adopt(other.load_weights())
        else:
            difference = weights.adopt_backbone(its_scorer.encoder)
        if difference is not None:
            raise ValueError(
                f"{self!r} and {other!r} have encoders of different kinds: give both the same backbone and pooling "
                f"({difference})"
            )
        return self

    def cited(self) -> list[str]:
        """The keys of the papers behind this model, with those of the last training, where weights are in memory."""
        trained = [] if self._loaded is None else papers_of_recipe(self._loaded.recipe)
        return [*super().cited(), *trained]

    @property
    def history(self) -> pd.DataFrame:
        """One row for each epoch and each validation so far; `training.plot_history` draws it.

        Columns: `epoch`, `step`, `loss` (mean since the last row), `learning_rate`, `documents_per_second` and, with
        validation data, `validation`.
        """
        return history_frame([] if self._loaded is None else self._loaded.history)

    @property
    def recipe(self) -> TrainingArgs:
        """The recipe that `fit` follows: `training`, or the model's default; with the model's seed if it has none."""
        recipe = self.training or self.default_training()
        return recipe if recipe.seed is not None else replace(recipe, seed=int(self.seed))

    @property
    def is_loaded(self) -> bool:
        """Whether the weights that the arguments ask for are in memory."""
        return self._loaded is not None and self._loaded.made_for == self.made_for()

    @property
    def is_trained(self) -> bool:
        """Whether `fit` or `load` gave the weights."""
        return self._loaded is not None and self._loaded.trained

    # Copies: in memory, on disk, on the hub.

    def apply_attributes(self, **attributes: Any) -> "LongDocReranker":
        """A copy with other constructor arguments, trained weights included."""
        clone = type(self)(**{**arguments_of(self), **attributes})
        clone._loaded = copy.deepcopy(self._loaded)
        return clone

    def __getstate__(self) -> dict[str, Any]:
        state = super().__getstate__()
        if self._loaded is not None and self._loaded.scorer.device.type != "cpu":
            state["_loaded"] = copy.deepcopy(self._loaded)
            state["_loaded"].scorer.cpu()
        return state

    def save(self, folder: str | Path) -> None:
        """Writes the model to a folder: config.json, model.safetensors, tokenizer, model card, training.json.

        Args:
            folder: made if need be; `load` restores the model from it.

        Raises:
            ValueError: for a backbone with remote code, whose code would be missing from the folder.
        """
        self._save(Path(folder))
        self._note_source(str(folder))

    def _save(self, folder: Path) -> None:
        self._refuse_foreign("saved")
        if self.trust_remote_code:
            raise ValueError("a model whose backbone runs remote code cannot be saved: its code is not ours to store")
        self._write(folder)

    def _note_source(self, name: str, revision: str | None = None) -> None:
        """Remembers under which name the present weights can be loaded, and what arguments come with them."""
        weights = cast(Weights, self._loaded)
        if weights.trained:
            saved = {name: repr(value) for name, value in arguments_of(self, *OF_THE_MODEL).items()}
            del saved["trust_remote_code"]  # is not saved
            weights.source = Source(repr(name) + ("" if revision is None else f", revision={revision!r}"), saved)

    def save_adapter(self, folder: str | Path, *, rank: int = 16, largest_error: float = 0.01) -> None:
        """Writes a model that was trained with LoRA as a small difference from its backbone.

        `load` restores it like any other model, if it finds the same backbone. Weights are stored in fp16, which
        changes scores in the third or fourth digit.

        Args:
            folder: made if need be.
            rank: the highest rank of a difference: the sum of the ranks of the trainings it went through.
            largest_error: most of a difference that may be lost, as a share of its norm: raise it for a smaller file
                that scores differently.

        Raises:
            ValueError: if more than that would be lost, as after a training without LoRA.
        """
        self._refuse_foreign("saved")
        untrained = type(self)(**{**arguments_of(self), "device": "cpu"}).load_weights()
        self._write(Path(folder), Adapter.of(self.load_weights(), untrained, rank=rank, largest_error=largest_error))

    def _write(self, folder: Path, adapter: Adapter | None = None) -> None:
        weights, parameters = self.load_weights(), self.to_config()
        shutil.rmtree(folder / PRESELECT_FOLDER, ignore_errors=True)  # of a model that was here before
        if self.preselect is not None:
            parameters["preselect"] = self.preselect.to_config(folder)
        save_weights(folder, weights, cls=type(self), parameters=parameters, adapter=adapter)

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
            ValueError: if that is not a model saved by this package, one of another class, or one with parts of
                somebody's own that are not imported yet; the message names their module.
        """
        folder, config = read_config(name, revision=revision)
        saved, head = cls._saved_class(str(name), config), config["head"]
        look_up(registered_heads(), f"{str(name)!r} needs the unknown head", head["name"], head.get("module"))
        arguments = from_config(config["parameters"])
        preselect = arguments.pop("preselect", None)
        if preselect is not None and "preselect" not in parameters:
            arguments["preselect"] = preselection_from_config(preselect, folder)
        model = saved(**{**arguments, **parameters})
        # What the weights were made for, whatever `parameters` ask for: the first transform compares the two.
        original = saved(**{**arguments, "device": "cpu", "trust_remote_code": model.trust_remote_code})
        if "adapter" in config:
            weights = load_adapter(original.load_weights(), folder, config, str(original.backbone))
        else:
            weights = load_weights(folder, config, original.settings(), original.made_for(), saved.encoder_class)
        model._loaded = original._loaded = note_training(weights, folder, config)
        original._note_source(str(name), revision)
        return model

    @classmethod
    def _saved_class(cls, model: str, config: dict[str, Any]) -> Any:
        """The class of a saved model, if it may be restored by this one.

        That SumP is written as a MaxP with another head does not make its checkpoints MaxPs: only the base class, and
        users' own subclasses, are looked for.
        """
        base = LongDocReranker
        known = {c.__name__: c for c in _subclasses(base) if c.head_name or c.head_spec is not base.head_spec}
        name = config["class"]
        saved = look_up(dict(sorted(known.items())), f"{model!r} holds a", name, config.get("module"))
        users_own = issubclass(saved, cls) and not saved.__module__.startswith("pyterrier_longdoc.")
        if saved is not cls and cls is not LongDocReranker and not users_own:
            raise ValueError(f"{model!r} holds a {name}, not a {cls.__name__}: use {name}.load")
        return saved

    def push_to_hub(self, repo_id: str, *, private: bool = False, commit_message: str = "Upload model") -> str:
        """Saves the model and uploads it to the Hugging Face hub, with the token of `hf auth login`.

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
            self._save(Path(folder))
            api.create_repo(repo_id, private=private, exist_ok=True)
            address = str(api.upload_folder(repo_id=repo_id, folder_path=folder, commit_message=commit_message))
        self._note_source(repo_id)
        return address


def _subclasses(cls: Any) -> list[Any]:
    return [c for child in cls.__subclasses__() for c in (child, *_subclasses(child))]
