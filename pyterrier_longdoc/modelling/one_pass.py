"""All candidates of a query in one sequence, read in one pass: a vector of each document and of the query, by cosine.

The form of jina-reranker-v3 (Wang, Li & Xiao 2025, arXiv 2509.25085), after the modelling code that is published with
its weights: documents and then the query stand in one chat prompt, each followed by a token of its own, whose last
state goes through a projector of two layers. The paper says 256 dimensions, the published code 512; here the weights
decide. Attention is causal, so that a document's vector depends on those before it, and on the query, which is also
named at the beginning.

Shapes: D documents of a block, T tokens of its prompt, H hidden size, E width of the projector.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from torch import nn
from transformers import AutoModel

from ..common.coverage import LeftOut, Reading
from ..common.hub import find_file, reachable
from .backbones.load import load_tokenizer
from .devices import dtype_name, in_own_memory, resolve_device, resolve_dtype

DOCUMENT_TOKEN, QUERY_TOKEN = "<|embed_token|>", "<|rerank_token|>"
"""Stand after each document and after the query; their last states are the vectors."""

# The words of the prompt that the published weights were trained with.
SYSTEM = (
    "You are a search relevance expert who can determine a ranking of the passages based on how relevant they are to "
    "the query. If the query is a question, how relevant a passage is depends on how well it answers the question. If "
    "not, try to analyze the intent of the query and assess how well each passage satisfies the intent. If an "
    "instruction is provided, you should follow the instruction when determining the ranking."
)
OPENING = (
    f"<|im_start|>system\n{SYSTEM}<|im_end|>\n<|im_start|>user\nI will provide you with {{n}} passages, each indicated "
    "by a numerical identifier. Rank the passages based on their relevance to query: {query}\n"
)
PASSAGE = f'<passage id="{{number}}">\n{{text}}{DOCUMENT_TOKEN}\n</passage>\n'
CLOSING = f"<query>\n{{query}}{QUERY_TOKEN}\n</query><|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"


@dataclass(frozen=True)
class Limits:
    """How much of a query and its documents stands in a prompt.

    Attributes:
        doc: most tokens of a document; None for all that fit into a prompt.
        query: most tokens of a query.
        documents: most documents in a prompt.
        tokens: most tokens of a prompt; None for the longest input of the backbone.
    """

    doc: int | None
    query: int
    documents: int
    tokens: int | None


@dataclass(frozen=True, eq=False)
class ListRead:
    """What is read for one query.

    Attributes:
        query: the query as it is shown.
        query_tokens: of it, and of all of it.
        blocks: the documents of each prompt, as they are shown.
        readings: how much of each document that is, and why not more.
    """

    query: str
    query_tokens: tuple[int, int]
    blocks: list[list[str]]
    readings: list[tuple[Reading, LeftOut]]


class OnePassEncoder(nn.Module):
    """A causal language model that reads all candidates of a query in one sequence.

    Args:
        backbone: gives the last states of a sequence.
        projector: what states go through before they are compared.
        tokenizer: knows the two special tokens.
    """

    def __init__(self, backbone: Any, projector: nn.Module, tokenizer: Any) -> None:
        super().__init__()
        self.backbone, self.projector, self.tokenizer = backbone, projector, tokenizer
        self.longest = min(tokenizer.model_max_length, backbone.config.max_position_embeddings)

    def use(self, device: str | None, dtype: str | None) -> str:
        """Computes on this device with this precision from now on; returns the name of the latter."""
        self.device = resolve_device(device)
        self.dtype = resolve_dtype(dtype, self.device)
        self.to(self.device)
        return dtype_name(self.dtype)

    def read(self, query: str, texts: Sequence[str], limits: Limits) -> ListRead:
        """What stands in the prompts of a query, as many documents in each as fit.

        Raises:
            ValueError: if a prompt has no room for a document.
        """
        most = min(limits.tokens or self.longest, self.longest)
        query, kept, of_query = self._cut(query, limits.query)
        frame = self._length(OPENING.format(n=limits.documents, query=query)) + self._length(
            CLOSING.format(query=query)
        )
        # Of the longest number, and one more token where a text and what is around it may be divided otherwise.
        around = self._length(PASSAGE.format(number=limits.documents - 1, text="")) + 1
        room = most - frame - around
        if room < 1:
            raise ValueError(
                f"max_block_tokens={most} leaves no room for a document beside the query and the instructions, which "
                f"take {frame + around} tokens; raise it, or lower max_query_len={limits.query}"
            )
        blocks: list[list[str]] = []
        readings, left = [], 0
        for text in texts:
            shown, length, whole = self._cut(text, room if limits.doc is None else min(limits.doc, room))
            beyond = 0 if limits.doc is None else max(whole - limits.doc, 0)
            readings.append((Reading(whole, length, windows=1), LeftOut(beyond=beyond)))
            if not blocks or len(blocks[-1]) == limits.documents or left < length + around:
                blocks.append([])
                left = most - frame
            blocks[-1].append(shown)
            left -= length + around
        return ListRead(query, (kept, of_query), blocks, readings)

    @torch.inference_mode()
    def score(self, read: ListRead) -> tuple[np.ndarray, int]:
        """Cosines of all documents with the mean query, in their order; and the tokens that were computed.

        Each block has a vector of the query; its weight in the mean is that of the block's best document, as published,
        so that cosines of several blocks can be compared.

        Raises:
            FloatingPointError: if a score is not finite.
        """
        encoded = [self.encode(self.prompt(read.query, block)) for block in read.blocks]
        weights = [
            (1 + nn.functional.cosine_similarity(docs, query[None]).max().item()) / 2 for query, docs, _ in encoded
        ]
        query = np.average([query.double().cpu().numpy() for query, _, _ in encoded], axis=0, weights=weights)
        documents = torch.cat([documents for _, documents, _ in encoded]).double().cpu().numpy()
        scores = documents @ query / (np.linalg.norm(documents, axis=1) * np.linalg.norm(query))
        if not np.isfinite(scores).all():
            raise FloatingPointError(f"{(~np.isfinite(scores)).sum()} of {len(scores)} scores are not finite")
        return scores, sum(length for _, _, length in encoded)

    def prompt(self, query: str, texts: Sequence[str]) -> str:
        """The sequence for D documents."""
        shown = "".join(PASSAGE.format(number=number, text=text) for number, text in enumerate(texts))
        return OPENING.format(n=len(texts), query=query) + shown + CLOSING.format(query=query)

    def encode(self, prompt: str) -> tuple[torch.Tensor, torch.Tensor, int]:
        """`(E,)` of the query and `(D, E)` of the documents, in float32; and T."""
        ids = torch.tensor([self.tokenizer(prompt)["input_ids"]], device=self.device)
        with torch.autocast(self.device.type, self.dtype, enabled=self.dtype != torch.float32):
            states = self.backbone(input_ids=ids, use_cache=False).last_hidden_state[0]
            of_query, of_documents = (
                self.projector(states[ids[0] == self.tokenizer.convert_tokens_to_ids(token)]).float()
                for token in (QUERY_TOKEN, DOCUMENT_TOKEN)
            )
        return of_query[0], of_documents, ids.shape[1]

    def _cut(self, text: str, limit: int) -> tuple[str, int, int]:
        """A text of at most `limit` tokens without the special ones, its tokens, and those of all of it."""
        # What is left of a text without a token may be a token again.
        while QUERY_TOKEN in text or DOCUMENT_TOKEN in text:
            text = text.replace(QUERY_TOKEN, "").replace(DOCUMENT_TOKEN, "")
        ids = self._ids(text)
        end = limit
        # Tokens of a beginning may be others than the beginning of the tokens.
        while len(kept := self._ids(shown := text if len(ids) <= limit else self.tokenizer.decode(ids[:end]))) > limit:
            end -= 1
        return shown, len(kept), len(ids)

    def _length(self, text: str) -> int:
        return len(self._ids(text))

    def _ids(self, text: str) -> list[int]:
        # Whole documents are longer than inputs may be, of which tokenizers warn.
        ids: list[int] = self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        return ids


def load_one_pass_encoder(name: str) -> OnePassEncoder:
    """Loads a checkpoint of the form of jina-reranker-v3, in float32; its own code is not run.

    Args:
        name: a model on the Hugging Face hub, or a folder.

    Raises:
        ValueError: if it lacks the special tokens, the projector, or weights of the backbone.
        OSError: if the hub cannot be asked and there is no copy of the checkpoint on this machine.
    """
    place = reachable(name)
    tokenizer = load_tokenizer(place)
    lacking = [token for token in (DOCUMENT_TOKEN, QUERY_TOKEN) if len(tokenizer.tokenize(token)) != 1]
    if lacking:
        raise ValueError(
            f"the tokenizer of checkpoint {name!r} has no special token {' and no '.join(lacking)}, which stand after "
            f"documents and queries: use a checkpoint such as 'jinaai/jina-reranker-v3'"
        )
    projector = _projector(name, place)
    backbone, info = AutoModel.from_pretrained(place, dtype=torch.float32, output_loading_info=True)
    if info["missing_keys"]:
        missing = sorted(info["missing_keys"])
        raise ValueError(f"checkpoint {name!r} lacks {len(missing)} weights of its backbone, {missing[0]} among them")
    in_own_memory(backbone)
    return OnePassEncoder(backbone, projector, tokenizer).eval()


def _projector(name: str, place: str) -> nn.Sequential:
    file, weights = find_file(place, "model.safetensors"), {}
    if file is not None:
        with safe_open(file, framework="pt") as opened:
            names = [key for key in opened.keys() if key.startswith("projector.")]  # noqa: SIM118 - no dictionary
            weights = {key.removeprefix("projector."): opened.get_tensor(key).float() for key in names}
    if set(weights) != {"0.weight", "2.weight"}:
        raise ValueError(
            f"checkpoint {name!r} has no projector (projector.0.weight and projector.2.weight in model.safetensors), "
            f"which makes vectors of states: use a checkpoint such as 'jinaai/jina-reranker-v3'"
        )
    (inner, hidden), (outer, _) = weights["0.weight"].shape, weights["2.weight"].shape
    projector = nn.Sequential(nn.Linear(hidden, inner, bias=False), nn.ReLU(), nn.Linear(inner, outer, bias=False))
    projector.load_state_dict(weights)
    return projector
