"""Late interaction over long documents: vectors of all windows' tokens, and each query token's maxima over them.

ColBERT (Khattab & Zaharia 2020, section 3) compares a query with the tokens of one passage. Here, a document's windows
are encoded separately, and the vectors of their tokens form one set, which serves all queries. Overlaps do not change
a maximum.

Shapes: P pairs, N windows, Q query vectors, T vectors of a window, E width of a vector.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import nn

from ..common.coverage import Coverage
from ..common.hub import local_folder, reachable
from ..common.packaged import encoder_folder
from .backbones.backbone import Backbone
from .backbones.load import build_backbone, encoder_of, load_encoder
from .backbones.modules import TOKENS, load_model, steps_of
from .backbones.sentence_transformers_files import kind_of, modules_of, read_json
from .backbones.steps import RepresentationSteps
from .heads.base import WarmStart
from .heads.maxsim import MaxSimStart
from .inputs import Encoded, Input, Settings, to_dense
from .late_interaction import SeparateEncoder
from .reader import PairInputs, SeparateReader
from .token_vectors import TokenVectors
from .tokens import Span
from .weights import seeded


@dataclass(eq=False)
class TokenBackbone(Backbone):
    """An encoder, a projection, and the rules by which tokens get vectors."""

    vectors: TokenVectors = field(kw_only=True)

    def describe(self) -> dict[str, Any]:
        """Return a JSON-able description from which `build_token_backbone` creates the same modules."""
        description = super().describe()
        return {**description, "options": {**description["options"], "vectors": asdict(self.vectors)}}


def build_token_backbone(description: dict[str, Any], tokenizer: Any) -> TokenBackbone:
    """Return the modules that `TokenBackbone.describe` described, with random weights, for strict loading."""
    options = dict(description["options"])
    vectors = TokenVectors(**options.pop("vectors"))
    return TokenBackbone(**vars(build_backbone({**description, "options": options}, tokenizer)), vectors=vectors)


DIMENSIONS = 128
"""The output width of a new projection: ColBERT's (Khattab & Zaharia 2020, section 4)."""


def load_token_backbone(name: str, *, seed: int, trust_remote_code: bool = False) -> TokenBackbone:
    """Load a late-interaction checkpoint, or an encoder with a random projection that depends on the seed."""
    name = reachable(encoder_folder(name))
    if kind_of(name) == "MultiVectorEncoder":
        name = local_folder(name)
        model = load_model(name, "MultiVectorEncoder", trust_remote_code=trust_remote_code)
        [(_, path), *_] = modules_of(name) or [("", "")]
        backbone = encoder_of(name, model[0], path, trust_remote_code=trust_remote_code)
        vectors, projection = token_vectors_of(name, model, backbone)
    else:
        architectures = (read_json(name, "config.json") or {}).get("architectures") or [""]
        if architectures[0].endswith("ForRetrieval"):
            raise ValueError(f"checkpoint {name!r} is a {architectures[0]} for images, which MaxSim does not support")
        backbone, vectors = load_encoder(name, trust_remote_code=trust_remote_code), TokenVectors(trained=False)
        linear = {"inputs": backbone.state_size, "bias": False, "activation": "Identity", "residual": False}
        with seeded(seed):
            projection = RepresentationSteps([{"kind": "dense", **linear, "outputs": DIMENSIONS}], backbone.state_size)
    # The last steps of a cross-encoder expect a state that depends on the query.
    parts = vars(backbone) | {"representation": projection, "final": None, "pooling": "cls"}
    return TokenBackbone(**parts, vectors=vectors)


def token_vectors_of(name: str, model: Any, backbone: Backbone) -> tuple[TokenVectors, RepresentationSteps]:
    """Return how a sentence-transformers model computes vectors of tokens, and its projection.

    ValueError for modules and settings that `TokenVectors` does not support.
    """
    transformer, *modules = model
    tokenizer, longest = backbone.tokenizer, transformer.max_seq_length
    expansion = transformer.query_expansion or {"length": 0, "attend": False}
    is_fixed = expansion.get("strategy") == "fixed"
    settings: dict[str, Any] = {
        "query_prefix": model.prompts.get("query") or "",
        "document_prefix": model.prompts.get("document") or "",
        "query_length": expansion["length"] if is_fixed else transformer.query_length or longest,
        "document_length": transformer.document_length or longest,
        "attends": expansion["attend"],
        "normalize": False,
        "mean": model.similarity_fn_name == "meanmaxsim",
    }
    layers: list[Any] = []
    for place, module in enumerate(modules):
        kind, field = type(module).__name__, getattr(module, "module_output_name", TOKENS)
        is_last = place == len(modules) - 1
        if kind == "Dense" and len(layers) == place:
            layers.append(module)
        elif kind == "MultiVectorMask" and not module.keep_only_token_ids:
            settings |= {"skipped": _ids(tokenizer, module.skiplist_words), "skips_in": module.skiplist_tasks}
        elif kind == "HierarchicalTokenPooling" and is_last and set(module.tasks) == {"document"}:
            pooling = module.pool_factor, module.num_protected_tokens, module.normalize_embeddings
            settings |= dict(zip(("pooling", "protected", "pooling_normalizes"), pooling, strict=True))
        elif kind == "Normalize" and module.module_input_name == TOKENS:
            settings["normalize"] = True
        else:
            field = kind
        if field != TOKENS:
            kinds = ", ".join(type(each).__name__ for each in modules)
            raise ValueError(
                f"checkpoint {name!r} has the modules {kinds}, but MaxSim does not support {module}: it supports "
                f"Dense, MultiVectorMask (without keep_only_token_ids), Normalize and HierarchicalTokenPooling over "
                f"{TOKENS!r}, in this order"
            )
    # Tokens that are not attended to count only with this module.
    if expansion["attend"] or any(type(module).__name__ == "MultiVectorMask" for module in modules):
        filler = expansion.get("token") or tokenizer.mask_token or tokenizer.eos_token
        settings["expand_to"] = expansion["length"]
        if expansion["length"]:
            (settings["expand_with"],) = _ids(tokenizer, [filler]) or (tokenizer.unk_token_id,)
    return TokenVectors(**settings), steps_of(name, layers, backbone.state_size, TOKENS)


def _ids(tokenizer: Any, words: Sequence[str]) -> tuple[int, ...]:
    """Return the ids of words that are one token each; others would have the id of all unknown words."""
    ids = {word: tokenizer.convert_tokens_to_ids(word) for word in words}
    unknown = (None, tokenizer.unk_token_id)
    return tuple(sorted(i for word, i in ids.items() if i not in unknown or word == tokenizer.unk_token))


@dataclass(frozen=True, eq=False)
class Compared(Encoded):
    """Documents after the comparison: `cls (P, N, Q)` has each query vector's maximum in each window.

    Attributes:
        places: `(P, N, Q)`, the index of the window's vector with each maximum.
    """

    places: torch.Tensor = field(kw_only=True)


class MaxSimReader(SeparateReader):
    """Also expands short queries."""

    def __init__(self, backbone: Backbone, settings: Settings, rules: TokenVectors) -> None:
        self.vector_rules = rules
        prefixes, lengths = (rules.query_prefix, rules.document_prefix), (rules.query_length, rules.document_length)
        super().__init__(backbone, settings, prefixes=prefixes, lengths=lengths)
        if rules.expand_to > (self.longest or sys.maxsize):
            raise ValueError(
                f"the checkpoint expands queries to {rules.expand_to} tokens; its model takes {self.longest}"
            )

    def assemble_query(self, query: np.ndarray) -> Input:
        return self.vector_rules.expanded(super().assemble_query(query))


class MaxSimEncoder(SeparateEncoder):
    """Encodes queries and windows separately, and finds each query token's maximum in every window.

    Attributes:
        token_pooling: the number of tokens of a window that share a vector; None for the checkpoint's.
    """

    token_pooling: float | None = None
    explains = ("term_places",)
    vector_kind = "tokens"
    build_backbone = staticmethod(build_token_backbone)

    def __init__(self, backbone: TokenBackbone) -> None:
        super().__init__(backbone)
        self.vectors_of = backbone.vectors

    @property
    def projection(self) -> nn.Module:
        return self.representation

    @property
    def vector_rules(self) -> TokenVectors:  # type: ignore[override]
        """The rules by which tokens get vectors, with the user's pooling."""
        rules, factor = self.vectors_of, self.token_pooling
        if not factor:
            return rules
        return replace(
            rules, pooling=factor, pooling_normalizes=rules.pooling_normalizes or rules.pooling == 1 < factor
        )

    def make_reader(self, settings: Settings) -> MaxSimReader:
        return MaxSimReader(self.origin, settings, self.vectors_of)

    def initial_weights(self, backbone: Any, tokenizer: Any) -> WarmStart:
        start = super().initial_weights(backbone, tokenizer)
        return MaxSimStart(start.final, start.cls_embedding, start.sep_embedding, trained=self.vectors_of.trained)

    def reads_like(self, other: Any) -> bool:
        """See the base class: markers, query expansion and tokens without vectors must be those of the training."""
        return replace(self.vectors_of, trained=other.vectors_of.trained) == other.vectors_of

    # Vectors.

    def make_states(self, inputs: Sequence[Input], coverage: Coverage | None, side: str) -> list[torch.Tensor]:
        rules, kept = self.vector_rules, [self.vectors_of.kept(one, side) for one in inputs]
        return [rules.finish(self.projection(s).float(), side) for s in self.token_states(inputs, coverage, kept)]

    # Comparison.

    def forward(self, pairs: Sequence[PairInputs], *, coverage: Coverage | None = None, **_: Any) -> Compared:
        """Compare P queries and documents."""
        counts = [len(pair.windows) for pair in pairs]
        queries = self.states([pair.query_input for pair in pairs], coverage, "query")
        windows = iter(self.states([one for pair in pairs for one in pair.windows], coverage))
        found: list[tuple[torch.Tensor, torch.Tensor]] = []
        with torch.autocast(self.device.type, enabled=False):
            for query, count in zip(queries, counts, strict=True):
                found.append(_maxima(query, [next(windows) for _ in range(count)]))
        width = max(map(len, queries))
        maxima, places = (
            to_dense(torch.cat([nn.functional.pad(p, (0, width - p.shape[1])) for p in parts]), counts)
            for parts in zip(*found, strict=True)
        )
        return Compared(maxima.cls, maxima.mask, places=places.cls)

    # Explanation.

    def explain(self, pairs: Sequence[PairInputs], encoded: Any, head: Any) -> dict[str, list[Any]]:
        """Return for each pair its query tokens, the characters of their maxima, and their parts in the score."""
        windows = head.token_windows(encoded)  # (P, Q)
        places: list[list[tuple[str, int, int, float]]] = []
        for i, pair in enumerate(pairs):
            query = pair.query_input
            names = self.origin.tokenizer.convert_ids_to_tokens(
                query.ids[self.vectors_of.kept(query, "query")].tolist()
            )
            row: list[tuple[str, int, int, float]] = []
            for j, (name, n) in enumerate(zip(names, windows[i].tolist(), strict=False)):
                place, part = int(encoded.places[i, n, j]), float(encoded.cls[i, n, j])
                row.append((name, *self._characters(pair, n, place), part))
            places.append(row)
        parts = [[(token, part) for token, _, _, part in row] for row in places]
        return {"term_scores": parts, "term_places": places}

    def _characters(self, pair: PairInputs, n: int, vector: int) -> Span:
        """Return the characters of a vector of a pair's window, or those of the window if its tokens are pooled.

        Special tokens and those of titles have an empty span before the window's first character.
        """
        text, span, window = pair.text, pair.spans[n], pair.windows[n]
        start, end = text.characters(span)
        if self.vector_rules.pooling > 1:
            return start, end
        place = int(self.vectors_of.kept(window, "document").nonzero()[0][vector])
        token = span[1] - (window.content[1] - place)  # titles come before the window
        return text.characters((token, token + 1)) if span[0] <= token < span[1] else (start, start)


def _maxima(query: torch.Tensor, windows: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the `(N, Q)` maximum of each query vector in each window of a document, and its vector's index.

    Each window is a separate product: in a larger one, rounding might depend on the other ones.
    """
    maxima, places = zip(*((window @ query.T).max(0) for window in windows), strict=True)
    return torch.stack(maxima), torch.stack(places)
