"""Input layouts: how a query and a text form one input in the published models."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..common.arguments import argument, validate
from ..common.registry import CLASSES, register
from .windows import Truncate, WholeText, Windows

POSITIONS = ("columns", "real tokens")


@dataclass(frozen=True, kw_only=True)
class InputLayout:
    """How a query and a text form one input; by default, the tokenizer's own layout for two texts.

    `LAYOUTS` has those of Boytsov et al. 2025, from their code (FlexNeuART) and its configurations.

    Args:
        pad_query: `[CLS] query [SEP] window [SEP]` with the query padded to `max_query_len` and the window to its full
            size, so that all tokens have fixed positions.
        shared_budget: query and text together are truncated to `max_query_len` + `max_doc_len` + 3 tokens, special
            tokens included, the longer one first (`truncation="longest_first"` of tokenizers). For models with one
            window. Queries are not truncated to `max_query_len`, and a short query leaves more tokens to the text.
        positions: with `pad_query`, for backbones whose position ids depend on token ids (RoBERTa, Longformer):
            `"columns"` counts the padding inside an input, `"real tokens"` skips it, as these backbones do.
        lowercase: whether queries and texts are lower-cased, which matters for cased tokenizers.
    """

    pad_query: bool = False
    shared_budget: bool = argument(False, needs={"pad_query": False})
    positions: str = argument("columns", choices=POSITIONS, needs="pad_query")
    lowercase: bool = False

    def __post_init__(self) -> None:
        validate(self)

    def check(self, windows: Windows, preselect: object, max_query_len: int | None, *, repeats: bool = False) -> None:
        """Raise ValueError if the layout does not suit a model with these arguments."""
        if self.is_for_pairs and max_query_len is None:
            raise ValueError(
                f"max_query_len=None is not possible with {self!r}, whose inputs have fixed sizes: set a number, "
                f"such as 32 in Boytsov et al. 2025, or use layout='pair'"
            )
        if self.shared_budget and (repeats or preselect is not None or not isinstance(windows, Truncate | WholeText)):
            raise ValueError(
                f"shared_budget is for a query and the beginning of its text in one input: it needs a model with one "
                f"window (FirstP, LongP) and without preselect or repeat, not for {windows!r}, preselect={preselect!r}"
            )

    @property
    def is_for_pairs(self) -> bool:
        """Whether it needs an input of two texts, which a template does not give."""
        return self.pad_query or self.shared_budget

    def normalized(self, texts: Sequence[str]) -> Sequence[str]:
        """Return queries or texts in the letter case that is read; every character keeps its position."""
        # The only letter with a longer lower case.
        return [text.replace("İ", "i").lower() for text in texts] if self.lowercase else texts


register(CLASSES["layout"], "layouts", "InputLayout", InputLayout)

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
    """Return the layout of that name, or the layout itself; ValueError for anything else."""
    input_layout = LAYOUTS.get(layout) if isinstance(layout, str) else layout
    if not isinstance(input_layout, InputLayout):
        raise ValueError(f"layout={layout!r} must be one of {', '.join(LAYOUTS)}, or InputLayout(...)")
    return input_layout


def layout_name(layout: InputLayout) -> str:
    """Return the name of a layout, quoted, or its repr if it has none."""
    return next((repr(name) for name, candidate in LAYOUTS.items() if candidate == layout), repr(layout))
