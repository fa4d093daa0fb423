"""The list-wise encoder of jina-reranker-v3: a query and many documents in one context of a language model.

Source: Wang et al. 2025 (arXiv 2509.25085, "last but not late interaction") and `modeling.py` of the checkpoint, whose
prompt, blocks and combination of blocks these are. A marker token ends each document and the query. The states of the
last layer at the markers are projected; the score of a document is the cosine of its vector and the query's.

Shapes: P documents, of one query in inference; n documents of a context, H width of a state, E of a projected vector.
"""

from __future__ import annotations

import sys
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from torch import nn

from ..common.coverage import Coverage
from ..common.frames import Document, Question, join_lines
from ..common.hub import find_file, reachable, refuse_pointer
from ..common.packaged import encoder_folder
from .backbones.backbone import Backbone
from .backbones.load import load_encoder
from .backbones.sentence_transformers_files import read_json
from .backbones.steps import RepresentationSteps
from .encoder import WindowEncoder
from .excerpts import ChosenPassages
from .inputs import Encoded, Input, QueryStates, Settings
from .model import Pair
from .reader import NOTHING, PairInputs, Reader, Specials
from .weights import seeded
from .windows import Windows

DOCUMENT_MARKER, QUERY_MARKER = "<|embed_token|>", "<|rerank_token|>"

# The prompt of the published code.
_BEGINNING = (
    "<|im_start|>system\n"
    "You are a search relevance expert who can determine a ranking of the passages based on how relevant they are to "
    "the query. If the query is a question, how relevant a passage is depends on how well it answers the question. If "
    "not, try to analyze the intent of the query and assess how well each passage satisfies the intent. If an "
    "instruction is provided, you should follow the instruction when determining the ranking.<|im_end|>\n"
    "<|im_start|>user\n"
    "I will provide you with {number} passages, each indicated by a numerical identifier. Rank the passages based on "
    "their relevance to query: {query}\n"
)
_INSTRUCTION = "<instruct>\n{instruction}\n</instruct>\n"
_PASSAGE = f'<passage id="{{number}}">\n{{passage}}{DOCUMENT_MARKER}\n</passage>\n'
_END = f"<query>\n{{query}}{QUERY_MARKER}\n</query><|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"


@dataclass(frozen=True, slots=True)
class ListQuery(Question):
    """The query of a list; equal words with another qid are another list."""

    qid: str = ""


@dataclass(frozen=True)
class ListSettings(Settings):
    """The settings of a list-wise encoder.

    Attributes:
        block_size: the maximum number of documents in a context.
        longest_passage: the maximum number of tokens of a document in a context, without its title.

    Raises:
        ValueError: if the selected windows of a document can have more tokens than that.
    """

    block_size: int = 125
    longest_passage: int = 2048

    def __post_init__(self) -> None:
        super().__post_init__()
        largest, selected = self.windows.largest or 1, 1 if self.preselect is None else self.preselect.k
        if largest * selected > self.longest_passage:
            raise ValueError(
                f"max_doc_len={self.longest_passage} is too small for {selected} windows of {largest} tokens: raise "
                f"it, or use fewer or smaller windows"
            )


@dataclass(eq=False)
class ListBackbone(Backbone):
    """A language model and a projection of its states; `trained` is whether the projection is the checkpoint's."""

    trained: bool = field(default=False, kw_only=True)


def load_list_backbone(name: str, *, seed: int, trust_remote_code: bool = False) -> ListBackbone:
    """Load a checkpoint of jina-reranker-v3's kind, or a language model with a random projection by the seed.

    Raises:
        ValueError: if the checkpoint is not a language model that reads from left to right.
    """
    name = reachable(encoder_folder(name))
    backbone = load_encoder(name, trust_remote_code=trust_remote_code)
    family = backbone.family
    if family.kind != "decoder" or not family.arguments.get("is_causal", True):
        raise ValueError(
            f"ListReranker needs jinaai/jina-reranker-v3 or another language model that reads from left to right (not "
            f"one with is_causal: false), but {name!r} is a {family.name}"
        )
    tokenizer, matrices = backbone.tokenizer, _projection(name)
    missing = [marker for marker in (DOCUMENT_MARKER, QUERY_MARKER) if marker not in tokenizer.get_vocab()]
    size = backbone.state_size
    sizes = [tuple(matrix.shape) for matrix in matrices] or [(size // 2, size), (512, size // 2)]
    linear: dict[str, Any] = {"kind": "dense", "bias": False, "residual": False}
    with seeded(seed):
        steps = RepresentationSteps(
            [
                {**linear, "inputs": inputs, "outputs": outputs, "activation": activation}
                for (outputs, inputs), activation in zip(sizes, ("ReLU", "Identity"), strict=True)
            ],
            size,
        )
        tokenizer.add_tokens(missing, special_tokens=True)
        words = max(tokenizer.get_vocab().values()) + 1
        if words > len(backbone.model.get_input_embeddings().weight):
            backbone.model.resize_token_embeddings(words, mean_resizing=False)
    for step, matrix in zip(steps, matrices, strict=bool(matrices)):
        step.load_state_dict({"linear.weight": matrix})
    parts = vars(backbone) | {"representation": steps, "final": None, "pooling": "last"}
    return ListBackbone(**parts, trained=bool(matrices) and not missing)


def _projection(name: str) -> list[torch.Tensor]:
    """Return the two matrices of a checkpoint's projection; none if it has none."""
    files = (read_json(name, "model.safetensors.index.json") or {}).get("weight_map", {})
    matrices = []
    for key in ("projector.0.weight", "projector.2.weight"):
        file = find_file(name, files.get(key, "model.safetensors"))
        if file is not None:
            refuse_pointer(file)
            with safe_open(file, "pt") as weights:
                matrices += [weights.get_tensor(key).float()] if key in weights.keys() else []  # noqa: SIM118
    return matrices


def lists(queries: Sequence[Question], texts: Sequence[Document], **limits: Any) -> Iterator[list[Pair]]:
    """Divide a run into the lists of its queries, longest first; documents are in the order of their rows.

    Rows of a query with equal texts are one document. Limits of blocks do not apply.
    """
    rows_of: dict[Question, dict[Document, list[int]]] = {}
    for row, (query, text) in enumerate(zip(queries, texts, strict=True)):
        rows_of.setdefault(query, {}).setdefault(text, []).append(row)
    for query, documents in sorted(rows_of.items(), key=lambda item: -sum(map(len, item[1]))):
        yield [(query, text, rows) for text, rows in documents.items()]


class ListReader(Reader):
    """Reads the documents of a query, in their order, into one or several contexts.

    Attributes:
        markers: the ids of the tokens that end a document and the query.
    """

    settings: ListSettings
    takes_instruction = True

    def __init__(self, backbone: Any, settings: ListSettings) -> None:
        super().__init__(backbone, settings)
        self.needs_offsets = True  # the parts of a document are joined as text
        self.markers = self.tokenizer.convert_tokens_to_ids([DOCUMENT_MARKER, QUERY_MARKER])

    def make_specials(self, backbone: Any) -> Specials:
        return Specials()

    def adapt(self) -> tuple[Windows, int | None]:
        """See the base class; instruction, the longest query, twice, and the longest document must fit together."""
        settings, query = self.settings, self.settings.max_query_len or 0
        prompt = len(self.ids("", [""], settings.instruction))
        if settings.longest_passage + settings.repeat_tokens + prompt + 2 * query > (self.longest or sys.maxsize):
            raise ValueError(
                f"max_doc_len={settings.longest_passage}, twice max_query_len={query} and the prompt with the "
                f"instruction do not fit into the {self.longest} tokens of the backbone: lower or shorten them"
            )
        selected = 1 if settings.preselect is None else settings.preselect.k
        return settings.windows.resized(settings.longest_passage // selected), query

    def assemble(self, query: np.ndarray, content: np.ndarray) -> Input:
        """Return an empty input, because a window is no input of its own."""
        return Input(NOTHING, (0, 0), (0, 0))

    def contexts(self, pairs: Sequence[PairInputs]) -> Iterator[Input]:
        """Return the contexts of the documents of a query: those of the published rule, or shorter ones that fit."""
        longest = self.longest or sys.maxsize
        while pairs:
            number = self.published_number(pairs)
            context = self.input_of(pairs[:number])
            if len(context) > longest:
                number = bisect_right(range(1, number), longest, key=lambda fewer: len(self.input_of(pairs[:fewer])))
                context = self.input_of(pairs[: number or 1])
            if not number:
                raise ValueError(
                    f"a document of the query {pairs[0].query.text!r} needs a context of {len(context)} tokens with "
                    f"query, instruction and prompt, but the backbone takes {longest}: lower max_doc_len or "
                    f"max_query_len, or shorten the instruction"
                )
            yield context
            pairs = pairs[number:]

    def published_number(self, pairs: Sequence[PairInputs]) -> int:
        """Return how many documents the first context has by the published rule.

        A context is full when it has `block_size` documents, or when the longest possible document might not fit any
        more. The words of the prompt do not count.
        """
        settings = self.settings
        left = (self.longest or sys.maxsize) - 2 * pairs[0].query.tokens_read
        for number, pair in enumerate(pairs, start=1):
            title = pair.text.title
            left -= pair.row.tokens_read + (0 if title is None else title.tokens_read)
            if number >= settings.block_size or left <= settings.longest_passage + settings.repeat_tokens:
                return number
        return len(pairs)

    def input_of(self, pairs: Sequence[PairInputs]) -> Input:
        """Return the context of some documents of a query."""
        query = pairs[0].query
        ids = self.ids(query.text_read, [self.passage(pair) for pair in pairs], query.instruction)
        return Input(np.asarray(ids, dtype=np.int32), (0, 0), (0, 0))

    def ids(self, query: str, passages: Sequence[str], instruction: str = "") -> list[int]:
        """Return the tokens of the prompt."""
        instruction, query, *passages = map(without_markers, (instruction, query, *passages))
        parts = [
            _BEGINNING.format(number=len(passages), query=query),
            _INSTRUCTION.format(instruction=instruction) if instruction else "",
            *(_PASSAGE.format(number=number, passage=passage) for number, passage in enumerate(passages)),
            _END.format(query=query),
        ]
        return list(self.tokenizer("".join(parts), truncation=False, verbose=False)["input_ids"])

    def passage(self, pair: PairInputs) -> str:
        """Return what is read of a document: all, its beginning, or its windows with marks for omitted text.

        Differs from the published code: a character whose bytes are in several tokens is never cut in two.
        """
        text, spans = pair.text, pair.spans
        selects = self.settings.preselect is not None
        if pair.row.tokens_read == pair.row.tokens:
            part = text.text
        elif not selects:
            part = text.text[: text.characters(spans[0])[1]]
        else:
            numbers = list(range(len(spans)))
            chosen = ChosenPassages(text.text, list(map(text.characters, spans)), numbers, is_complete=False)
            part = chosen.excerpt(numbers, ends=True)
        return join_lines("" if text.title is None else text.title.text, part)

    def describe(self) -> dict[str, Any]:
        return {**super().describe(), "longest_passage": self.settings.longest_passage}


def without_markers(text: str) -> str:
    """Return a text without the markers, also those that appear when others are removed."""
    while DOCUMENT_MARKER in text or QUERY_MARKER in text:
        text = text.replace(QUERY_MARKER, "").replace(DOCUMENT_MARKER, "")
    return text


class ListEncoder(WindowEncoder):
    """Encodes the documents of a query together, each as the projected state at its marker.

    The query's vector is that of its only context, or the mean of those of several contexts, weighted by `(1 + s) / 2`
    for the best cosine s in each. In training, the documents are in a random order: a sampled positive comes first.
    """

    blocks = staticmethod(lists)
    supports_openvino = False
    vector_kind = "documents of a list"
    reader: ListReader

    @property
    def has_random_layers(self) -> bool:
        """Whether the projection is not the checkpoint's."""
        return not getattr(self.origin, "trained", False)

    def make_reader(self, settings: Settings) -> ListReader:
        return ListReader(self.origin, settings)  # type: ignore[arg-type]

    def forward(self, pairs: Sequence[PairInputs], *, coverage: Coverage | None = None, **options: Any) -> Encoded:
        """Encode P documents; adjacent ones of one query are a list."""
        order, contexts = list[int](), list[list[Input]]()
        for _, run in groupby(range(len(pairs)), key=lambda number: id(pairs[number].query)):
            numbers = list(run)
            if self.training:
                numbers = [numbers[place] for place in torch.randperm(len(numbers)).tolist()]
            order += numbers
            contexts.append(list(self.reader.contexts([pairs[number] for number in numbers])))
        inputs = [context for of_list in contexts for context in of_list]
        kept = [np.isin(one.ids, self.reader.markers) for one in inputs]
        vectors = iter([self.representation(states).float() for states in self.token_states(inputs, coverage, kept)])
        queries, documents = list[torch.Tensor](), list[torch.Tensor]()
        for of_list in contexts:
            found = [next(vectors) for _ in of_list]  # (n + 1, E) each, the query last
            query, of_documents = self.query_of(found), torch.cat([each[:-1] for each in found])
            queries.append(query.expand_as(of_documents))
            documents.append(of_documents)
        back = torch.tensor(order, device=documents[0].device).argsort()
        query_vectors, vectors_of = torch.cat(queries)[back].unsqueeze(1), torch.cat(documents)[back].unsqueeze(1)
        mask = torch.ones(len(pairs), 1, dtype=torch.bool, device=back.device)
        return Encoded(vectors_of, mask, query=QueryStates(query_vectors, mask))

    def query_of(self, contexts: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the `(E,)` vector of a query from the `(n + 1, E)` vectors of its contexts."""
        if len(contexts) == 1:
            return contexts[0][-1]
        best = [nn.functional.cosine_similarity(each[:-1], each[-1:], dim=-1).amax() for each in contexts]
        weights = (1 + torch.stack(best).unsqueeze(1)) / 2
        return (weights * torch.stack([each[-1] for each in contexts])).sum(0) / weights.sum()
