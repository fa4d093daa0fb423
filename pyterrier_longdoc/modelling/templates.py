"""Templates: the words around query and text with which a language model was trained."""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, replace
from types import MappingProxyType
from typing import Any

from ..common.arguments import argument, to_scalar, validate
from ..common.registry import CLASSES, register
from .tokens import Span

_QUERY, _TEXT, _INSTRUCTION = "{query}", "{text}", "{instruction}"
_SLOTS = re.compile(r"(\{query\}|\{text\})")
_NAMED = re.compile(r"\{[a-z_]+\}")


@dataclass(frozen=True)
class Template:
    """A prompt that turns a query and a text (a window) into one input of a model.

    What is scored depends on the model: the vector of its classification head if it has one, otherwise the first
    decoder state of an encoder-decoder, otherwise the state of the last token. The padding side makes no difference.

    Args:
        parts: the prompt, with `{query}` and `{text}` once each, in any order, and optionally with `{instruction}`.
            Other names in braces are refused. Several strings are tokenized separately, as the authors of some models
            do.
        answers: one or two words of one token each, or token ids. The score is the logit of the first answer, minus
            that of the second if there are two. The sigmoid of this difference is the probability of the first of the
            two. None for a model with a classification head, or for one that you train.
        scale: a factor of the score of the checkpoint, for models whose logits are divided by a number.
        instructed: what stands in the place of `{instruction}` for a query with an instruction, itself with
            `{instruction}`.
        uninstructed: what stands there for a query without one.
        special_tokens: whether the tokenizer adds its special tokens around the input.
        chat: whether the prompt is a user's message, to which the checkpoint's chat template is applied.
        strip: whether query and text lose the white space around them.

    Example:
        `ld.MaxP("my/ranker", template=ld.Template("Query: {query} Text: {text} Relevant:", answers=("yes", "no")))`.
    """

    parts: str | tuple[str, ...]
    _: KW_ONLY
    answers: tuple[str | int, ...] | None = None
    scale: float = argument(1.0, above=0)
    instructed: str = _INSTRUCTION
    uninstructed: str = ""
    special_tokens: bool = True
    chat: bool = False
    strip: bool = False

    def __post_init__(self) -> None:
        validate(self)
        parts = (self.parts,) if isinstance(self.parts, str) else tuple(self.parts)
        object.__setattr__(self, "parts", parts)
        if sorted(slot for part in parts for slot in _SLOTS.findall(part)) != [_QUERY, _TEXT]:
            raise ValueError(
                f"template={''.join(parts)!r} must hold {{query}} and {{text}} once each, or be one of "
                f"{', '.join(TEMPLATES)}"
            )
        self._check_names("".join(parts))
        if self.chat and len(parts) > 1:
            raise ValueError(f"Template: chat=True needs one string, not the {len(parts)} of {parts!r}")
        if self.answers is None:
            return
        answers = tuple(map(to_scalar, self.answers)) if isinstance(self.answers, tuple | list) else ()
        if len(answers) not in (1, 2) or not all(type(answer) in (str, int) for answer in answers):
            raise ValueError(
                f"Template: answers={self.answers!r} must be a tuple of one or two words or token ids, such as "
                f"('yes', 'no') or (0,)"
            )
        object.__setattr__(self, "answers", answers)

    def _check_names(self, prompt: str) -> None:
        """Raise ValueError for names in braces that nothing is filled in for, and for words without a place."""
        for words, names in (
            (prompt, (_QUERY, _TEXT, _INSTRUCTION)),
            (self.instructed, (_INSTRUCTION,)),
            (self.uninstructed, ()),
        ):
            for name in _NAMED.findall(words):
                if name not in names:
                    raise ValueError(
                        f"Template: {words!r} has {name}, but can only have {' '.join(names) or 'no such names'}: "
                        f"rename it, or put a space in braces that belong to the prompt"
                    )
        if _INSTRUCTION not in self.instructed:
            raise ValueError(f"Template: instructed={self.instructed!r} must hold {{instruction}}")
        if _INSTRUCTION not in prompt and (self.instructed, self.uninstructed) != (_INSTRUCTION, ""):
            raise ValueError(
                f"Template: instructed= and uninstructed= have no effect, because {prompt!r} lacks {{instruction}}"
            )

    @property
    def takes_instruction(self) -> bool:
        """Whether a query can have an instruction."""
        return _INSTRUCTION in "".join(self.parts)

    def pieces(self, part: str, instruction: str = "") -> list[str]:
        """Return the words of a part around its slots for `{query}` and `{text}`."""
        words = self.instructed.replace(_INSTRUCTION, instruction) if instruction else self.uninstructed
        return [piece.replace(_INSTRUCTION, words) for piece in _SLOTS.split(part)[::2]]

    def fill(self, query: str, text: str, instruction: str = "") -> str:
        """Return the input for a query and a text, without the tokenizer's special tokens."""
        return "".join(self.fill_part(part, query, text, instruction)[0] for part in self.parts)

    def fill_part(
        self, part: str, query: str, text: str, instruction: str = "", inside: bool = False
    ) -> tuple[str, dict[str, Span]]:
        """Return one of the strings for a query and a text, and the characters at which each stands in it.

        A text that begins `inside` another one has its own space, or none, in place of that of the template.
        """
        if self.strip:
            inside = inside and not text[:1].isspace()  # the template's space takes the place of the text's own
            query, text = query.strip(), text.strip()
        filled, places = "", {}
        for words, slot in itertools.zip_longest(self.pieces(part, instruction), _SLOTS.findall(part)):
            filled += words
            are_two_words = words[-2:-1].isalnum() and text[:1].isalnum()
            if inside and slot == _TEXT and not are_two_words:
                filled = filled.removesuffix(" ")
            if slot is not None:
                start = len(filled)
                filled += query if slot == _QUERY else text
                places[slot] = start, len(filled)
        return filled, places

    def in_chat(self, tokenizer: Any) -> Template:
        """Return the template inside the tokenizer's chat template if `chat` is set, otherwise the template itself.

        Thinking is disabled if the chat template has an option for it, because the answer must be the first token.
        """
        if not self.chat:
            return self
        chat = [{"role": "user", "content": "".join(self.parts)}]
        prompt = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True, enable_thinking=False)
        return replace(self, parts=prompt, special_tokens=False, chat=False)


register(CLASSES["template"], "templates", "Template", Template)

TEMPLATES: Mapping[str, Template] = MappingProxyType(
    {
        # For language models before their training.
        "plain": Template("query: {query}\ndocument: {text}"),
        # The format in the model cards of Qwen3-Reranker 0.6B, 4B and 8B, with their default instruction; their
        # conversions to sequence classification have the same.
        "qwen3-reranker": Template(
            "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
            'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
            "<Instruct>: {instruction}\n<Query>: {query}\n<Document>: {text}<|im_end|>\n<|im_start|>assistant\n"
            "<think>\n\n</think>\n\n",
            answers=("yes", "no"),
            uninstructed="Given a web search query, retrieve relevant passages that answer the query",
            special_tokens=False,
        ),
        # mxbai-rerank-base-v2 and -large-v2: `mxbai_rerank/mxbai_rerank_v2.py` of mixedbread-ai/mxbai-rerank.
        "mxbai-rerank-v2": Template(
            (
                "<|im_start|>system\nYou are Qwen, created by Alibaba Cloud. You are a helpful assistant."
                "<|im_end|>\n<|im_start|>user\n",
                "{instruction}query: {query}",
                "\n",
                "document: {text}",
                "\nYou are a search relevance expert who evaluates how well documents match search queries. For each "
                "query-document pair, carefully analyze the semantic relationship between them, then provide your "
                "binary relevance judgment (0 for not relevant, 1 for relevant).\nRelevance:<|im_end|>\n"
                "<|im_start|>assistant\n",
            ),
            answers=("1", "0"),
            instructed="instruction: {instruction}\n",
            special_tokens=False,
        ),
        # bge-reranker-v2-gemma: `FlagEmbedding/inference/reranker/decoder_only/base.py` of FlagOpen/FlagEmbedding.
        "bge-reranker-v2-gemma": Template(
            (
                "A: {query}",
                "\n",
                "B: {text}",
                "\nGiven a query A and a passage B, determine whether the passage contains an answer to the query by "
                "providing a prediction of either 'Yes' or 'No'.",
            ),
            answers=("Yes",),
        ),
        # ContextualAI/ctxl-rerank-v2-instruct-multilingual-1b, -2b and -6b: the prompt and the logit of the first token
        # of the vocabulary in their model cards.
        "ctxl-rerank-v2": Template(
            "Check whether a given document contains information helpful to answer the query.\n<Document> {text}\n"
            "<Query> {query}{instruction} ??",
            answers=(0,),
            instructed=" {instruction}",
        ),
        # zerank-1, -1-small and -2 of ZeroEntropy: the prompt, its stripped query and document, and
        # `sigmoid(logit / 5)` of their `modeling_zeranker.py`.
        "zerank-2": Template(
            "<|im_start|>system\n{query}<|im_end|>\n<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n",
            answers=("Yes",),
            scale=0.2,
            special_tokens=False,
            strip=True,
        ),
        # llama-nemotron-rerank-1b-v2 and Llama-3.2-NV-RerankQA-1B-v2 of NVIDIA: the prompt in their model cards.
        "nemotron-rerank": Template("question:{query} \n \n passage:{text}"),
        # Nogueira et al. 2020, section 3.
        "monot5": Template("Query: {query} Document: {text} Relevant:", answers=("true", "false")),
        # The question of Liang et al. 2022 (HELM, information retrieval), with the query before the passage.
        "yes-no": Template(
            "Query: {query}\nDoes the passage answer the query? Answer 'Yes' or 'No'.\nPassage: {text}",
            answers=("Yes", "No"),
            chat=True,
        ),
    }
)
"""Templates by name, each with its source in a comment."""


_OF_CHECKPOINTS: Mapping[str, tuple[str, int | None]] = {
    "qwen/qwen3-reranker-": ("qwen3-reranker", None),
    "tomaarsen/qwen3-reranker-": ("qwen3-reranker", None),
    "mixedbread-ai/mxbai-rerank-base-v2": ("mxbai-rerank-v2", None),
    "mixedbread-ai/mxbai-rerank-large-v2": ("mxbai-rerank-v2", None),
    "baai/bge-reranker-v2-gemma": ("bge-reranker-v2-gemma", None),
    "contextualai/ctxl-rerank-v2-": ("ctxl-rerank-v2", None),
    "zeroentropy/zerank-": ("zerank-2", None),
    "nvidia/llama-nemotron-rerank-1b-v2": ("nemotron-rerank", 8192),
    "nvidia/llama-3.2-nv-rerankqa-1b-v2": ("nemotron-rerank", 8192),
    "castorini/monot5-": ("monot5", None),
}
"""From how the lower-cased names of checkpoints begin to their templates, and to the longest inputs of their cards if
their configurations have longer ones."""


def known_checkpoint(*names: str) -> tuple[Template | None, int | None]:
    """Return the template and the longest input of a checkpoint that is known by one of its names; None if unknown."""
    known = [of for name in names for start, of in _OF_CHECKPOINTS.items() if name.lower().startswith(start)]
    template, longest = known[0] if known else (None, None)
    return None if template is None else TEMPLATES[template], longest


def resolve_template(template: str | Template) -> Template:
    """Return the template of that name or of that string, or the template itself."""
    if isinstance(template, str):
        return TEMPLATES.get(template) or Template(template)
    return template


def template_of_roles(
    tokenizer: Any, *, prompt: str = "", structured: bool = False, arguments: Mapping[str, Any] = MappingProxyType({})
) -> Template:
    """Return a chat template for messages of the roles `query` and `document` as a template without answers.

    Sentence-transformers (5.4 and later) and vLLM read pairs so, with an instruction as the system's message.
    """

    def rendered(system: str) -> str:
        contents = {"system": system, "query": _QUERY, "document": _TEXT}
        messages = [
            {"role": role, "content": [{"type": "text", "text": content}] if structured else content}
            for role, content in contents.items()
            if content
        ]
        return str(tokenizer.apply_chat_template(messages, tokenize=False, **arguments))

    bare = rendered(prompt)
    # One character in its place: its brace would be taken for that of a slot.
    mark = "\0"
    full = rendered(_INSTRUCTION).replace(_INSTRUCTION, mark) if names_roles(tokenizer, "system") else bare
    if mark not in full:
        return Template(bare, special_tokens=False)
    before = _common_start(full, bare)
    after = _common_start(full[before:][::-1], bare[before:][::-1])
    ends = len(full) - after, len(bare) - after
    return Template(
        bare[:before] + _INSTRUCTION + bare[ends[1] :],
        instructed=full[before : ends[0]].replace(mark, _INSTRUCTION),
        uninstructed=bare[before : ends[1]],
        special_tokens=False,
    )


def _common_start(one: str, other: str) -> int:
    pairs = enumerate(zip(one, other, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(one), len(other)))


def names_roles(tokenizer: Any, *roles: str) -> bool:
    """Tell whether a chat template names these roles; most accept any role unchecked."""
    return all(re.search(rf"""["']{role}["']""", str(tokenizer.chat_template or "")) for role in roles)
