"""Query and text in the words that a language model was trained with."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from ..common.arguments import argument, validate
from .tokens import TokenizedText

_QUERY, _TEXT = "{query}", "{text}"


@dataclass(frozen=True, kw_only=True)
class Template:
    """The words around a query and a text (a window) of which a model makes one score.

    An input is `prefix query middle text suffix`. `Template.of` takes it as one string.

    What is scored follows from the model: of a classification head the head's vector, whatever the `answers`; of an
    encoder-decoder the decoder's first state; of any other language model the state of the last token. On which side
    a model's owner pads makes no difference: no padding is ever seen here.

    Args:
        prefix: before the query.
        query: the query with words of its own, in which it is `{query}`.
        middle: between query and text.
        text: the text with words of its own, in which it is `{text}`.
        suffix: after the text; tokenized apart from it, as a text may be cut.
        answers: the score is the logit of the first less that of the second, whose sigmoid is the probability of the
            first among the two; or the logit of the only one. Words that are one token each, or ids of tokens. None
            for a model with a classification head, and for one that is to be trained.
        apart: tokenize each of the five parts by itself, as some models' owners do; otherwise the tokens are those of
            the parts in one string.
        special_tokens: with the special tokens that the tokenizer puts around a text.
        chat: the parts are what a user says: the chat template of the checkpoint is put around them, up to where the
            model begins to answer.

    Example:
        `ld.MaxP("my/ranker", template=ld.Template.of("Query: {query} Text: {text} Relevant:", answers=("yes", "no")))`.
    """

    prefix: str = ""
    query: str = _QUERY
    middle: str = ""
    text: str = _TEXT
    suffix: str = ""
    answers: tuple[str | int, ...] | None = None
    apart: bool = False
    special_tokens: bool = True
    chat: bool = argument(False, needs={"apart": False})

    def __post_init__(self) -> None:
        validate(self)
        slots = [part.count(slot) for part in self.parts for slot in (_QUERY, _TEXT)]
        if slots != [0, 0, 1, 0, 0, 0, 0, 1, 0, 0]:
            raise ValueError(f"Template: query must hold {{query}} once, and text {{text}}: {''.join(self.parts)!r}")
        if self.answers is None:
            return
        answers = tuple(self.answers) if isinstance(self.answers, tuple | list) else ()
        if len(answers) not in (1, 2) or not all(type(answer) in (str, int) for answer in answers):
            raise ValueError(f"Template: answers={self.answers!r} must be one or two words, ('yes', 'no') for instance")
        object.__setattr__(self, "answers", answers)

    @classmethod
    def of(cls, string: str, **options: Any) -> Template:
        """Return the template that is this string, with `{query}` and then `{text}` once each."""
        before, _, rest = string.partition(_QUERY)
        between, found, after = rest.partition(_TEXT)
        if not found:
            raise ValueError(
                f"template={string!r} must hold {{query}} and then {{text}}, or be one of {', '.join(TEMPLATES)}"
            )
        return cls(prefix=before, middle=between, suffix=after, **options)

    @property
    def parts(self) -> tuple[str, str, str, str, str]:
        """The five parts in order."""
        return self.prefix, self.query, self.middle, self.text, self.suffix

    @property
    def around(self) -> tuple[str, str, str]:
        """What stands before the query, between query and text, and after the text."""
        before, _, rest = "".join(self.parts).partition(_QUERY)
        between, _, after = rest.partition(_TEXT)
        return before, between, after

    def fill(self, query: str, text: str) -> str:
        """Return the input for a query and a text, without special tokens of the tokenizer."""
        before, between, after = self.around
        return before + query + between + text + after

    def within(self, tokenizer: Any) -> Template:
        """Return the template with the chat template of a tokenizer put around it, if it asks for that.

        Thinking is switched off where the chat template knows of that: the answer is asked for at once.
        """
        if not self.chat:
            return self
        said = [{"role": "user", "content": self.fill(_QUERY, _TEXT)}]
        whole = tokenizer.apply_chat_template(said, tokenize=False, add_generation_prompt=True, enable_thinking=False)
        return Template.of(whole, answers=self.answers, special_tokens=False)


TEMPLATES: Mapping[str, Template] = MappingProxyType(
    {
        # For language models that are to be trained.
        "plain": Template.of("query: {query}\ndocument: {text}"),
        # The format in the model cards of Qwen3-Reranker 0.6B, 4B and 8B, with their default instruction; that of
        # their conversions to sequence classification is the same.
        "qwen3-reranker": Template.of(
            "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
            'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
            "<Instruct>: Given a web search query, retrieve relevant passages that answer the query\n"
            "<Query>: {query}\n<Document>: {text}<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n",
            answers=("yes", "no"),
            special_tokens=False,
        ),
        # mxbai-rerank-base-v2 and -large-v2: `mxbai_rerank/mxbai_rerank_v2.py` of mixedbread-ai/mxbai-rerank.
        "mxbai-rerank-v2": Template(
            prefix="<|im_start|>system\nYou are Qwen, created by Alibaba Cloud. You are a helpful assistant."
            "<|im_end|>\n<|im_start|>user\n",
            query="query: {query}",
            middle="\n",
            text="document: {text}",
            suffix="\nYou are a search relevance expert who evaluates how well documents match search queries. For "
            "each query-document pair, carefully analyze the semantic relationship between them, then provide your "
            "binary relevance judgment (0 for not relevant, 1 for relevant).\nRelevance:<|im_end|>\n"
            "<|im_start|>assistant\n",
            answers=("1", "0"),
            apart=True,
            special_tokens=False,
        ),
        # bge-reranker-v2-gemma: `FlagEmbedding/inference/reranker/decoder_only/base.py` of FlagOpen/FlagEmbedding.
        "bge-reranker-v2-gemma": Template(
            query="A: {query}",
            middle="\n",
            text="B: {text}",
            suffix="\nGiven a query A and a passage B, determine whether the passage contains an answer to the query "
            "by providing a prediction of either 'Yes' or 'No'.",
            answers=("Yes",),
            apart=True,
        ),
        # Nogueira et al. 2020, section 3.
        "monot5": Template.of("Query: {query} Document: {text} Relevant:", answers=("true", "false")),
        # The question of Liang et al. 2022 (HELM, information retrieval), with the query before the passage.
        "yes-no": Template.of(
            "Query: {query}\nDoes the passage answer the query? Answer 'Yes' or 'No'.\nPassage: {text}",
            answers=("Yes", "No"),
            chat=True,
        ),
    }
)
"""Templates by name, each with its source in a comment."""


def resolve_template(template: str | Template) -> Template:
    """Return the template of that name, the one that is that string, or the given one."""
    if isinstance(template, str):
        return TEMPLATES[template] if template in TEMPLATES else Template.of(template)
    return template


def template_of_roles(
    tokenizer: Any, *, prompt: str = "", structured: bool = False, arguments: Mapping[str, Any] = MappingProxyType({})
) -> Template:
    """Return what a chat template makes of messages of the roles `query` and `document`, without answers.

    This is how sentence-transformers (5.4 and later) and vLLM read pairs.
    """
    contents = {"system": prompt, "query": _QUERY, "document": _TEXT}
    messages = [
        {"role": role, "content": [{"type": "text", "text": content}] if structured else content}
        for role, content in contents.items()
        if content
    ]
    return Template.of(tokenizer.apply_chat_template(messages, tokenize=False, **arguments), special_tokens=False)


def names_roles(tokenizer: Any) -> bool:
    """Tell whether a chat template speaks of the roles `query` and `document`; most let any role through unseen."""
    words = str(tokenizer.chat_template or "")
    return all(re.search(rf"""["']{role}["']""", words) for role in ("query", "document"))


class Wording(NamedTuple):
    """A template in a tokenizer's tokens: what is read around query and text, and with them."""

    prefix: tuple[int, ...]  # token ids before the query
    middle: tuple[int, ...]  # token ids between query and text
    suffix: tuple[int, ...]  # token ids after the text
    query_lead: str  # white space that is tokenized with a query, before it
    text_lead: str  # the same for a text
    query_trail: str = ""  # line breaks that are tokenized with a query, after it
    query_trail_size: int = 0  # how many tokens these take when on their own


def wording(tokenizer: Any, template: Template) -> Wording:
    """Return the tokens in which a query and a window become those of the filled-in template.

    White space at the seams is what tokenizers treat differently: byte-level BPE joins a space to the word after it
    and a line break to the punctuation before it. It is tokenized with query or text where that gives the tokens of the
    template as a whole, which is tried with a probe. What follows the text is always tokenized apart from it, as a text
    may be cut; and so are all words of the template where one of them would share a token with query or text, as in
    `Query:{query}`.
    """
    if not template.apart:
        before, between, after = template.around
        trail = between[: len(between) - len(between.lstrip("\n"))]
        found = _seams(tokenizer, template.around, (trail, ""), special_tokens=template.special_tokens)
        if found is not None:
            prefix, middle, suffix = found.around
            query_lead, text_lead = (lead or "" for lead in found.leads)
            return Wording(prefix, middle, suffix, query_lead, text_lead, trail, len(_ids(tokenizer, trail)))
        template = replace(template, prefix=before, query=_QUERY, middle=between, text=_TEXT, suffix=after)
    begin, end = _specials(tokenizer) if template.special_tokens else ((), ())
    query, text = (
        seams(tokenizer, *part.split(slot)) for part, slot in ((template.query, _QUERY), (template.text, _TEXT))
    )
    return Wording(
        prefix=(*begin, *_ids(tokenizer, template.prefix), *query.around[0]),
        middle=(*query.around[1], *_ids(tokenizer, template.middle), *text.around[0]),
        suffix=(*text.around[1], *_ids(tokenizer, template.suffix), *end),
        query_lead=query.leads[0] or "",
        text_lead=text.leads[0] or "",
    )


class Seams(NamedTuple):
    """Token ids around the slots of a string, and the white space that is tokenized with what fills each slot."""

    around: list[tuple[int, ...]]
    leads: list[str | None]


def seams(tokenizer: Any, before: str, after: str) -> Seams:
    """Return the tokens of the words around one slot, by themselves where one shares a token with what fills it."""
    apart = Seams([tuple(_ids(tokenizer, before)), tuple(_ids(tokenizer, after))], [None])
    return _seams(tokenizer, (before, after), ("",), special_tokens=False) or apart


def _seams(tokenizer: Any, pieces: Sequence[str], trails: Sequence[str], *, special_tokens: bool) -> Seams | None:
    """Return what is read around the slots between pieces of a string, tried with a probe in each slot.

    A space before a slot is dropped (WordPiece), or belongs to the first token in it, which either brings it along
    (SentencePiece) or must be given it (byte-level BPE). Trails are the beginnings of pieces that are tokenized with
    the slot before them. None where a token takes in more than white space beside a slot, as `:a` in `Query:a` may be.
    """
    probe = "a"
    string = probe.join(pieces)
    whole = tokenizer(string, return_offsets_mapping=True, add_special_tokens=special_tokens)
    ids, offsets = whole["input_ids"], whole["offset_mapping"]
    around, leads, past, end = [], [], 0, 0
    for piece, trail in zip(pieces, trails, strict=False):
        start = end + len(piece)
        end = start + len(probe)
        inside = [i for i, (a, b) in enumerate(offsets) if a < end + len(trail) and b > start]
        if not inside:
            raise ValueError(
                "the tokenizer of this checkpoint makes no token of a word: its tokenizer.json is not of the kind as "
                "which transformers loads it"
            )
        first, last = inside[0], inside[-1]
        if (string[offsets[first][0] : start] + string[end + len(trail) : offsets[last][1]]).strip():
            return None
        around.append(tuple(ids[past:first]))
        leads.append(_lead(tokenizer, piece, probe + trail, ids[first : last + 1]))
        past = last + 1
    return Seams([*around, tuple(ids[past:])], leads)


def _lead(tokenizer: Any, piece: str, probe: str, expected: list[int]) -> str | None:
    """Return the white space at the end of `piece` that must be tokenized with what follows; None if no such does."""
    space = piece[len(piece.rstrip()) :]
    return next((lead for lead in ("", space, " ") if _ids(tokenizer, lead + probe) == expected), None)


def _specials(tokenizer: Any) -> tuple[list[int], list[int]]:
    """Return what the tokenizer puts before a text and after it."""
    encoded = tokenizer("a")
    ids, real = encoded["input_ids"], [side is not None for side in encoded.sequence_ids()]
    return ids[: real.index(True)], ids[len(real) - real[::-1].index(True) :]


def _ids(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def with_trail(
    tokenize: Callable[[Sequence[str]], list[TokenizedText]],
    words: Any,
    queries: Sequence[str],
    cut: Sequence[np.ndarray],
) -> list[np.ndarray]:
    """Return the token ids of Q queries and of what follows each in the template; `cut` are those of queries alone."""
    filled = [words.query_lead + query + words.query_trail for query in queries]
    *whole, trail = (document.ids for document in tokenize([*filled, words.query_trail]))
    fits = [len(ids) <= len(query) + len(trail) for ids, query in zip(whole, cut, strict=True)]
    return [ids if fit else np.concatenate([query, trail]) for ids, query, fit in zip(whole, cut, fits, strict=True)]
