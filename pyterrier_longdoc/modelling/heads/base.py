"""The base class of heads, their registry, and masked reductions.

Shapes: B documents, N windows, H hidden size.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import nn

from ...common.registry import look_up, register
from ..inputs import Encoded

_REGISTRY: dict[str, type[Head]] = {}


@dataclass(frozen=True, eq=False)
class WarmStart:
    """The parts of the backbone's checkpoint that a head can use as initial weights."""

    final: nn.Linear | None  # the cross-encoder's last layer, `Linear(H, 1)`; None for a plain encoder
    cls_embedding: torch.Tensor  # `(E,)` word embedding of the tokenizer's `[CLS]`
    sep_embedding: torch.Tensor  # `(E,)` word embedding of the tokenizer's `[SEP]`


class Head(nn.Module):
    """Aggregates the windows of a document into a score: `final(dropout(x))` for a vector `x`.

    A subclass declares its name, `class MaxPHead(Head, name="maxp")`, and defines `forward` from `Encoded` to `(B,)`
    scores, which are logits. Its options are JSON-able keyword arguments; `**options` are passed to the base class.

    Args:
        hidden_size: H, the width of the window vectors.
        dropout: the dropout rate before the final layer; 0.1 in Boytsov et al. 2025 and in PARADE.
    """

    name: ClassVar[str] = ""
    needs: ClassVar[Literal["cls", "query", "last", "all"]] = "cls"
    """What the encoder must return: a vector per window (`"cls"`), also the states of the query's tokens (`"query"`),
    or also the similarities of query and document tokens in the last layer (`"last"`) or in all layers (`"all"`)."""
    from_scores: ClassVar[bool] = False
    """Whether it only combines window scores, so that a function can compute them."""
    tunable: ClassVar[tuple[str, ...]] = ()
    """Options that can change without new weights."""
    neutral: ClassVar[tuple[str, ...]] = ()
    """The names of weights, besides those of the last layer, that make sense as `warm_start` leaves them."""

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

    def score(self, x: torch.Tensor) -> torch.Tensor:
        """Return the `(...,)` scores of `(..., H)` vectors by the final layer."""
        return self.final(self.dropout(x)).squeeze(-1)

    def window_scores(self, encoded: Encoded) -> torch.Tensor:
        """Return the `(B, N)` scores of each window as a separate document; NaN where there is no window."""
        single_windows, mask = encoded.each_window()
        scores: torch.Tensor = self(single_windows)
        return scores.view_as(mask).masked_fill(~mask, float("nan"))

    def window_weights(self, encoded: Encoded) -> torch.Tensor | None:
        """Return the `(B, N)` attention over windows, which sums to 1; None for a head without attention weights."""
        return None

    def check_windows(self, windows: int, query: int = 0) -> None:
        """Raise ValueError if a document has too many windows or query tokens; most heads have no limit."""

    def pretrained(self) -> dict[str, nn.Module]:
        """Return the modules, by attribute, whose weights come from a checkpoint."""
        return {}

    def built_from(self) -> dict[str, Any]:
        """Return JSON-able options with which the same modules are created without a checkpoint."""
        return {}

    def ready_from(self, start: WarmStart) -> bool:
        """Return whether scores make sense without training after `warm_start`.

        They do if the checkpoint has the last layer, and if all other weights are `neutral`.
        """
        return not self.unknown_weights() and self._has_final_of(start)

    def unknown_weights(self) -> list[str]:
        """Return the names of weights that neither the checkpoint has nor `neutral` lists."""
        names = dict.fromkeys(name.partition(".")[0] for name, _ in self.named_parameters())
        return [name for name in names if name not in ("final", *self.neutral)]

    def warm_start(self, start: WarmStart) -> None:
        """Copy the matching weights of the backbone's checkpoint: the last layer.

        A head with more weights overrides `warm_start`, sets them to values that change nothing, calls
        `super().warm_start(start)`, and names them in `neutral`. Otherwise it counts as untrained until `fit`.
        """
        if self._has_final_of(start):
            self.final.load_state_dict(start.final.state_dict())  # type: ignore[union-attr]

    def _has_final_of(self, start: WarmStart) -> bool:
        return start.final is not None and start.final.weight.shape == self.final.weight.shape


def registered_heads() -> dict[str, type[Head]]:
    """Return the known heads by name, in alphabetical order."""
    return dict(sorted(_REGISTRY.items()))


def head_options(name: str) -> dict[str, Any]:
    """Return the keyword arguments of a head and their defaults; ValueError for an unknown head."""
    options = _options(look_up(registered_heads(), "unknown head", name))
    options.pop("channels", None)  # the backbone's, not the user's
    return options


def _options(cls: Any) -> dict[str, Any]:
    parameters = inspect.signature(cls).parameters.values()
    inherited = _options(cls.__base__) if any(p.kind is p.VAR_KEYWORD for p in parameters) else {}
    return inherited | {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY}


def build_head(name: str, hidden_size: int, *, channels: int = 1, **options: Any) -> Head:
    """Return a head by its registered name; `channels` are layers of the encoder, the embedding layer included."""
    head = look_up(registered_heads(), "unknown head", name)
    return head(hidden_size, **options, **({"channels": channels} if head.needs == "all" else {}))


def masked_mean(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Return the `(B, H)` mean of `(B, N, H)` vectors over the real windows of a `(B, N)` mask."""
    weights = mask.unsqueeze(-1).to(x.dtype)
    return (x * weights).sum(1) / weights.sum(1)


class TokenHead(Head):
    """Base of heads that look at matches of query and document tokens; no dropout, torch's default weights (CEDR)."""

    def __init__(self, hidden_size: int, width: int) -> None:
        super().__init__(hidden_size, dropout=0.0)
        self.final = nn.Linear(width, 1)

    def match(self, query: torch.Tensor, document: torch.Tensor, same_token: torch.Tensor) -> torch.Tensor:
        """Return the `(V, Q, T)` matches of the token states of one layer; here their cosines."""
        return cosines(query, document)

    def query_contributions(self, encoded: Encoded) -> torch.Tensor | None:
        """Return the `(B, Q)` shares of the query tokens in the score; None if it is no sum over them."""
        return None

    def ready_from(self, start: WarmStart) -> bool:
        """Return False: the last layer scores features that the checkpoint does not have."""
        return False

    def warm_start(self, start: WarmStart) -> None:
        """Copy nothing."""

    def window_scores(self, encoded: Encoded) -> torch.Tensor:
        scores = []
        for n in range(encoded.mask.shape[1]):
            single_window = Encoded(
                cls=encoded.cls[:, n : n + 1],
                mask=torch.ones_like(encoded.mask[:, :1]),
                matches=encoded.matches.one_window(n),
                query=encoded.query,
            )
            scores.append(self(single_window))
        return torch.stack(scores, 1).masked_fill(~encoded.mask, float("nan"))


def cosines(query: torch.Tensor, document: torch.Tensor) -> torch.Tensor:
    """Return the `(V, Q, T)` cosines of `(V, Q, H)` and `(V, T, H)` states; 0 for states of zeros."""
    norms = query.norm(dim=-1).unsqueeze(-1) * document.norm(dim=-1).unsqueeze(-2) + 1e-9  # (V, Q, T)
    return query @ document.transpose(-1, -2) / norms
