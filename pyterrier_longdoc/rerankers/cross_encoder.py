"""Cross-encoders: rerankers with weights, which are trained, saved and shared."""

# Without `from __future__ import annotations`: modules of subclasses need the types of the fields, too.
import copy
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import huggingface_hub
import pandas as pd
import pyterrier as pt

from ..common.arguments import argument, arguments_of, changed, changed_names, check_type
from ..common.coverage import Scored
from ..common.files import full_path
from ..common.frames import Document, Question, check_columns, documents, questions, strings, validated
from ..common.packaged import ENCODER, packaged_models
from ..common.warnings import warn, warn_once
from ..modelling.backbones.backbone import Backbone
from ..modelling.backbones.load import load_backbone
from ..modelling.encoder import WindowEncoder
from ..modelling.external import ExternalEncoder, PairScorer
from ..modelling.heads import Head, registered_heads
from ..modelling.inputs import Settings
from ..modelling.layout import InputLayout, resolve_layout
from ..modelling.model import Model
from ..modelling.saved import ARTIFACT_FILE, PLACEHOLDER_NAME
from ..modelling.templates import Template, resolve_template
from ..modelling.weights import HeadSpec, exchange_head, start_from
from ..training import (
    ContinuedTrainingWarning,
    TrainedOn,
    TrainingArgs,
    evaluate,
    history_frame,
    prepare,
    train,
    training_settings,
)
from ..training.examples import noted
from ..training.queries import check_validation
from ..training.recipe import papers_of_recipe
from . import saved
from .export import export_classifier
from .reranker import Reranker
from .score_cache import score_with_cache

POOLINGS = ("cls", "mean", "last")


class UntrainedWarning(UserWarning):
    """A model with random weights is used as if it were trained."""


@dataclass(eq=False, repr=False)
class CrossEncoder(Reranker, pt.Estimator):
    """Base of the cross-encoding rerankers; use `FirstP`, `MaxP`, `PARADE` and so on.

    Scores are logits. Once the weights are loaded, you can change every attribute except those that select weights.

    Args:
        backbone: a Hugging Face model name or a folder, with a cross-encoder (BERT, ELECTRA, RoBERTa, XLM-R, CamemBERT,
            DeBERTa, DistilBERT, ModernBERT and more) or with a plain encoder, which requires `fit`. Models that
            aggregate scores also take a `PairScorer`. Default: a public MS MARCO passage cross-encoder.
        pooling: how the last layer's states become the vector of a window: `"cls"` (the first token's state), `"mean"`
            (over all tokens, including the query and special tokens) or `"last"` (the last token's state). This drops
            the classification head of a cross-encoder, so the model must be trained. None uses the checkpoint's own
            pooling and classification head. If it has none: `"mean"` for JINA and language models, as in Boytsov et al.
            2025, and `"cls"` for others.
        template: the prompt for language models: a name (`"qwen3-reranker"`, `"mxbai-rerank-v2"`,
            `"bge-reranker-v2-gemma"`, `"ctxl-rerank-v2"`, `"zerank-2"`, `"nemotron-rerank"`, `"monot5"`, `"yes-no"` for
            chat models, `"plain"` for untrained models), a `Template`, or a text with `{query}` and `{text}`. None uses
            the template in the checkpoint's files or, if there is none, that of a known name. Without either, language
            models that were trained to rank are rejected, and others use `"plain"`.
        instruction: what the model shall look for, in templates with `{instruction}` (Qwen3-Reranker, mxbai-rerank-v2,
            ctxl-rerank-v2); `""` for the template's own, or none.
        instruction_field: a column with an instruction for each row, which is the same in all rows of a query. Where it
            is empty, `instruction` applies. `preselect` does not see instructions.
        layout: how a query and a window form an input. `"pair"` is the tokenizer's layout for two texts, with which
            cross-encoders were trained. `"padded"` is the fixed layout of Boytsov et al. 2025. Also an `InputLayout`,
            or the name of another layout in `presets`.
        score_cache: a file that stores scores by weights, settings, query and text. A second run over the same texts
            reads them, and an interrupted run resumes, because each block of texts is written when it is complete.
            `coverage` counts what was computed, not what was read from the file. The cache is not used with `explain`,
            for the validation in `fit`, or for models with hooks. Changes of weights through `.data` are not detected
            (use `torch.no_grad()`), and neither are those of other attributes of modules, such as `LayerNorm.eps`, or
            of the code of your own functions and classes, which count by their names: use another file.
        training: the recipe for `fit`; None for `TrainingArgs()`. `load` restores that of the last `fit`.

    Example:
        `bm25 >> ld.CrossEncoder.load("folder")` restores a saved model of any class.
    """

    _: KW_ONLY
    pooling: str | None = argument(None, role="weights", choices=POOLINGS)
    template: str | Template | None = argument(None, role="weights")
    instruction: str = argument("", role="input")
    instruction_field: str | None = argument(None, role="input")
    layout: str | InputLayout = argument("pair", role="input")
    score_cache: str | Path | None = argument(None, role="call")
    training: TrainingArgs | None = argument(None, role="call")

    _trained_hint: ClassVar[str] = (
        "FirstP, MaxP, PARADE with avg, max or attn, CEDR with knrm and others need no training if the backbone is a "
        "cross-encoder with its own pooling"
    )
    """For the warning of an untrained model."""
    head_name: ClassVar[str] = ""

    def __repr__(self) -> str:
        model, text = self._model, super().__repr__()
        if model is None:
            return text
        if model.source:
            text = saved.load_call(self, model)
        if model.is_trained and not model.source:
            origin = "trained" if model.origin == "fit" else "started"
            return f"{text[:-1]}, {origin} {model.fingerprint()[:8]})"
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
        return load_backbone(str(self.backbone), trust_remote_code=self.trust_remote_code, **self._backbone_options())

    def _backbone_options(self) -> dict[str, Any]:
        """Return the options of the pre-trained part."""
        return {"pooling": self.pooling, "template": None if self.template is None else resolve_template(self.template)}

    def default_training(self) -> TrainingArgs:
        """Return the recipe to use without `training`."""
        return TrainingArgs()

    # Arguments.

    @property
    def has_weights(self) -> bool:
        """Whether the backbone is a checkpoint, which this package trains and saves, and not an external scorer."""
        return not isinstance(self.backbone, PairScorer)

    def require_weights(self, what: str) -> None:
        """Raise TypeError if the model cannot be trained, saved and so on, because it has no weights."""
        if not self.has_weights:
            raise TypeError(f"{self!r} cannot be {what}: it has no weights, because its backbone only returns scores")

    def cited(self) -> list[str]:
        """Return the keys of the papers behind this model, its selection of windows and its last training."""
        trained = [] if self._model is None else papers_of_recipe(self._model.recipe)
        return [*super().cited(), *trained]

    def _check_backbone(self) -> None:
        backbone = self.backbone
        if not isinstance(backbone, PairScorer):
            if isinstance(backbone, pt.Transformer) or (callable(backbone) and not isinstance(backbone, type)):
                raise ValueError(f"backbone={backbone!r} is not a checkpoint: use ld.PairScorer(...)")
            if str(backbone).startswith(("http://", "https://")):
                raise ValueError("backbone is an address: use ld.PairScorer with a function that asks the server")
            super()._check_backbone()
            return
        head = registered_heads().get(self.head_spec()[0])
        if self.encoder_class is not WindowEncoder or not getattr(head, "from_scores", False):
            raise ValueError(
                f"{type(self).__name__} needs more than a score per window, and {backbone!r} gives no more: use "
                f"FirstP, MaxP, SumP, AvgP, KMaxP, SoftMaxP, Birch or LongP (your own head: from_scores = True)"
            )
        names = {*arguments_of(self, "weights", "computing"), "instruction", "instruction_field"}
        unused = changed_names(self, names - {"batch_size", "seed"})
        unused += ["layout"] if resolve_layout(self.layout).is_for_pairs else []
        if unused:
            raise ValueError(
                f"{', '.join(sorted(unused))} would have no effect: {backbone!r} alone decides how a query and a "
                f"window are read and scored"
            )

    def check(self) -> None:
        """See the base class."""
        super().check()
        check_type(TrainingArgs | None, "TrainingArgs(...), or None for the default recipe", training=self.training)
        check_type(str | Path | None, "a file", score_cache=self.score_cache)
        check_type(str, "a text", instruction=self.instruction)
        check_type(str | None, "the name of a column", instruction_field=self.instruction_field)
        if self.score_cache is not None:
            self.score_cache = full_path(self.score_cache)
        layout = resolve_layout(self.layout)
        if self.template is not None:
            resolve_template(self.template)
            if layout.is_for_pairs:
                raise ValueError(f"layout={self.layout!r} is for [CLS] query [SEP] text [SEP]; it has no template")

    def make_settings(self, **others: Any) -> Settings:
        """See the base class."""
        return super().make_settings(
            layout=resolve_layout(self.layout),
            instruction=self.instruction if self.instruction.strip() else "",
            instruction_field=self.instruction_field,
            **others,
            **({} if self.has_weights else {"device_name": "cpu"}),
        )

    def weight_arguments(self) -> dict[str, Any]:
        """Return the arguments on which the weights depend, except those of the head."""
        values = arguments_of(self, "checkpoint") | arguments_of(self, "weights")
        return saved.without_paths({name: value for name, value in values.items() if name not in self.head_spec()[1]})

    # Model.

    def _set_up(self, model: Model | None, settings: Settings) -> Model:
        """See the base class."""
        arguments, head = self.weight_arguments(), self.head_spec()
        if model is None:
            origin: dict[str, Any] = {"weight_arguments": arguments, "seed": self.seed}
            if not isinstance(self.backbone, PairScorer):
                return Model.from_backbone(self.load_backbone(), head, settings, encoder=self.encoder_class, **origin)
            return Model.from_backbone(self.backbone, head, settings, encoder=ExternalEncoder, **origin)
        if model.origin == "checkpoint":  # nothing of it is random
            model.weight_arguments["seed"] = arguments["seed"]
        others = [name for name, value in arguments.items() if model.weight_arguments[name] != value]
        if others or not (model.head_spec == head or exchange_head(model, head, self.seed)):
            what, name = ", ".join(others) or "the aggregation", type(self).__name__
            raise ValueError(
                f"this {name} has its weights, which a change of {what} would discard: create a new {name}(...)"
            )
        model.use(settings)
        return model

    @property
    def is_trained(self) -> bool:
        """Whether the weights come from `fit`, `load` or `start_from`, and none are random."""
        return self._model is not None and self._model.is_trained

    def queries(self, frame: pd.DataFrame) -> Sequence[Question]:
        """Return the query of each row, with its instruction if it has one of its own."""
        queries, field = super().queries(frame), self.instruction_field
        if field is None:
            return queries
        check_columns(frame, [field], "the candidates")
        return [
            replace(query, instruction=instruction) if instruction.strip() else query
            for query, instruction in zip(queries, strings(frame[field], field), strict=True)
        ]

    def score(self, queries: Sequence[str | Question], texts: Sequence[str | Document], bar: Any = None) -> Scored:
        """See the base class. Scores that are in the `score_cache` are read from it."""
        model = self.model
        if model.origin == "random":
            message = f"{type(self).__name__} has randomly initialized layers: its scores are meaningless before fit"
            hint = self._trained_hint
            unknown = model.head.unknown_weights() if type(model.head).ready_from is Head.ready_from else []
            if unknown:
                hint = f"head.{unknown[0]} is not in the checkpoint: train it, or list it in `neutral`"
            elif self.backbone == ENCODER:
                hint = f"{ENCODER} is an encoder without a scoring layer; {', '.join(packaged_models())} are trained"
            warn_once(self, f"{message} ({hint}).", UntrainedWarning)
        if self.score_cache is not None and not self.explain and not self._validating:
            return score_with_cache(self, model, questions(queries), documents(texts), bar)
        return model.score(queries, texts, explain=self.explain, bar=bar)

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
            qrels_tr: `qid, docno, label`; candidates without a positive label are negatives. If the recipe has
                `judged="all"`, judged documents that are not candidates are added for queries with a candidate, if the
                `text_loader` has their texts.
            topics_or_res_va: validation candidates; the weights with the best `metric` on them are kept.
            qrels_va: labels of the validation candidates.

        Returns:
            This transformer.

        Raises:
            ValueError: if there is nothing to train or to validate on, if a label, score or text is invalid, or if the
                recipe does not fit the data or the checkpoint folder.
            FloatingPointError: if the loss is not finite.
            TypeError: for a `PairScorer`, which cannot be trained.
            ImportError: if the recipe needs accelerate or peft and they are missing.

        Training a trained model continues from its weights with a `ContinuedTrainingWarning`, unless they came from
        `start_from` or the recipe names a checkpoint folder. Interrupted training keeps the weights of the best
        validation, or of the last step without one. With a checkpoint folder, training resumes there when the program
        is restarted. Finished training continues if you raise the limit that ended it: `max_steps`, `epochs` or
        `patience`.

        Afterwards, `trained_on` reports the training queries, and `coverage` how much of the training texts was read.
        With `verbose`, both are printed. Otherwise, a `LeftOutWarning` warns if queries or judged documents were left
        out. If the model then scores queries that it was trained on, it warns once with a `SeenQueriesWarning`.
        """
        self.require_weights("trained")
        recipe = self.recipe
        validate, validated_on = self._validation(topics_or_res_va, qrels_va, recipe.metric)
        validated(topics_or_res_tr, self.text_field, self.text_loader, self)
        columns = {"text_field": self.text_field, "text_loader": self.text_loader}
        data = prepare(topics_or_res_tr, qrels_tr, recipe, texts=self.documents, queries=self.queries, **columns)
        if self._model is not None and self._model.origin == "fit" and recipe.checkpoint is None:
            problem = f"this {type(self).__name__} is already trained: fit continues from its weights"
            warn(f"{problem}; to start over, create a new one", ContinuedTrainingWarning)
        model, settings = self.model, None
        if recipe.checkpoint is not None:
            settings = training_settings(self, topics_or_res_va, qrels_va)
        with noted(self, data, validated_on) as (coverage, mark):
            train(
                model,
                data,
                recipe,
                validate=validate,
                on_step=mark,
                coverage=coverage,
                history=model.history,
                settings=settings,
                verbose=self.verbose,
            )
        return self

    def _validation(
        self, results: pd.DataFrame | None, qrels: pd.DataFrame | None, metric: str
    ) -> tuple[Callable[[], float] | None, int]:
        """Return a function that computes the validation metric, and the number of validation queries.

        The data is checked now, not after the first epoch.
        """
        if results is None and qrels is None:
            return None, 0
        if results is None or qrels is None:
            raise ValueError("validation needs both candidates and qrels, or neither")
        validated(results, self.text_field, self.text_loader, self)
        queries = check_validation(results, qrels)

        def validate() -> float:
            # No later run has these weights, so their scores are not cached.
            # Every validation has new weights, and an export takes longer than it saves.
            with changed(self, runtime="torch", _validating=True):
                return evaluate(self.transform(results), qrels, metric)

        return validate, queries

    def start_from(self, other: Reranker) -> "CrossEncoder":
        """Copy the weights of another model, including its head if it is of the same kind; return this transformer.

        For instance, start CEDR from the plain ranker, or a model for a small collection from one for a large one.

        Args:
            other: a model with the same kind of backbone. Of a `BiEncoder`, only the backbone's weights are copied, so
                this model must be trained.

        Raises:
            ValueError: if it is not a model of this package, or has another kind of backbone or another vocabulary.
        """
        rule = "a reranker of this package in memory; CrossEncoder.load(...) restores a saved one"
        check_type(Reranker, rule, other=other)
        for reranker in (self, other):
            if isinstance(reranker, CrossEncoder):
                reranker.require_weights("started from another model, and no other model can start from it")
        start_from(self.model, other.model, self.seed)
        return self

    @property
    def trained_on(self) -> TrainedOn | None:
        """The training queries of the last `fit`, and why others were left out; None before the first call."""
        return None if self._model is None else self._model.trained_on

    @property
    def history(self) -> pd.DataFrame:
        """One row per epoch and per validation; `training.plot_history` plots it.

        Columns: `epoch`, `step`, `loss` (mean since the last row), `learning_rate` and one for each other prefix of the
        recipe's rates, e.g. `learning_rate encoder.`, `documents_per_second` and, with validation data, `validation`.
        """
        return history_frame([] if self._model is None else self._model.history)

    @property
    def recipe(self) -> TrainingArgs:
        """The recipe for `fit`: `training`, or the model's default; the model's seed if the recipe has none."""
        recipe = self.training or self.default_training()
        return recipe if recipe.seed is not None else replace(recipe, seed=int(self.seed))

    # Copies: in memory, on disk, on the hub.

    def apply_attributes(self, **attributes: Any) -> "CrossEncoder":
        """Return a copy with its weights and some constructor arguments changed.

        If all weights are a checkpoint's, a copy whose changed arguments decide the weights gets new ones.
        """
        clone = type(self)(**{**arguments_of(self), **attributes})
        same = clone.weight_arguments() == self.weight_arguments() and clone.head_spec() == self.head_spec()
        if self._model is not None and (same or self._model.origin != "checkpoint"):
            clone._model = copy.deepcopy(self._model)
        return clone

    def save(self, folder: str | Path, *, overwrite: bool = False) -> None:
        """Save the model to a folder: config.json, model.safetensors, tokenizer, model card and training.json.

        Args:
            folder: created if it does not exist; `load` restores the model from it. A saved model of the same class
                with the same backbone is replaced.
            overwrite: also replace a saved model of another class, with another backbone or by a newer version.

        Raises:
            ValueError: if the backbone uses remote code, which would be missing from the folder, or if the folder
                contains another model or other files.
            TypeError: for a `PairScorer`, which has no weights.
        """
        saved.write(self, Path(full_path(folder)), overwrite=overwrite)
        saved.note_source(self, self.model, str(folder))

    def export(self, folder: str | Path) -> None:
        """Export a standard checkpoint: a classifier with one label, whose logit is the score of a query and a passage.

        It loads in transformers (`AutoModelForSequenceClassification`), in the `CrossEncoder` of sentence-transformers,
        in servers of such models, and as a backbone in this package. FirstP, MaxP, SumP, AvgP, KMaxP and SoftMaxP can
        be exported. Windows and query truncation are not part of the checkpoint; its model card describes them. BERT
        and RoBERTa classifiers contain a tanh. If the model was trained without one, its weights are scaled so that the
        tanh is linear, with an error of 1e-5.

        Args:
            folder: a new or an empty folder.

        Raises:
            ValueError: if the format cannot express the model; the message says why.
            TypeError: for a `PairScorer`, which has no weights.
        """
        export_classifier(self, folder)

    @classmethod
    def load(cls, name: str | Path, *, revision: str | None = None, **parameters: Any) -> Any:
        """Restore a model from `save` or `push_to_hub`.

        Args:
            name: a folder, a model on the Hugging Face hub, or a packaged model such as `"longdoc:maxp"`.
            revision: a branch, tag or commit on the hub.
            **parameters: constructor arguments to change, e.g. `device="cpu"`.

        Returns:
            A transformer of this class or of your own subclass; `CrossEncoder.load` restores models of any class.

        Raises:
            ValueError: if this package did not save the model, if it has another class, or if the module with its class
                is not imported yet; the message names the module.
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
            repo_id: `user/name`; created if it does not exist. Its `README.md` is kept, because you may have edited it:
                delete it on the hub for a new model card. Files of an earlier model are removed.
            private: whether the repository is private.
            license: the licence of the weights for the model card, e.g. `"mit"`.
            datasets: the training data for the model card, e.g. `["irds/msmarco-document"]`.
            commit_message: the message of the commit.
            artifact: also upload it to the dataset of this name, where `pt.Artifact.from_hf(repo_id)` looks for it.
            format: `"longdoc"` for the format of `save`, or `"standard"` for that of `export`.

        Returns:
            The URL of the model.
        """
        if format not in ("longdoc", "standard") or (artifact and format == "standard"):
            raise ValueError(f"format={format!r} must be 'longdoc', or 'standard' without artifact=True")
        api, is_standard = huggingface_hub.HfApi(), format == "standard"
        with tempfile.TemporaryDirectory() as folder:
            if is_standard:
                self.export(folder)
            else:
                saved.write(self, Path(folder))
            file = Path(folder, "README.md")
            card = huggingface_hub.ModelCard(file.read_text(encoding="utf-8"))
            card.data["license"], card.data["datasets"] = license, datasets and list(datasets)
            card.text = card.text.replace(PLACEHOLDER_NAME, repo_id)
            if self.trained_on is not None and not is_standard:
                card.text += f"\nTraining data: {self.trained_on}.\n"
            file.write_text(str(card), encoding="utf-8")
            api.create_repo(repo_id, private=private, exist_ok=True)
            if artifact:
                # Made here: `to_hf` with `private=` needs a function that the hub's client no longer has.
                api.create_repo(repo_id, repo_type="dataset", private=private, exist_ok=True)
                pt.Artifact.load(folder).to_hf(repo_id)
            if api.file_exists(repo_id, file.name):
                file.unlink()
            old = [*saved.STALE_FILES, f"{saved.PRESELECT_FOLDER}/*", ARTIFACT_FILE]
            info = api.upload_folder(
                repo_id=repo_id, folder_path=folder, commit_message=commit_message, delete_patterns=old
            )  # deletes nothing that it uploads
        if not is_standard:
            saved.note_source(self, self.model, repo_id)
        return str(info)
