"""An encoder-decoder that answers with one token, as an encoder with one state."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers.modeling_outputs import BaseModelOutput


class FirstStep(nn.Module):
    """Encoder and decoder of a T5; the decoder gets only its start token, and its state predicts the first word.

    The decoder shares the encoder's word embeddings. Positions are relative, so nothing limits an input. T5 and monoT5
    were trained with 512 tokens (Raffel et al. 2020, section 3.1.2; Nogueira et al. 2020): default windows have 477, as
    for other backbones, and leave room for a query.
    """

    supports_gradient_checkpointing = False
    lacks_states = (
        "an encoder-decoder gives only that of its answer: use FirstP, MaxP, AvgP, PARADE without query_states, ..."
    )

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.config = model.config
        self.encoder = model.encoder
        self.decoder = model.decoder
        self.decoder.embed_tokens = None
        # Otherwise gradient checkpointing looks for embeddings to hook, and warns.
        self.decoder.main_input_name = "inputs_embeds"

    def get_input_embeddings(self) -> Any:
        """Return the word embeddings."""
        return self.encoder.embed_tokens

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None) -> BaseModelOutput:
        """Return the `(V, 1, H)` state of the first word of the answer to `(V, T)` ids."""
        states = self.encoder(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        start = input_ids.new_full((len(input_ids), 1), self.config.decoder_start_token_id)
        return BaseModelOutput(
            last_hidden_state=self.decoder(
                inputs_embeds=self.get_input_embeddings()(start),
                encoder_hidden_states=states,
                encoder_attention_mask=attention_mask,
                use_cache=False,
            ).last_hidden_state
        )
