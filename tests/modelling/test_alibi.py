"""JINA-v2 and MosaicBERT: published layouts by name, plain arithmetic, memory, and no foreign code."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import pyterrier_longdoc as ld
from pyterrier_longdoc.modelling.backbones import alibi
from pyterrier_longdoc.modelling.backbones.alibi import AlibiBert, AlibiConfig, alibi_slopes, weights_of
from pyterrier_longdoc.modelling.backbones.load import load_backbone

from ..support import tiny_long
from ..support.arithmetic import gelu
from ..support.tiny import change

LAYOUTS = list(tiny_long.PUBLISHED)


def built(layout: str) -> AlibiBert:
    config = AlibiConfig.from_published(tiny_long.published_config(layout), qk_norm=layout == "jina-code")
    model = AlibiBert(config).eval()
    model.load_state_dict(weights_of(tiny_long.published_weights(layout)))
    return model


def by_hand(layout: str, ids: list[int], types: list[int]) -> np.ndarray:
    """The last states of one input, straight from the published names."""
    prefix = tiny_long.PUBLISHED[layout][3]
    weights = {k.removeprefix(prefix): v.double().numpy() for k, v in tiny_long.published_weights(layout).items()}

    def linear(x, name):
        return x @ weights[f"{name}.weight"].T + weights.get(f"{name}.bias", 0.0)

    def norm(x, name):
        x = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-12)
        return x * weights[f"{name}.weight"] + weights[f"{name}.bias"]

    words, segments = (weights[f"embeddings.{kind}_embeddings.weight"] for kind in ("word", "token_type"))
    x = norm(words[ids] + segments[types], "embeddings.LayerNorm")
    distance = np.abs(np.subtract.outer(np.arange(len(ids)), np.arange(len(ids))))
    for layer in range(tiny_long.LAYERS):
        at = f"encoder.layer.{layer}"
        if layout == "mosaic":
            q, k, v = np.split(linear(x, f"{at}.attention.self.Wqkv"), 3, axis=-1)
        else:
            q, k, v = (linear(x, f"{at}.attention.self.{name}") for name in ("query", "key", "value"))
        if layout == "jina-code":
            q, k = norm(q, f"{at}.attention.self.layer_norm_q"), norm(k, f"{at}.attention.self.layer_norm_k")
        heads = []
        for head, slope in enumerate((1 / 4, 1 / 16, 1 / 64, 1 / 256)):  # of four heads, in the ALiBi paper
            part = slice(8 * head, 8 * head + 8)
            scores = q[:, part] @ k[:, part].T / math.sqrt(8) - slope * distance
            scores = np.exp(scores - scores.max(-1, keepdims=True))
            heads.append(scores / scores.sum(-1, keepdims=True) @ v[:, part])
        attended = norm(
            x + linear(np.concatenate(heads, -1), f"{at}.attention.output.dense"), f"{at}.attention.output.LayerNorm"
        )
        if layout == "jina-code":
            attended = norm(x + attended, f"{at}.layer_norm_1")
            up, gate = np.split(linear(attended, f"{at}.mlp.up_gated_layer"), 2, axis=-1)
            x = norm(attended + linear(up * gelu(gate), f"{at}.mlp.down_layer"), f"{at}.layer_norm_2")
        else:
            gate, up = np.split(linear(attended, f"{at}.mlp.gated_layers"), 2, axis=-1)
            x = norm(attended + linear(up * gelu(gate), f"{at}.mlp.wo"), f"{at}.mlp.layernorm")
    return x


@pytest.mark.parametrize("layout", LAYOUTS)
def test_states_equal_those_computed_by_hand(layout):
    ids = np.random.default_rng(0).integers(0, tiny_long.WORDS, 60)
    types = (np.arange(60) > 9).astype(int)
    with torch.no_grad():
        states = built(layout)(torch.tensor(ids)[None], None, torch.tensor(types)[None]).last_hidden_state[0]
    expected = by_hand(layout, ids.tolist(), types.tolist())
    assert np.abs(expected).max() > 1
    np.testing.assert_allclose(states, expected, atol=2e-5)
    used = {name: w for name, w in tiny_long.published_weights(layout).items() if not name.startswith("cls.")}
    numbers = sum(w.numel() for name, w in used.items() if "pooler" not in name)
    assert sum(w.numel() for w in built(layout).state_dict().values()) == numbers


def test_slopes_equal_those_of_the_paper():
    for heads, expected in [
        (1, [1 / 256]),
        (8, [1 / 2, 1 / 4, 1 / 8, 1 / 16, 1 / 32, 1 / 64, 1 / 128, 1 / 256]),  # Press et al. 2022, section 3
        (12, [2**-i for i in range(1, 9)] + [2**-0.5, 2**-1.5, 2**-2.5, 2**-3.5]),
    ]:
        np.testing.assert_allclose(alibi_slopes(heads), expected)


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("elements", [1, 4 * 50 * 7, 4 * 50 * 49])
def test_attention_in_slices_gives_the_same_states(padded, elements, monkeypatch):
    model = built("jina")
    ids = torch.randint(1, tiny_long.WORDS, (2, 50), generator=torch.Generator().manual_seed(0))
    mask = (torch.arange(50) < torch.tensor([[50], [20]])).long() if padded else None
    rows = []
    original = alibi.AlibiBias.rows
    with torch.no_grad():
        whole = model(ids, mask).last_hidden_state
        monkeypatch.setattr(alibi, "BIAS_ELEMENTS", elements)
        monkeypatch.setattr(alibi.AlibiBias, "rows", lambda *a: rows.append(original(*a)) or rows[-1])
        sliced = model(ids, mask).last_hidden_state
    real = torch.ones(2, 50, dtype=torch.bool) if mask is None else mask.bool()
    np.testing.assert_allclose(sliced[real], whole[real], atol=1e-5)
    assert len(rows) >= 2
    assert max(bias.numel() for bias in rows) <= max(elements, 2 * 4 * 50)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_loading_runs_no_code_of_the_checkpoint(layout, tmp_path):
    folder = tiny_long.published(tmp_path, layout)
    change(tmp_path / "config.json", auto_map={"AutoConfig": "own.OwnConfig", "AutoModel": "own.OwnModel"})
    (tmp_path / "own.py").write_text("raise RuntimeError('ran')")
    backbone = load_backbone(folder)
    assert isinstance(backbone.model, AlibiBert)
    assert backbone.pooling == ("cls" if layout == "mosaic" else "mean")
    assert backbone.longest_input == 256
    with pytest.raises(RuntimeError, match="ran"):
        load_backbone(folder, trust_remote_code=True)


@pytest.mark.parametrize("labels", [1, 2])
def test_the_classification_head_equals_that_computed_by_hand(labels, tmp_path, results):
    """`classifier(tanh(pooler(first state)))`, as BERT has it; of two labels the difference."""
    model = ld.LongP(tiny_long.published(tmp_path, "jina", labels=labels), device="cpu")
    score = model(results.iloc[[1]])["score"].item()
    weights = {name: w.numpy() for name, w in load_file(tmp_path / "model.safetensors").items()}
    encoded = model.model.tokenizer("old dog", "a short dog")
    first = by_hand("jina", encoded["input_ids"], encoded["token_type_ids"])[0]
    pooled = np.tanh(weights["pooler.dense.weight"] @ first + weights["pooler.dense.bias"])
    logits = weights["classifier.weight"] @ pooled + weights["classifier.bias"]
    assert score == pytest.approx(logits[0] if labels == 1 else logits[1] - logits[0], abs=1e-4)


def without(part):
    return lambda weights: {name: w for name, w in weights.items() if part not in name}


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda weights: {**weights, "encoder.layer.0.extra.weight": torch.zeros(1)}, "extra.weight"),
        (without("encoder.layer.1.mlp.wo.bias"), "down.bias"),
        (without("encoder.layer.0.attention.self.key.weight"), "size mismatch"),
        (without("pooler"), "pooler.dense.weight"),
    ],
)
def test_checkpoints_with_other_weights_are_refused(edit, message, tmp_path):
    folder, weights = tiny_long.published(tmp_path, "jina", labels=1), tmp_path / "model.safetensors"
    save_file(edit(load_file(weights)), weights, {"format": "pt"})
    with pytest.raises((ValueError, RuntimeError, KeyError), match=message):
        load_backbone(folder)


def test_another_feed_forward_is_refused(tmp_path):
    folder = tiny_long.published(tmp_path, "jina")
    change(tmp_path / "config.json", feed_forward_type="reglu")
    with pytest.raises(ValueError, match="feed_forward_type='reglu'"):
        load_backbone(folder)
