"""Neural Model 1: the probability that a document generates the query, token by token.

Boytsov & Kolter, "Exploring Classic and Neural Lexical Translation Models for Information Retrieval" (ECIR 2021), with
BERT embeddings as in Boytsov et al. 2025. Shapes: B documents, V windows, Q query tokens, T and D document tokens, H
hidden size, P projected size.
"""

from __future__ import annotations

import torch
from torch import nn

from ..inputs import Encoded
from .base import TokenHead

FIRST_TRANSLATION = -4.0
"""The logit of translation probabilities before training: 0.018."""


class NeuralModel1Head(TokenHead, name="model1"):
    """`sum_i log((1 - smoothing) * mean_j T(q_i | d_j) + smoothing * background)`.

    `T(q | d) = sigmoid(F3(relu(F2(relu(F1([x_q; x_d; x_q * x_d]))))))` with `x = P(tanh(norm(e)))` of the last layer's
    states `e`, separately for query and document. With `self_translation`, `T` of a word piece and itself is that
    probability, and all other `T` are scaled by its complement. `[CLS]` is not used. The paper gives neither the sizes
    nor the initial weights, so these are ours: both projections start equal, so that similar states have products of
    equal sign, and `T` starts small, so that a few good translations affect the mean over a long document.

    Args:
        hidden_size: H.
        projection: P.
        units: the number of units of F1; F2 has half as many.
        smoothing: the weight of the background model, lambda.
        background: the probability of any query token in the background model.
        self_translation: the probability that a word piece translates to itself; None for that of `T`, which contextual
            embeddings allow. With little training data, 0.5 is a good start: it ranks by common words.
    """

    needs = "last"
    tunable = ("smoothing", "background", "self_translation")

    def __init__(
        self,
        hidden_size: int,
        *,
        projection: int = 64,
        units: int = 64,
        smoothing: float = 0.1,
        background: float = 1e-5,
        self_translation: float | None = None,
    ) -> None:
        super().__init__(hidden_size, units // 2)
        nn.init.xavier_uniform_(self.final.weight)
        self.smoothing, self.background, self.self_translation = smoothing, background, self_translation
        self.query_norm, self.document_norm = nn.LayerNorm(hidden_size), nn.LayerNorm(hidden_size)
        self.query_projection = nn.Linear(hidden_size, projection)
        self.document_projection = nn.Linear(hidden_size, projection)
        self.from_query = nn.Linear(projection, units)
        self.from_document = nn.Linear(projection, units, bias=False)
        self.from_product = nn.Linear(projection, units, bias=False)
        self.hidden = nn.Linear(units, units // 2)
        self.document_projection.load_state_dict(self.query_projection.state_dict())
        nn.init.constant_(self.final.bias, FIRST_TRANSLATION)

    def match(self, query: torch.Tensor, document: torch.Tensor, same_token: torch.Tensor) -> torch.Tensor:
        x_query = self.query_projection(torch.tanh(self.query_norm(query)))  # (V, Q, P)
        x_document = self.document_projection(torch.tanh(self.document_norm(document)))  # (V, T, P)
        query_part, document_part = self.from_query(x_query), self.from_document(x_document)
        # Query token by query token: all pairs at once would take Q times the memory.
        logits = [
            self._translate(query_part[:, i : i + 1] + document_part, x_query[:, i : i + 1] * x_document)
            for i in range(x_query.shape[1])
        ]
        translation = torch.stack(logits, 1).sigmoid()  # (V, Q, T)
        if self.self_translation is not None:
            other_words = translation * (1.0 - self.self_translation)
            translation = torch.where(same_token, torch.full_like(other_words, self.self_translation), other_words)
        return translation

    def _translate(self, linear: torch.Tensor, product: torch.Tensor) -> torch.Tensor:
        return self.score(self.hidden((linear + self.from_product(product)).relu()).relu())  # (V, T)

    def forward(self, encoded: Encoded) -> torch.Tensor:
        return self.query_contributions(encoded).sum(1)

    def query_contributions(self, encoded: Encoded) -> torch.Tensor:
        """Return the `(B, Q)` log probability of each query token; 0 at padding."""
        matches = encoded.matches
        translation = matches.values[:, 0] * matches.document_mask.unsqueeze(1)  # (B, Q, D)
        length = matches.document_mask.sum(1, keepdim=True).clamp(min=1)
        probability = (1.0 - self.smoothing) * translation.sum(2) / length + self.smoothing * self.background
        return probability.log().masked_fill(~matches.query_mask, 0.0)
