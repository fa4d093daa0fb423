"""Query and text in the words that a language model was trained with."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from ...common.arguments import plain_fields
from ..batching import PairLayout
from ..texts import TokenizedText

_QUERY, _TEXT = "{query}", "{text}"
_PARTS = ("prefix", "query", "middle", "text", "suffix")


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

    Raises:
        ValueError: if `query` does not hold `{query}` once, or `text` not `{text}`, or the answers are not one or two.

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
    chat: bool = False

    def __post_init__(self) -> None:
        plain_fields(self)
        for name in _PARTS:
            if not isinstance(getattr(self, name), str):
                raise ValueError(f"{name}={getattr(self, name)!r} of a template must be a text")
        slots = [part.count(slot) for part in self.parts for slot in (_QUERY, _TEXT)]
        if slots != [0, 0, 1, 0, 0, 0, 0, 1, 0, 0]:
            raise ValueError(
                f"a template must hold {{query}} once, in query, and {{text}} once, in text: "
                f"{''.join(self.parts)!r} does not"
            )
        for name in ("apart", "special_tokens", "chat"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name}={getattr(self, name)!r} of a template must be True or False")
        if self.chat and self.apart:
            raise ValueError("chat=True is for a template that is tokenized as one string: leave apart=False")
        if self.answers is not None:
            object.__setattr__(self, "answers", _checked(self.answers))

    @classmethod
    def of(cls, string: str, **options: Any) -> Template:
        """The template that is this string.

        Args:
            string: with `{query}` and then `{text}`, once each.
            **options: `answers`, `special_tokens` and `chat`.

        Raises:
            ValueError: unless they are in it.
        """
        before, _, rest = string.partition(_QUERY)
        between, found, after = rest.partition(_TEXT)
        if not found or any(slot in part for slot in (_QUERY, _TEXT) for part in (before, between, after)):
            raise ValueError(
                f"template={string!r} must hold {{query}} and then {{text}}, once each, or be one of "
                f"{', '.join(TEMPLATES)}"
            )
        return cls(prefix=before, middle=between, suffix=after, **options)

    @property
    def parts(self) -> tuple[str, str, str, str, str]:
        """`prefix query middle text suffix`."""
        return self.prefix, self.query, self.middle, self.text, self.suffix

    @property
    def around(self) -> tuple[str, str, str]:
        """What stands before the query, between query and text, and after the text."""
        before, _, rest = "".join(self.parts).partition(_QUERY)
        between, _, after = rest.partition(_TEXT)
        return before, between, after

    def fill(self, query: str, text: str) -> str:
        """The input for a query and a text, without special tokens of the tokenizer."""
        before, between, after = self.around
        return before + query + between + text + after

    def within(self, tokenizer: Any) -> Template:
        """The template with the chat template of a tokenizer put around it, if it asks for that.

        Thinking is switched off where the chat template knows of that: the answer is asked for at once.

        Raises:
            ValueError: if there is none, or it does not let the words through.
        """
        if not self.chat:
            return self
        if tokenizer.chat_template is None:
            raise ValueError(
                "this template is what a user says to a chat model (chat=True), but the checkpoint's tokenizer has no "
                "chat template: give the whole input, with chat=False"
            )
        said = [{"role": "user", "content": self.fill(_QUERY, _TEXT)}]
        try:
            whole = tokenizer.apply_chat_template(
                said, tokenize=False, add_generation_prompt=True, enable_thinking=False
            )
        except Exception as error:  # templates raise what they like
            raise ValueError(f"the chat template of the checkpoint's tokenizer fails: {error}") from error
        return Template.of(whole, answers=self.answers, special_tokens=False)


def _checked(answers: Any) -> tuple[str | int, ...]:
    given = answers if isinstance(answers, tuple | list) else ()
    if not 1 <= len(given) <= 2 or any(not isinstance(each, str | int) or isinstance(each, bool) for each in given):
        raise ValueError(
            f'answers={answers!r} must be two words, for a relevant and another text: ("yes", "no"), or one: ("Yes",)'
        )
    return tuple(given)


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


def resolve_template(template: object) -> Template:
    """The template of that name, the one that is that string, or the given one.

    Raises:
        ValueError: if it is none of these.
    """
    if isinstance(template, str):
        return TEMPLATES[template] if template in TEMPLATES else Template.of(template)
    if not isinstance(template, Template):
        raise ValueError(
            f"template={template!r} must be ld.Template(...), a text with {{query}} and {{text}}, or one of "
            f"{', '.join(TEMPLATES)}"
        )
    return template


def template_of_roles(
    tokenizer: Any, *, prompt: str = "", structured: bool = False, arguments: Mapping[str, Any] = MappingProxyType({})
) -> Template:
    """What a chat template makes of messages of the roles `query` and `document`.

    This is how sentence-transformers (5.4 and later) and vLLM read pairs.

    Args:
        tokenizer: with the chat template.
        prompt: a message of the role `system` before them; `""` for none.
        structured: contents are lists of parts, not strings.
        arguments: further ones of the chat template.

    Returns:
        The template, without answers.

    Raises:
        ValueError: if the chat template does not let both through, query first.
    """
    contents = {"system": prompt, "query": _QUERY, "document": _TEXT}
    messages = [
        {"role": role, "content": [{"type": "text", "text": content}] if structured else content}
        for role, content in contents.items()
        if content
    ]
    try:
        whole = tokenizer.apply_chat_template(messages, tokenize=False, **arguments)
        return Template.of(whole, special_tokens=False)
    except Exception as error:  # templates raise what they like for roles that they do not know
        raise ValueError(
            "the checkpoint reads query and text through its chat template, which does not let messages of the roles "
            "query and document through, in this order and once each: say template=ld.Template(...)"
        ) from error


def names_roles(tokenizer: Any) -> bool:
    """Whether a chat template speaks of the roles `query` and `document`; most let any role through unseen."""
    words = str(tokenizer.chat_template or "")
    return all(re.search(rf"""["']{role}["']""", words) for role in ("query", "document"))


def template_layout(tokenizer: Any, template: Template) -> PairLayout:
    """The layout in which a query and a window are the tokens of the filled-in template.

    White space at the seams is what tokenizers treat differently: byte-level BPE joins a space to the word after it
    and a line break to the punctuation before it. It is tokenized with query or text where that gives the tokens of the
    template as a whole, which is tried with a probe. What follows the text is always tokenized apart from it, as a text
    may be cut; and so are all words of the template where one of them would share a token with query or text, as in
    `Query:{query}`.
    """
    return _apart(tokenizer, template) if template.apart else _joined(tokenizer, template)


def _joined(tokenizer: Any, template: Template) -> PairLayout:
    before, between, after = template.around
    trail = between[: len(between) - len(between.lstrip("\n"))]
    probe = "a"
    filled = template.fill(probe, probe)
    whole = tokenizer(filled, return_offsets_mapping=True, add_special_tokens=template.special_tokens)
    ids, offsets = whole["input_ids"], whole["offset_mapping"]
    text_start = len(before + probe + between)
    places = (len(before), len(before + probe + trail)), (text_start, text_start + len(probe))
    if any(_glued(filled, offsets, *place) for place in places):
        words = replace(template, prefix=before, query=_QUERY, middle=between, text=_TEXT, suffix=after)
        return _apart(tokenizer, words)
    query, text = (_tokens_at(offsets, *place) for place in places)
    return PairLayout(
        prefix=tuple(ids[: query[0]]),
        middle=tuple(ids[query[1] : text[0]]),
        suffix=tuple(ids[text[1] :]),
        types=None,
        pad_id=tokenizer.pad_token_id or 0,
        query_lead=_lead(tokenizer, before, probe + trail, ids[query[0] : query[1]]) or "",
        query_trail=trail,
        query_trail_size=len(_ids(tokenizer, trail)),
        text_lead=_lead(tokenizer, between, probe, ids[text[0] : text[1]]) or "",
    )


def _apart(tokenizer: Any, template: Template) -> PairLayout:
    begin, end = _specials(tokenizer) if template.special_tokens else ((), ())
    query, text = (
        seams_around(tokenizer, *part.split(slot)) for part, slot in ((template.query, _QUERY), (template.text, _TEXT))
    )
    return PairLayout(
        prefix=(*begin, *_ids(tokenizer, template.prefix), *query.before),
        middle=(*query.after, *_ids(tokenizer, template.middle), *text.before),
        suffix=(*text.after, *_ids(tokenizer, template.suffix), *end),
        types=None,
        pad_id=tokenizer.pad_token_id or 0,
        query_lead=query.lead,
        text_lead=text.lead,
    )


class Seams(NamedTuple):
    """What is read around a query or a text.

    Attributes:
        before: token ids before it.
        lead: white space that is tokenized with it, before it; `""` if none.
        after: token ids after it.
        exact: whether before, what is led, and after are the tokens of one string.
    """

    before: list[int]
    lead: str
    after: list[int]
    exact: bool


def seams_around(tokenizer: Any, before: str, after: str) -> Seams:
    """The tokens of the words around a query or a text, which is tokenized apart from them; tried with a probe.

    A space before it is dropped (WordPiece), or belongs to its first token, which either brings it along
    (SentencePiece) or must be given it (byte-level BPE). Where one of its tokens has more than white space of the words
    around it, as in `Query:{query}`, these are tokenized by themselves.
    """
    probe = "a"
    filled, place = before + probe + after, (len(before), len(before + probe))
    whole = tokenizer(filled, return_offsets_mapping=True, add_special_tokens=False)
    ids, offsets = whole["input_ids"], whole["offset_mapping"]
    if _glued(filled, offsets, *place):
        return Seams(_ids(tokenizer, before), "", _ids(tokenizer, after), exact=False)
    start, end = _tokens_at(offsets, *place)
    lead = _lead(tokenizer, before, probe, ids[start:end])
    return Seams(ids[:start], lead or "", ids[end:], exact=lead is not None)


def _specials(tokenizer: Any) -> tuple[list[int], list[int]]:
    """What the tokenizer puts before a text and after it."""
    encoded = tokenizer("a")
    ids, real = encoded["input_ids"], [side is not None for side in encoded.sequence_ids()]
    return ids[: real.index(True)], ids[len(real) - real[::-1].index(True) :]


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
    filled = [layout.query_lead + query + layout.query_trail for query in queries]
    *whole, trail = (document.ids for document in tokenize([*filled, layout.query_trail]))
    fits = [len(ids) <= len(query) + len(trail) for ids, query in zip(whole, cut, strict=True)]
    return [ids if fit else np.concatenate([query, trail]) for ids, query, fit in zip(whole, cut, fits, strict=True)]


def _tokens_at(offsets: Sequence[tuple[int, int]], start: int, end: int) -> tuple[int, int]:
    """Half-open range of the tokens that share a character with `[start, end)`.

    Raises:
        ValueError: if there are none.
    """
    found = [i for i, (a, b) in enumerate(offsets) if a < end and b > start]
    if not found:
        raise ValueError(
            "the tokenizer of this checkpoint makes no token of the word that was put into the template to try it: its "
            "tokenizer.json is not of the kind as which transformers loads it"
        )
    return found[0], found[-1] + 1


def _glued(string: str, offsets: Sequence[tuple[int, int]], start: int, end: int) -> bool:
    """Whether a token at `[start, end)` takes in more than white space beside it, as `:a` in `Query:a` may be one."""
    first, past = _tokens_at(offsets, start, end)
    return bool((string[offsets[first][0] : start] + string[end : offsets[past - 1][1]]).strip())


def _lead(tokenizer: Any, piece: str, probe: str, expected: list[int]) -> str | None:
    """The white space at the end of `piece` that must be tokenized with what follows; None if no such does it."""
    space = piece[len(piece.rstrip()) :]
    return next((lead for lead in ("", space, " ") if _ids(tokenizer, lead + probe) == expected), None)


def _ids(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])
