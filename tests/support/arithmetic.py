"""The layers of transformers in numpy and double precision: what tests compute models with once more."""

from __future__ import annotations

import math

import numpy as np


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
