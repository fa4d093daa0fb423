"""Published checkpoints whose own classes are equal to others of transformers, which load them without remote code.

- NVIDIA's Llama without a causal mask (`llama_bidirec`: llama-nemotron-rerank-1b-v2, Llama-3.2-NV-RerankQA-1B-v2) is a
  Llama of transformers with another configuration.
- Alibaba's `new` (gte-multilingual-reranker-base) is the architecture `gte` of transformers with other
  names of weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from transformers import AutoConfig, LlamaConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

_POOLINGS = {"avg": "mean", "cls": "cls", "last": "last"}


def bidirectional_llama(config_json: Mapping[str, Any]) -> LlamaConfig:
    """Return the configuration of a `llama_bidirec` checkpoint as one of Llama, with what `split_classifier` needs."""
    values = {name: value for name, value in config_json.items() if name not in ("model_type", "auto_map")}
    pooling, temperature = values.pop("pooling", "avg"), values.pop("temperature", 1.0)
    if pooling not in _POOLINGS:
        raise ValueError(
            f"pooling={pooling!r} is not supported; use the checkpoint's own code (trust_remote_code=True)"
        )
    own = {"is_causal": False, "classifier_pooling": _POOLINGS[pooling], "classifier_temperature": temperature}
    return LlamaConfig.from_dict({**values, **own})


_KEPT = (
    *("architectures", "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size"),
    *("hidden_act", "hidden_dropout_prob", "attention_probs_dropout_prob", "max_position_embeddings"),
    *("type_vocab_size", "initializer_range", "layer_norm_eps", "pad_token_id", "classifier_dropout", "id2label"),
    *("label2id", "num_labels"),
)
_NEEDED = {"position_embedding_type": "rope", "layer_norm_type": "layer_norm", "logn_attention_scale": False}


def gte_config(config_json: Mapping[str, Any]) -> Any:
    """Return the configuration of a `new` checkpoint as that of a `gte` model.

    Its positions are scaled (NTK, by a constant factor at every length), which is a larger base and a linear factor.
    """
    scaling = config_json.get("rope_scaling")
    other = {name: config_json.get(name, need) for name, need in _NEEDED.items()}
    if other != _NEEDED or (scaling and (scaling.get("type") != "ntk" or scaling.get("mixed_b") is not None)):
        raise ValueError(
            f"{other}, rope_scaling={scaling} are not supported; use the checkpoint's own code (trust_remote_code=True)"
        )
    if "gte" not in CONFIG_MAPPING:
        raise ValueError(
            "this transformers lacks the architecture 'gte': install 5.24 or later, or use the checkpoint's own code "
            "(trust_remote_code=True)"
        )
    factor, base = (scaling or {}).get("factor", 1.0), config_json.get("rope_theta", 10_000.0)
    head_size = config_json["hidden_size"] // config_json["num_attention_heads"]
    rope = {"rope_type": "linear", "rope_theta": base * factor, "factor": factor ** (2 / head_size)}
    kept = {name: config_json[name] for name in _KEPT if name in config_json}
    return AutoConfig.for_model("gte", **kept, rope_parameters=rope)


_GTE_NAMES = {
    "encoder.layer.": "layers.",
    ".attention.": ".self_attn.",
    ".attn_ln.": ".post_attention_layernorm.",
    ".mlp_ln.": ".post_mlp_layernorm.",
}
_PACKED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "up_gate_proj": ("up_proj", "gate_proj")}


def gte_weights(weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the state dict of a `gte` model from that of a `new` checkpoint."""
    converted = {}
    for name, tensor in weights.items():
        if name.startswith("new."):
            name = f"gte.{name.removeprefix('new.')}"
        for theirs, ours in _GTE_NAMES.items():
            name = name.replace(theirs, ours)
        packed = next((part for part in _PACKED if f".{part}." in name), "")
        parts = _PACKED.get(packed, (packed,))
        for part, piece in zip(parts, tensor.chunk(len(parts)), strict=True):
            converted[name.replace(packed, part)] = piece
    return converted
