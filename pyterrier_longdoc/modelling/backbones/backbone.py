"""A backbone: a pre-trained encoder and the other parts of its checkpoint."""

from __future__ import annotations

from dataclasses import KW_ONLY, asdict, dataclass
from typing import Any

from torch import nn

from ..templates import Template
from .architectures import InputRules
from .families import Family, family_of
from .steps import RepresentationSteps


@dataclass(eq=False)
class Backbone:
    """A pre-trained encoder and the other parts of its checkpoint.

    Attributes:
        model: the encoder without pooler or head.
        tokenizer: its fast tokenizer; None for an encoder built from a stored description.
        representation: the cross-encoder's step between pooled state and last layer; None if there is none.
        final: the cross-encoder's last layer, `Linear(H, 1)`; None if there is no head that can be used.
        pooling: how states become one vector: `"cls"`, `"mean"`, `"last"`, or `"late"` for the mean of the states after
            the representation step.
        template: the words around query and text; None for the tokenizer's pair layout.
        prompt: the checkpoint's words before every query.
        global_attention: for Longformer, see `LongformerRules`.
    """

    model: Any
    _: KW_ONLY
    tokenizer: Any = None
    representation: nn.Module | None = None
    final: nn.Linear | None = None
    pooling: str
    template: Template | None = None
    prompt: str = ""
    global_attention: str = "query"

    @property
    def family(self) -> Family:
        """Its row in the table of architectures."""
        return family_of(self.model.config)

    @property
    def rules(self) -> InputRules:
        """What its passes need besides ids and mask."""
        options: dict[str, Any] = {}
        if "global_attention" in self.family.options:
            marks = self.global_attention == "sentences" and self.tokenizer is not None
            mark = self.tokenizer("a")["input_ids"][0] if marks else None
            options = {"global_attention": self.global_attention, "mark": mark}
        return self.family.rules(self.model.config, self.family.arguments, **options)

    @property
    def hidden_size(self) -> int:
        """H, the width of a window's vector: that of the states, unless a representation step changes it."""
        return self.representation.width if isinstance(self.representation, RepresentationSteps) else self.state_size

    @property
    def state_size(self) -> int:
        """The width of the last layer's states."""
        return int(self.model.config.hidden_size)

    @property
    def channels(self) -> int:
        """The number of layers with states, the embedding layer included."""
        return int(self.model.config.num_hidden_layers) + 1

    @property
    def longest_input(self) -> int | None:
        """The maximum number of tokens of an input, special tokens included; None for no limit."""
        config = self.model.config
        positions = getattr(config, "longest_input", None) or getattr(config, "max_position_embeddings", None)
        if positions is None or positions <= 0:
            return None
        return self.rules.longest(int(positions) - (self.first_position or 0))

    @property
    def has_segments(self) -> bool:
        """Whether it distinguishes query and text by segments."""
        return getattr(self.model.config, "type_vocab_size", 0) > 1

    @property
    def first_position(self) -> int | None:
        """The first position id; None if the model itself numbers positions from 0."""
        return self.model.config.pad_token_id + 1 if self.family.counts_from_padding else None

    def describe(self) -> dict[str, Any]:
        """Return a JSON-able description from which `build_backbone` creates the same modules."""
        template = None if self.template is None else asdict(self.template)
        steps = self.representation.description if isinstance(self.representation, RepresentationSteps) else None
        pooling = None if self.representation is not None else self.pooling  # a head's pooling is in the configuration
        return {
            "config": values_of(self.model.config),
            "cross_encoder": self.representation is not None and steps is None,
            "modular": None if steps is None else {"steps": steps, "pooling": self.pooling},
            "options": {
                "pooling": pooling,
                "template": template,
                "prompt": self.prompt,
                "global_attention": self.global_attention,
            },
        }


def values_of(config: Any) -> dict[str, Any]:
    """Return a Hugging Face configuration as JSON-able values, without its local path and the library's version."""
    left_out = ("_name_or_path", "transformers_version")
    return {name: value for name, value in config.to_dict().items() if name not in left_out}
