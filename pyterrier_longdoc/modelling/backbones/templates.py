"""Query and document in the words that a language model was trained with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ..batching import PairLayout
from ..texts import TokenizedText

TEMPLATES = {
    "plain": "query: {query}\ndocument: {document}",
    "qwen3-reranker": (
        "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
        'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
        "<Instruct>: Given a web search query, retrieve relevant passages that answer the query\n"
        "<Query>: {query}\n<Document>: {document}<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
    ),
}
"""Templates by name; that of Qwen3-Reranker is the format its checkpoints were trained with (their model card)."""


def resolve_template(template: str) -> str:
    """The template of that name, or the given text.

    Raises:
        ValueError: unless `{query}` and then `{document}` occur once each.
    """
    if not isinstance(template, str):
        raise ValueError(f"template={template!r} must be a text or one of {', '.join(TEMPLATES)}")
    text = TEMPLATES.get(template, template)
    if text.count("{query}") != 1 or text.count("{document}") != 1 or text.index("{query}") > text.index("{document}"):
        raise ValueError(
            f"template={template!r} must hold {{query}} and then {{document}}, once each, or be one of "
            f"{', '.join(TEMPLATES)}"
        )
    return text


def template_layout(tokenizer: Any, template: str) -> PairLayout:
    """The layout in which a query and a window are the tokens of the filled-in template.

    White space at the seams is what tokenizers treat differently: byte-level BPE joins a space to the word after it
    and a line break to the punctuation before it. It is tokenized with query or text where that gives the tokens of the
    template as a whole, which is tried with a probe. What follows the text is always tokenized apart from it, as a text
    may be cut. Special tokens that the tokenizer adds to a text are kept.
    """
    before, rest = resolve_template(template).split("{query}")
    between, after = rest.split("{document}")
    trail = between[: len(between) - len(between.lstrip("\n"))]
    probe = "a"
    whole = tokenizer(before + probe + between + probe + after, return_offsets_mapping=True)
    ids, offsets = whole["input_ids"], whole["offset_mapping"]
    query_start = len(before)
    query = _tokens_at(offsets, query_start, query_start + len(probe + trail))
    text_start = query_start + len(probe + between)
    text = _tokens_at(offsets, text_start, text_start + len(probe))
    return PairLayout(
        prefix=tuple(ids[: query[0]]),
        middle=tuple(ids[query[1] : text[0]]),
        suffix=tuple(ids[text[1] :]),
        types=None,
        pad_id=tokenizer.pad_token_id or 0,
        query_lead=_lead(tokenizer, before, probe + trail, ids[query[0] : query[1]]),
        query_trail=trail,
        query_trail_size=len(_ids(tokenizer, trail)),
        text_lead=_lead(tokenizer, between, probe, ids[text[0] : text[1]]),
    )


def with_trail(
    tokenize: Callable[[Sequence[str]], list[TokenizedText]],
    layout: PairLayout,
    queries: Sequence[str],
    cut: Sequence[np.ndarray],
) -> list[np.ndarray]:
    """Token ids of queries and of what follows each in the template.

    Args:
        tokenize: a fast Hugging Face tokenizer as a function, see `texts.tokenize`.
        layout: of the template.
        queries: Q queries.
        cut: token ids of each query alone, cut to the longest that is allowed.
    """
    filled = [(layout.query_lead + query if query else "") + layout.query_trail for query in queries]
    *whole, trail = (document.ids for document in tokenize([*filled, layout.query_trail]))
    fits = [len(ids) <= len(query) + len(trail) for ids, query in zip(whole, cut, strict=True)]
    return [ids if fit else np.concatenate([query, trail]) for ids, query, fit in zip(whole, cut, fits, strict=True)]


def _tokens_at(offsets: Sequence[tuple[int, int]], start: int, end: int) -> tuple[int, int]:
    """Half-open range of the tokens that share a character with `[start, end)`."""
    found = [i for i, (a, b) in enumerate(offsets) if a < end and b > start]
    return found[0], found[-1] + 1


def _lead(tokenizer: Any, piece: str, probe: str, expected: list[int]) -> str:
    """The white space at the end of `piece` that must be tokenized with what follows; empty if none."""
    space = piece[len(piece.rstrip()) :]
    return next((lead for lead in ("", space, " ") if _ids(tokenizer, lead + probe) == expected), "")


def _ids(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])
