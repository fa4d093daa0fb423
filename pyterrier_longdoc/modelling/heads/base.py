"""What every head shares: the registry, the scoring layer, masked reductions.

Shapes: B documents, N windows, H hidden size.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import nn

from ...common.registry import register
from ..batching import Encoded, Matches

_REGISTRY: dict[str, type[Head]] = {}


@dataclass(frozen=True, eq=False)
class WarmStart:
    """What a head can take over from the backbone's checkpoint.

    Attributes:
        final: the cross-encoder's last layer, `Linear(H, 1)`; None for a plain encoder.
        cls_embedding: `(E,)` word embedding of the tokenizer's `[CLS]`.
        sep_embedding: `(E,)` word embedding of the tokenizer's `[SEP]`.
    """

    final: nn.Linear | None
    cls_embedding: torch.Tensor
    sep_embedding: torch.Tensor


class Head(nn.Module):
    """Aggregates the windows of each document into a score: `final(dropout(x))` of some vector `x`.

    Subclasses name themselves, `class MaxPHead(Head, name="maxp")`, and take JSON-able keyword arguments only; what
    they take as `**options` are their parent's.

    Args:
        hidden_size: H, the width of the window vectors.
        dropout: before the final layer; 0.1 in Boytsov et al. 2025 and in PARADE.
    """

    name: ClassVar[str] = ""
    needs: ClassVar[Literal["cls", "query", "last", "all"]] = "cls"
    """What of the encoder: one vector per window, or also the states of the query's tokens, or matches of query and
    document tokens in the last layer or in all of them."""
    from_scores: ClassVar[bool] = False
    """Whether the windows' scores are all that it combines, so that a served model or a function can give them."""
    tunable: ClassVar[tuple[str, ...]] = ()
    """Options that may change without new weights."""

    def __init_subclass__(cls, *, name: str | None = None, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if name is not None:
            register(_REGISTRY, "heads", name, cls)
            cls.name = name

    def __init__(self, hidden_size: int, *, dropout: float = 0.1) -> None:
        super().__init__()
        self.hidden_size = hidden_size
        self.dropout = nn.Dropout(dropout)
        self.final = nn.Linear(hidden_size, 1)
        nn.init.xavier_uniform_(self.final.weight)

    def forward(self, encoded: Encoded) -> torch.Tensor:
        """Scores documents.

        Args:
            encoded: `cls (B, N, H)` and `mask (B, N)`.

        Returns:
            `(B,)` scores, logits without any squashing.
        """
        raise NotImplementedError

    def score(self, x: torch.Tensor) -> torch.Tensor:
        """`(..., H)` vectors to `(...,)` scores by the final layer."""
        return self.final(self.dropout(x)).squeeze(-1)

    def window_scores(self, encoded: Encoded) -> torch.Tensor:
        """`(B, N)` score that each document would have if it were that window alone; NaN where there is none."""
        single, mask = encoded.each_window()
        return self(single).view_as(mask).masked_fill(~mask, float("nan"))

    def window_weights(self, encoded: Encoded) -> torch.Tensor | None:
        """`(B, N)` attention over windows (sums to 1), or None for a head without attention weights."""
        return None

    def check_windows(self, windows: int, query: int = 0) -> None:
        """Tells before anything is encoded that a document has too many windows, which most heads do not mind.

        Args:
            windows: how many it has.
            query: tokens of the query.

        Raises:
            ValueError: if they are too many.
        """

    def pretrained(self) -> dict[str, nn.Module]:
        """The modules, by attribute, whose weights come from a checkpoint and not from chance."""
        return {}

    def built_from(self) -> dict[str, Any]:
        """JSON-able options, in place of the given ones, that make the same modules without any other checkpoint."""
        return {}

    def warm_start(self, start: WarmStart) -> bool:
        """Takes over what fits from the backbone's checkpoint.

        Returns:
            Whether the head's scores make sense without training.
        """
        if start.final is None or start.final.weight.shape != self.final.weight.shape:
            return False
        self.final.load_state_dict(start.final.state_dict())
        return True


def registered_heads() -> dict[str, type[Head]]:
    """The known heads by name, in alphabetical order."""
    return dict(sorted(_REGISTRY.items()))


def head_options(name: str) -> dict[str, Any]:
    """The keyword arguments of a head and their defaults.

    Raises:
        ValueError: for an unknown head; the message lists the known ones.
    """
    if name not in _REGISTRY:
        raise ValueError(f"unknown head {name!r}; known are {', '.join(registered_heads())}")
    options = _options(_REGISTRY[name])
    options.pop("channels", None)  # the backbone's, not the user's
    return options


def _options(cls: Any) -> dict[str, Any]:
    parameters = inspect.signature(cls).parameters.values()
    inherited = _options(cls.__base__) if any(p.kind is p.VAR_KEYWORD for p in parameters) else {}
    return inherited | {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY}


def build_head(name: str, hidden_size: int, *, channels: int = 1, **options: Any) -> Head:
    """Makes a head by its registered name.

    Args:
        name: the registered name.
        hidden_size: H of the encoder.
        channels: layers of the encoder, the embedding layer included; for heads that look at all of them.
        **options: the head's own keyword arguments.

    Raises:
        ValueError: for an unknown head or option; the message lists the known ones.
    """
    known = head_options(name)
    unknown = sorted(set(options) - set(known))
    if unknown:
        raise ValueError(f"head {name!r} has no option {', '.join(unknown)}; its options are {', '.join(known)}")
    if _REGISTRY[name].needs == "all":
        options["channels"] = channels
    return _REGISTRY[name](hidden_size, **options)


def masked_mean(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Mean over real windows: `(B, N, H)` and `(B, N)` to `(B, H)`."""
    weights = mask.unsqueeze(-1).to(x.dtype)
    return (x * weights).sum(1) / weights.sum(1)


class TokenHead(Head):
    """Base of heads that look at matches of query and document tokens; no dropout and torch's own start, as in CEDR.

    Args:
        hidden_size: H.
        width: of the vector that the last layer scores.
    """

    def __init__(self, hidden_size: int, width: int) -> None:
        super().__init__(hidden_size, dropout=0.0)
        self.final = nn.Linear(width, 1)

    def match(self, query: torch.Tensor, document: torch.Tensor, same: torch.Tensor) -> torch.Tensor:
        """Matches the token states of one layer, which becomes one channel.

        Args:
            query: `(V, Q, H)` fp32.
            document: `(V, T, H)` fp32.
            same: `(V, Q, T)` bool, whether the two tokens are the same word piece.

        Returns:
            `(V, Q, T)`.
        """
        raise NotImplementedError

    def query_contributions(self, encoded: Encoded) -> torch.Tensor | None:
        """`(B, Q)` what each query token adds to the score; None where that cannot be told apart."""
        return None

    def warm_start(self, start: WarmStart) -> bool:
        """Nothing fits: the last layer scores features that the checkpoint knows nothing of."""
        return False

    def window_scores(self, encoded: Encoded) -> torch.Tensor:
        scores = []
        for n in range(encoded.mask.shape[1]):
            alone = Encoded(
                cls=encoded.cls[:, n : n + 1],
                mask=torch.ones_like(encoded.mask[:, :1]),
                matches=matches_of(encoded).of_window(n),
                query=encoded.query,
            )
            scores.append(self(alone))
        return torch.stack(scores, 1).masked_fill(~encoded.mask, float("nan"))


def matches_of(encoded: Encoded) -> Matches:
    """The matches that a token head asked for.

    Raises:
        ValueError: if the encoder was not told to make them.
    """
    if encoded.matches is None:
        raise ValueError("this head needs matches of query and document tokens, but the encoder made none")
    return encoded.matches
