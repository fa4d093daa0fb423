"""Templates: the words around query and text with which a language model was trained."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, NamedTuple

from ..common.arguments import argument, validate

logger = logging.getLogger(__name__)

_QUERY, _TEXT = "{query}", "{text}"


@dataclass(frozen=True, kw_only=True)
class Template:
    """A prompt that turns a query and a text (a window) into one input of a model.

    An input is `prefix query middle text suffix`. `Template.of` creates it from one string.

    What is scored depends on the model: the vector of its classification head if it has one, otherwise the first
    decoder state of an encoder-decoder, otherwise the state of the last token. The padding side makes no difference.

    Args:
        prefix: before the query.
        query: a text with `{query}`.
        middle: between query and text.
        text: a text with `{text}`.
        suffix: after the text; tokenized separately, because the text can be truncated.
        answers: one or two words of one token each, or token ids. The score is the logit of the first answer, minus
            that of the second if there are two. The sigmoid of this difference is the probability of the first of the
            two. None for a model with a classification head, or for one that you train.
        apart: whether the five parts are tokenized separately, as the authors of some models do; otherwise they are
            tokenized as one string.
        special_tokens: whether the tokenizer adds its special tokens around the input.
        chat: whether the parts are a user's message, to which the checkpoint's chat template is applied.

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
            raise ValueError(f"Template: answers={self.answers!r} must be one or two words, such as ('yes', 'no')")
        object.__setattr__(self, "answers", answers)

    @classmethod
    def of(cls, string: str, **options: Any) -> Template:
        """Return a template from a string with `{query}` followed by `{text}`."""
        before, _, rest = string.partition(_QUERY)
        between, text_slot, after = rest.partition(_TEXT)
        if not text_slot:
            raise ValueError(
                f"template={string!r} must hold {{query}} and then {{text}}, or be one of {', '.join(TEMPLATES)}"
            )
        return cls(prefix=before, middle=between, suffix=after, **options)

    @property
    def parts(self) -> tuple[str, str, str, str, str]:
        """The five parts in order."""
        return self.prefix, self.query, self.middle, self.text, self.suffix

    @property
    def surroundings(self) -> tuple[str, str, str]:
        """The text before the query, between query and text, and after the text."""
        before, _, rest = "".join(self.parts).partition(_QUERY)
        between, _, after = rest.partition(_TEXT)
        return before, between, after

    def fill(self, query: str, text: str) -> str:
        """Return the input for a query and a text, without the tokenizer's special tokens."""
        before, between, after = self.surroundings
        return before + query + between + text + after

    def in_chat(self, tokenizer: Any) -> Template:
        """Return the template inside the tokenizer's chat template if `chat` is set, otherwise the template itself.

        Thinking is disabled if the chat template has an option for it, because the answer must be the first token.
        """
        if not self.chat:
            return self
        chat = [{"role": "user", "content": self.fill(_QUERY, _TEXT)}]
        prompt = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True, enable_thinking=False)
        return Template.of(prompt, answers=self.answers, special_tokens=False)


TEMPLATES: Mapping[str, Template] = MappingProxyType(
    {
        # For language models before their training.
        "plain": Template.of("query: {query}\ndocument: {text}"),
        # The format in the model cards of Qwen3-Reranker 0.6B, 4B and 8B, with their default instruction; their
        # conversions to sequence classification have the same.
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
    """Return the template of that name or of that string, or the template itself."""
    if isinstance(template, str):
        return TEMPLATES[template] if template in TEMPLATES else Template.of(template)
    return template


def template_of_roles(
    tokenizer: Any, *, prompt: str = "", structured: bool = False, arguments: Mapping[str, Any] = MappingProxyType({})
) -> Template:
    """Return a chat template for messages of the roles `query` and `document` as a template without answers.

    Sentence-transformers (5.4 and later) and vLLM read pairs so.
    """
    contents = {"system": prompt, "query": _QUERY, "document": _TEXT}
    messages = [
        {"role": role, "content": [{"type": "text", "text": content}] if structured else content}
        for role, content in contents.items()
        if content
    ]
    return Template.of(tokenizer.apply_chat_template(messages, tokenize=False, **arguments), special_tokens=False)


def names_roles(tokenizer: Any) -> bool:
    """Tell whether a chat template names the roles `query` and `document`; most accept any role unchecked."""
    chat_template = str(tokenizer.chat_template or "")
    return all(re.search(rf"""["']{role}["']""", chat_template) for role in ("query", "document"))


class Wording(NamedTuple):
    """A template in a tokenizer's tokens: the tokens around query and text, and the characters joined to them."""

    prefix: tuple[int, ...]  # token ids before the query
    middle: tuple[int, ...]  # token ids between query and text
    suffix: tuple[int, ...]  # token ids after the text
    query_lead: str  # white space that is tokenized with a query, before it
    text_lead: str  # the same for a text
    query_trail: str = ""  # line breaks that are tokenized with a query, after it
    query_trail_size: int = 0  # how many tokens these are by themselves


def wording(tokenizer: Any, template: Template) -> Wording:
    """Return the tokens around a query and a window, so that the input has the tokens of the filled-in template.

    Tokenizers differ in white space at the seams: byte-level BPE joins a space to the word after it and a line break to
    the punctuation before it. White space is tokenized with query or text if that gives the tokens of the whole
    template; a probe word tells. The words after the text are always tokenized separately, because the text may be cut.
    So are all words of a template of which one would share a token with query or text, as in `Query:{query}`, or beside
    which the probe has other tokens than alone.
    """
    if not template.apart:
        before, between, after = template.surroundings
        trail = between[: len(between) - len(between.lstrip("\n"))]
        template_seams = _seams(tokenizer, template.surroundings, (trail, ""), special_tokens=template.special_tokens)
        if template_seams is not None:
            prefix, middle, suffix = template_seams.surroundings
            query_lead, text_lead = template_seams.leads
            return Wording(prefix, middle, suffix, query_lead, text_lead, trail, len(_ids(tokenizer, trail)))
        template = replace(template, prefix=before, query=_QUERY, middle=between, text=_TEXT, suffix=after)
    begin, end = _specials(tokenizer) if template.special_tokens else ((), ())
    query, text = (
        seams(tokenizer, *part.split(slot)) for part, slot in ((template.query, _QUERY), (template.text, _TEXT))
    )
    return Wording(
        prefix=(*begin, *_ids(tokenizer, template.prefix), *query.surroundings[0]),
        middle=(*query.surroundings[1], *_ids(tokenizer, template.middle), *text.surroundings[0]),
        suffix=(*text.surroundings[1], *_ids(tokenizer, template.suffix), *end),
        query_lead=query.leads[0],
        text_lead=text.leads[0],
    )


class Seams(NamedTuple):
    """Token ids around the slots of a string, and the white space that is tokenized with the content of each slot."""

    surroundings: list[tuple[int, ...]]
    leads: list[str]
    apart: bool = False  # whether the words around the slot are tokenized separately


def seams(tokenizer: Any, before: str, after: str) -> Seams:
    """Return the tokens of the words around one slot, tokenized separately if one shares a token with its content."""
    separate_seams = Seams([tuple(_ids(tokenizer, before)), tuple(_ids(tokenizer, after))], [""], apart=True)
    return _seams(tokenizer, (before, after), ("",), special_tokens=False) or separate_seams


def prefix_tokens(tokenizer: Any, prefix: str) -> tuple[tuple[int, ...], str]:
    """Return the tokens of a prefix, and the white space to put before a text after it.

    A byte-level tokenizer of words begins a word's token with the space before it, so that this space belongs to the
    text. Later windows of a text begin with their own tokens: one that begins with a word has its space, one that
    begins inside a word or at a punctuation mark follows the prefix without a space.
    """
    around = seams(tokenizer, prefix, "")
    if around.apart:
        logger.warning("prefix %r is tokenized separately from the text after it: end it with a space", prefix)
    return around.surroundings[0], around.leads[0]


def _seams(tokenizer: Any, pieces: Sequence[str], trails: Sequence[str], *, special_tokens: bool) -> Seams | None:
    """Return the tokens around the slots between pieces of a string, found with a probe word in each slot.

    A space before a slot is dropped (WordPiece) or belongs to the first token in it, which adds it by itself
    (SentencePiece) or needs it in the text (byte-level BPE). Trails are starts of pieces that are tokenized with the
    slot before them. None if template and slots do not tokenize independently: as in `Query:a`, if `:a` is one token.
    """
    probe = "a"
    string = probe.join(pieces)
    whole = tokenizer(string, return_offsets_mapping=True, add_special_tokens=special_tokens)
    ids, offsets = whole["input_ids"], whole["offset_mapping"]
    surroundings, leads, piece_start, end = [], [], 0, 0
    for piece, trail in zip(pieces, trails, strict=False):
        start = end + len(piece)
        end = start + len(probe)
        slot_tokens = [i for i, (a, b) in enumerate(offsets) if a < end + len(trail) and b > start]
        if not slot_tokens:
            raise ValueError(f"the tokenizer of this checkpoint returns no token for the word {probe!r}")
        first, last = slot_tokens[0], slot_tokens[-1]
        if (string[offsets[first][0] : start] + string[end + len(trail) : offsets[last][1]]).strip():
            return None
        starts = [first]
        if first > piece_start and string[offsets[first - 1][0] : start] in ("", " "):
            # A space that is a token of its own belongs to the template if that is so before every word, and to the
            # slot if the tokenizer only lacks the piece of a space and the probe.
            starts.insert(0 if _joins(tokenizer, ids[first - 1]) else 1, first - 1)
        content = _content(tokenizer, piece, probe + trail, ids[: last + 1], starts)
        if content is None:
            return None
        first, lead = content
        surroundings.append(tuple(ids[piece_start:first]))
        leads.append(lead)
        piece_start = last + 1
    return Seams([*surroundings, tuple(ids[piece_start:])], leads)


def _joins(tokenizer: Any, space: int) -> bool:
    """Tell whether a tokenizer has pieces of a space and the characters after it, given the id of its space."""
    piece = tokenizer.convert_ids_to_tokens(space)
    return any(token.startswith(piece) and token.strip(piece) for token in tokenizer.get_vocab())


def _content(tokenizer: Any, piece: str, probe: str, ids: list[int], starts: Iterable[int]) -> tuple[int, str] | None:
    """Return where the last tokens begin that are those of the probe alone, with the white space to put before it.

    The white space is that at the end of `piece`, none, or a space. None if no start and white space give these ids.
    """
    leads = ("", piece[len(piece.rstrip()) :], " ")
    choices = ((start, lead) for start in starts for lead in leads)
    return next((choice for choice in choices if _ids(tokenizer, choice[1] + probe) == ids[choice[0] :]), None)


def _specials(tokenizer: Any) -> tuple[list[int], list[int]]:
    """Return the special tokens before and after a text."""
    encoded = tokenizer("a")
    ids, real = encoded["input_ids"], [side is not None for side in encoded.sequence_ids()]
    return ids[: real.index(True)], ids[len(real) - real[::-1].index(True) :]


def _ids(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])
