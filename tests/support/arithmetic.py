"""The layers of transformers in numpy and double precision, and embeddings: what tests compute once more."""

from __future__ import annotations

import math

import numpy as np
import torch
from transformers import AutoModel, AutoTokenizer


def array(tensor):
    return tensor.detach().double().numpy()


def linear(x, module):
    return x @ array(module.weight).T + (0.0 if module.bias is None else array(module.bias))


def layer_norm(x, module):
    x = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + module.eps)
    return x * array(module.weight) + array(module.bias)


def softmax(x):
    """Over the first axis."""
    e = np.exp(x - x.max(0))
    return e / e.sum(0)


def gelu(x):
    return 0.5 * x * (1 + np.vectorize(math.erf)(x / np.sqrt(2)))


def attention(q, k, v, heads):
    """Of every row of `q` over every row of `k`."""
    parts = np.split(np.arange(q.shape[1]), heads)
    return np.hstack([softmax((q[:, h] @ k[:, h].T / np.sqrt(len(h))).T).T @ v[:, h] for h in parts])


def bert(model, x, segments):
    """The first state of a BERT over vectors."""
    embeddings = model.embeddings
    x = x + array(embeddings.position_embeddings.weight)[: len(x)]
    x = layer_norm(x + array(embeddings.token_type_embeddings.weight)[segments], embeddings.LayerNorm)
    for layer in model.encoder.layer:
        own, output = layer.attention.self, layer.attention.output
        q, k, v = (linear(x, module) for module in (own.query, own.key, own.value))
        x = layer_norm(x + linear(attention(q, k, v, own.num_attention_heads), output.dense), output.LayerNorm)
        inner = linear(gelu(linear(x, layer.intermediate.dense)), layer.output.dense)
        x = layer_norm(x + inner, layer.output.LayerNorm)
    return x[0]


def embedding(name: str, text: str, *, pooling: str = "mean", step: int = 1) -> np.ndarray:
    """A text's embedding by the Hugging Face classes, with positions that are `step` apart."""
    tokenizer, model = AutoTokenizer.from_pretrained(name), AutoModel.from_pretrained(name).eval()
    inputs = tokenizer(text, return_tensors="pt")
    positions = torch.arange(inputs["input_ids"].shape[1]).unsqueeze(0) * step
    with torch.no_grad():
        states = model(**inputs, position_ids=positions).last_hidden_state[0]
    return array(states.mean(0) if pooling == "mean" else states[0])


def cosine(a: np.ndarray, b: np.ndarray) -> float:
    return float(a @ b / np.linalg.norm(a) / np.linalg.norm(b))
