"""How a query and a text become one input: what the published models did beyond the tokenizer's own layout."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..common.arguments import check_choice, plain_fields
from .windows import Truncate, WholeText, Windows

POSITIONS = ("columns", "real tokens")

PUBLISHED_SPECIALS = 3
"""Special tokens that a shared budget counts, whatever the tokenizer puts (Llama's: two)."""


@dataclass(frozen=True, kw_only=True)
class InputLayout:
    """How a query and a text become one input; without arguments the tokenizer's own layout for two texts.

    The layouts of Boytsov et al. 2025, as their code (FlexNeuART) and its configurations have them, have names: see
    `LAYOUTS`.

    Args:
        pad_query: `[CLS] query [SEP] window [SEP]` with the query padded to `max_query_len` and the window to its full
            size, so that all tokens have fixed places.
        shared_budget: query and text together are read up to `max_query_len` + `max_doc_len` + 3 tokens, special ones
            included; the longer one is cut first (`truncation="longest_first"` of tokenizers). For models that read
            one window: a query is not cut at `max_query_len`, and a short one leaves its tokens to the text.
        positions: with `pad_query`, for backbones that number positions by token ids (RoBERTa, Longformer): `"columns"`
            counts the padding inside an input, `"real tokens"` skips it, as these do by themselves.
        lowercase: whether queries and texts are read in lower case, which matters for cased tokenizers.

    Raises:
        ValueError: for unknown values, or some that do not go together.
    """

    pad_query: bool = False
    shared_budget: bool = False
    positions: str = "columns"
    lowercase: bool = False

    def __post_init__(self) -> None:
        plain_fields(self)
        for name in ("pad_query", "shared_budget", "lowercase"):
            value = getattr(self, name)
            if not isinstance(value, bool):
                raise ValueError(f"{name}={value!r} must be True or False")
        check_choice("positions", self.positions, POSITIONS)
        if self.pad_query and self.shared_budget:
            raise ValueError("pad_query gives query and window sizes of their own: it does not go with shared_budget")
        if self.positions != "columns" and not self.pad_query:
            raise ValueError(f"positions={self.positions!r} would have no effect without pad_query=True")

    def check(self, windows: Windows, preselect: object, max_query_len: int | None, *, repeats: bool = False) -> None:
        """Raises ValueError if it is not for models that read so."""
        if self.shared_budget and repeats:
            raise ValueError(
                "shared_budget is for one window, with which nothing need be repeated: leave repeat out, "
                "and name all columns in text_field"
            )
        if self.is_for_pairs and max_query_len is None:
            raise ValueError(
                f"max_query_len=None does not go with {self!r}, where it decides about the form of all inputs: give a "
                f"number, 32 in Boytsov et al. 2025, or leave layout='pair'"
            )
        if self.shared_budget and (preselect is not None or not isinstance(windows, Truncate | WholeText)):
            raise ValueError(
                f"shared_budget lets a query and the beginning of its text share one input: it is for models with one "
                f"window (FirstP, LongP) and without preselect, not for {windows!r}, preselect={preselect!r}"
            )

    @property
    def is_for_pairs(self) -> bool:
        """Whether it asks for more than a template can give."""
        return self.pad_query or self.shared_budget

    def read(self, texts: Sequence[str]) -> Sequence[str]:
        """Queries or texts as they are read; every character stays at its place."""
        # The one letter whose lower case, with a dot of its own, is longer.
        return [text.replace("İ", "i").lower() for text in texts] if self.lowercase else texts


LAYOUTS = {
    "pair": InputLayout(),
    "padded": InputLayout(pad_query=True),
    "padded-lowercase": InputLayout(pad_query=True, lowercase=True),
    "longformer": InputLayout(pad_query=True, positions="real tokens", lowercase=True),
    "shared": InputLayout(shared_budget=True),
    "shared-lowercase": InputLayout(shared_budget=True, lowercase=True),
}
"""`"pair"` is the tokenizer's own layout. In Boytsov et al. 2025 BERT and ELECTRA have `"padded"`, BigBird and DeBERTa
`"padded-lowercase"`, Longformer `"longformer"`, JINA and MOSAIC `"shared"`, TinyLLAMA `"shared-lowercase"`."""


def resolve_layout(layout: object) -> InputLayout:
    """The layout of that name, or the given one.

    Raises:
        ValueError: if it is neither.
    """
    found = LAYOUTS.get(layout) if isinstance(layout, str) else layout
    if not isinstance(found, InputLayout):
        raise ValueError(f"layout={layout!r} must be one of {', '.join(LAYOUTS)}, or InputLayout(...)")
    return found


def longest_first(query: int, text: int, budget: int) -> tuple[int, int]:
    """How many tokens of a query and a text are read if they share a budget: the longer one is cut first.

    Example:
        >>> longest_first(8, 600, 509), longest_first(400, 600, 509), longest_first(400, 20, 509)
        ((8, 501), (254, 255), (400, 20))
    """
    shorter, longer = sorted((query, text))
    shorter = min(shorter, budget // 2)
    longer = min(longer, budget - shorter)
    return (longer, shorter) if query > text else (shorter, longer)
