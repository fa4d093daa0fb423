"""PARADE: window vectors are aggregated into one document vector, which is scored.

Li et al., "PARADE: Passage Representation Aggregation for Document Reranking", section 3.2, and Boytsov et al.
2025, section 3. Shapes: B documents, N windows, H hidden size. `p_i` are the window vectors, `d` the document vector.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ..aggregators import (
    Part,
    first_state,
    join,
    projection,
    random_transformer,
    random_vector,
    vector_transformer,
    without_positions,
)
from ..backbones.backbone import values_of
from ..inputs import Encoded
from .base import Head, WarmStart, masked_mean


class ParadeAvgHead(Head, name="parade-avg"):
    """`d = mean_i p_i` (PARADE Avg)."""

    def forward(self, encoded: Encoded) -> torch.Tensor:
        return self.score(masked_mean(encoded.cls, encoded.mask))


class ParadeMaxHead(Head, name="parade-max"):
    """`d = max_i p_i`, feature by feature (PARADE Max)."""

    def forward(self, encoded: Encoded) -> torch.Tensor:
        vectors = encoded.cls.masked_fill(~encoded.mask.unsqueeze(-1), float("-inf"))
        return self.score(vectors.amax(1))


class ParadeAttnHead(Head, name="parade-attn"):
    """`a = softmax_i(p_i . c)`, `d = sum_i a_i p_i` (PARADE Attn, as in the PARADE paper).

    The attention vector `c` starts at zero, with which PARADE Attn equals PARADE Avg, so that a head on top of a
    trained cross-encoder ranks sensibly from the start. Differs from PARADE, which draws `c` from N(0, 0.02).
    """

    neutral = ("attention",)

    def __init__(self, hidden_size: int, **options: Any) -> None:
        super().__init__(hidden_size, **options)
        self.attention = nn.Parameter(torch.zeros(hidden_size))

    def warm_start(self, start: WarmStart) -> None:
        nn.init.zeros_(self.attention)
        super().warm_start(start)

    def forward(self, encoded: Encoded) -> torch.Tensor:
        weights = self.window_weights(encoded).unsqueeze(-1)  # (B, N, 1)
        return self.score((weights * encoded.cls).sum(1))

    def window_weights(self, encoded: Encoded) -> torch.Tensor:
        # 0 where there is no window
        logits = encoded.cls @ self.attention
        return logits.masked_fill(~encoded.mask, float("-inf")).softmax(1)


class ParadeElementwiseAttnHead(Head, name="parade-attn-elementwise"):
    """`A = softmax_i(W p_i + b)` for each feature separately, `d = sum_i A_i * p_i`.

    This is what Boytsov et al. 2025 measured as PARADE Attn. `W` starts at zero, with which this equals PARADE Avg.
    """

    neutral = ("attention",)

    def __init__(self, hidden_size: int, **options: Any) -> None:
        super().__init__(hidden_size, **options)
        self.attention = nn.Linear(hidden_size, hidden_size)
        nn.init.zeros_(self.attention.weight)
        nn.init.zeros_(self.attention.bias)

    def warm_start(self, start: WarmStart) -> None:
        nn.init.zeros_(self.attention.weight)
        nn.init.zeros_(self.attention.bias)
        super().warm_start(start)

    def forward(self, encoded: Encoded) -> torch.Tensor:
        return self.score((self._attend(encoded) * encoded.cls).sum(1))

    def window_weights(self, encoded: Encoded) -> torch.Tensor:
        """Return the `(B, N)` weights averaged over the H features; 0 where there is no window."""
        return self._attend(encoded).mean(-1)

    def _attend(self, encoded: Encoded) -> torch.Tensor:
        logits = self.attention(encoded.cls)  # (B, N, H)
        return logits.masked_fill(~encoded.mask.unsqueeze(-1), float("-inf")).softmax(1)


class ParadeTransformerHead(Head, name="parade-transformer"):
    """A transformer over `[c, s, p_1 ... p_N, s]`; `d` is its state at `c` (Boytsov et al. 2025, equation 1).

    `c` and `s` are learnable. With `separators=False` the sequence is `[c, p_1 ... p_N]`, as in the PARADE paper. The
    layers are random (RAND-L2) or those of a checkpoint (PRETR-L6) without its word embeddings. In both cases, scores
    are meaningless before training.

    Args:
        hidden_size: H; also the width of random layers.
        aggregator: a checkpoint whose layers are used as the aggregator, or its configuration if its weights are loaded
            afterwards; None for random layers. If its input width is not H, `p_i` goes through a linear layer.
        layers: the number of random layers; 2 in both papers.
        attention_heads: of random layers; None for the largest number up to 12 that divides H. 12 in PARADE, and in the
            code of Boytsov et al. (their text says 4).
        separators: whether `s` comes before and after the windows.
        positions: add position and segment embeddings and a layer norm, as both BERT and Boytsov et al. do. Without
            them, the aggregation does not depend on the order of the windows.
        special_vectors: the initial `c` and `s`: `"random"`, or `"words"`: the word embeddings of `[CLS]` and `[SEP]`
            in the aggregator, or for random layers in the backbone. None for the choice of Boytsov et al.: random
            with a checkpoint, words with random layers.
        max_positions: the number of position embeddings of random layers; BERT's 512.
        dropout: in random layers and before the final layer. A checkpoint's layers keep theirs.

    Raises:
        ValueError: if `attention_heads` does not divide H; `check_windows` if a document has too many windows.
    """

    def __init__(
        self,
        hidden_size: int,
        *,
        aggregator: str | dict[str, Any] | None = None,
        layers: int = 2,
        attention_heads: int | None = None,
        separators: bool = True,
        positions: bool = True,
        special_vectors: str | None = None,
        max_positions: int = 512,
        dropout: float = 0.1,
    ) -> None:
        if aggregator is None:
            heads = attention_heads or next(n for n in range(12, 0, -1) if hidden_size % n == 0)
            transformer = random_transformer(hidden_size, layers, heads, max_positions, dropout)
        else:
            transformer = vector_transformer(aggregator)
        super().__init__(transformer.output_width, dropout=dropout)
        self.hidden_size = hidden_size
        self.separators = separators
        self.max_positions = transformer.max_vectors if positions else None
        self.aggregator: Any = transformer.model if positions else without_positions(transformer.model)
        self.project = projection(hidden_size, transformer.width)
        self.cls_vector = random_vector(transformer.width)
        if separators:
            self.sep_vector = random_vector(transformer.width)
        self._pretrained = aggregator is not None
        self._words_of_backbone = aggregator is None and special_vectors != "random"
        if special_vectors == "words" and transformer.special_embeddings is not None:
            self._start_special(*transformer.special_embeddings)

    def forward(self, encoded: Encoded) -> torch.Tensor:
        real = encoded.mask.new_ones(len(encoded.mask), 1)
        separator = [Part(self.sep_vector, real, 0)] if self.separators else []
        windows = Part(self.project(encoded.cls), encoded.mask, 1)
        parts = [Part(self.cls_vector, real, 0), *separator, *self._query(encoded, separator), windows, *separator]
        return self.score(first_state(self.aggregator, *join(parts)))

    def check_windows(self, windows: int, query: int = 0) -> None:
        if self.max_positions is None:
            return
        extra = 3 if self.separators else 1
        if self.needs == "query":
            extra += query + self.separators
        if windows > self.max_positions - extra:
            raise ValueError(
                f"a document has {windows} windows, but the aggregator takes {max(0, self.max_positions - extra)}: "
                f"raise stride, or set max_windows or max_doc_len"
            )

    def ready_from(self, start: WarmStart) -> bool:
        """Return False: the last layer of a cross-encoder was not trained on outputs of these layers."""
        return False

    def warm_start(self, start: WarmStart) -> None:
        if self._words_of_backbone and start.cls_embedding.shape == self.cls_vector.shape:
            self._start_special(start.cls_embedding, start.sep_embedding)

    def pretrained(self) -> dict[str, nn.Module]:
        return {"aggregator": self.aggregator} if self._pretrained else {}

    def built_from(self) -> dict[str, Any]:
        return {"aggregator": values_of(self.aggregator.config)} if self._pretrained else {}

    def _query(self, encoded: Encoded, separator: list[Part]) -> list[Part]:
        """Return the parts between the first special vectors and the windows."""
        return []

    def _start_special(self, cls: torch.Tensor, sep: torch.Tensor) -> None:
        with torch.no_grad():
            self.cls_vector.copy_(cls)
            if self.separators:
                self.sep_vector.copy_(sep)


class ParadeQueryTransformerHead(ParadeTransformerHead, name="parade-transformer-query"):
    """`[c, s, q_1 ... q_Q, s, p_1 ... p_N, s]`: an aggregator with access to the query (PRETR-Q, Boytsov et al. 2022).

    `q_j` are the states of the query's tokens in the document's first window; with `separators=False` the sequence
    is the equation's `[c, q_1 ... q_Q, p_1 ... p_N]`. In the papers' fixed input layout, a query shorter than 32 tokens
    leaves a gap before the windows, as in their code, so that window positions are the same for all queries.

    Args:
        hidden_size: H.
        separate_projection: whether `q_j` has another linear layer than `p_i`.

    All other arguments: see `ParadeTransformerHead`.
    """

    needs = "query"

    def __init__(self, hidden_size: int, *, separate_projection: bool = False, **options: Any) -> None:
        super().__init__(hidden_size, **options)
        self.project_query: nn.Module | None = None
        if separate_projection:
            self.project_query = nn.Linear(hidden_size, self.cls_vector.shape[0])
            nn.init.xavier_uniform_(self.project_query.weight)

    def _query(self, encoded: Encoded, separator: list[Part]) -> list[Part]:
        project = self.project_query or self.project
        return [Part(project(encoded.query.states), encoded.query.mask, 0, encoded.query.fixed), *separator]
