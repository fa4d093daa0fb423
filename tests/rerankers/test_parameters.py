"""Numbers of parameters of the papers' configurations, counted without weights (on the meta device).

The papers' numbers hold tables and layers that are never read, which this package drops: `UNUSED` has them, so that
each sum can be checked by hand.
"""

from __future__ import annotations

import pytest
import torch
from transformers import BertConfig

from pyterrier_longdoc.modelling.apart import Interaction, build_late_backbone
from pyterrier_longdoc.modelling.backbones.load import build_backbone
from pyterrier_longdoc.modelling.encoder import WindowEncoder
from pyterrier_longdoc.modelling.heads import build_head

VOCABULARY, H, A = 30522, 768, 384
BERT = BertConfig().to_dict()


def minilm(layers: int) -> dict:
    """The configuration of cross-encoder/ms-marco-MiniLM-L2/4/6-v2."""
    sizes = {"hidden_size": A, "intermediate_size": 4 * A, "num_attention_heads": 12, "num_hidden_layers": layers}
    return BertConfig(**sizes).to_dict()


def layer(width: int) -> int:
    """Attention, the two linear layers between, and two layer norms."""
    return 4 * (width**2 + width) + (4 * width**2 + 4 * width) + (4 * width**2 + width) + 2 * 2 * width


def embeddings(width: int, *, words: bool) -> int:
    """Words, 512 positions, 2 segments, layer norm."""
    return (VOCABULARY * words + 512 + 2 + 2) * width


def pooler(width: int) -> int:
    return width**2 + width


def linear(width: int, out: int) -> int:
    return width * out + out


ENCODER = embeddings(H, words=True) + 12 * layer(H)  # BERT-base without its pooler
MINILM = {n: embeddings(A, words=False) + n * layer(A) for n in (2, 4, 6)}  # without words and pooler
UNUSED = {"BERT": pooler(H), "words": VOCABULARY * A, "pooler": pooler(A)}
SPECIAL = 2  # c and s


def count(*modules: torch.nn.Module) -> int:
    return sum(p.numel() for module in modules for p in module.parameters())


def parade(head: str = "parade-transformer", **options) -> int:
    """PARADE over BERT-base."""
    with torch.device("meta"):
        backbone = build_backbone({"config": BERT, "cross_encoder": False}, None)
        return count(WindowEncoder(backbone), build_head(head, H, **options))


def test_parts():
    assert (ENCODER, ENCODER + pooler(H)) == (108_891_648, 109_482_240)
    assert {n: size + UNUSED["words"] + UNUSED["pooler"] for n, size in MINILM.items()} == {
        2: 15_615_360,
        4: 19_164_288,
        6: 22_713_216,
    }
    assert layer(H) == 7_087_872


@pytest.mark.parametrize(("layers", "published"), [(6, 132_491_905), (4, 128_942_977)])
def test_pre_trained_aggregators(layers, published):
    """PARADE Transf-PRETR-L6 and -L4: 132M and 128M in Boytsov et al. 2022."""
    number = parade(aggregator=minilm(layers))
    assert number == ENCODER + linear(H, A) + MINILM[layers] + SPECIAL * A + linear(A, 1)
    assert number + sum(UNUSED.values()) == published


@pytest.mark.parametrize("layers", [4, 6])
def test_query_states(layers):
    """PRETR-Q-L6 and -L4: nothing more than PRETR's, unless the query has a projection of its own."""
    without = parade(aggregator=minilm(layers))
    shared = parade("parade-transformer-query", aggregator=minilm(layers))
    separate = parade("parade-transformer-query", aggregator=minilm(layers), separate_projection=True)
    assert shared == without
    assert separate - shared == linear(H, A) == 295_296


def test_random_aggregator():
    """PARADE Transf-RAND-L2: 148M in Boytsov et al. 2025, of which 24M are an unused BERT's words and pooler."""
    number = parade()
    assert number == ENCODER + embeddings(H, words=False) + 2 * layer(H) + SPECIAL * H + linear(H, 1)
    # Our own table of words has been dropped.
    assert number + UNUSED["BERT"] + VOCABULARY * H + pooler(H) == 148_088_065


@pytest.mark.parametrize(("interaction", "published"), [(2, 148_108_033), (6, 155_205_889)])
def test_late_interaction(interaction, published):
    """PARADE-LATEIR: 148M in Boytsov et al. 2025, which is that of an interaction with two layers."""
    with torch.device("meta"):
        description = {"config": BERT, "cross_encoder": False, "interaction": minilm(interaction)}
        backbone = build_late_backbone(description, None)
        head = build_head("parade-transformer", backbone.hidden_size, aggregator=minilm(6))
        number = count(WindowEncoder(backbone), Interaction(H, backbone.interaction), head)
    parts = MINILM[interaction] + MINILM[6] + 2 * SPECIAL * A
    assert number == ENCODER + linear(H, A) + parts + linear(A, 1)
    assert number + UNUSED["BERT"] + 2 * (UNUSED["words"] + UNUSED["pooler"]) == published


def test_ours_in_short():
    """The numbers that the README may name."""
    assert parade(aggregator=minilm(6)) == 120_033_025
    assert parade() == 123_465_985
