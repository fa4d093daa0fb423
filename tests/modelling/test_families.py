"""Encoder families beyond the ones with a head of their own: positions, labels, heads that are left out."""

from __future__ import annotations

import logging
import warnings

import numpy as np
import pytest
import torch

import pyterrier_longdoc as ld
from pyterrier_longdoc.modelling.backbones.load import load_backbone

from ..support import tiny

POSITIONS_FROM_IDS = (
    "roberta", "esm", "luke", "markuplm", "xlm-roberta", "camembert", "mpnet", "data2vec-text",
    "roberta-prelayernorm", "ibert", "xlm-roberta-xl",
)  # fmt: skip
SIZES = {"max_position_embeddings": 67, "type_vocab_size": 1, "pad_token_id": 1}


@pytest.mark.parametrize("family", POSITIONS_FROM_IDS)
def test_longest_input_is_what_the_positions_allow(family, tmp_path):
    backbone = load_backbone(tiny.checkpoint(tmp_path, family, labels=None, **SIZES))
    assert backbone.longest_input == 67 - 1 - 1
    with torch.no_grad():
        backbone.model(torch.full((1, 65), 7))
        with pytest.raises((IndexError, RuntimeError)):
            backbone.model(torch.full((1, 66), 7))


@pytest.mark.parametrize("family", POSITIONS_FROM_IDS)
def test_fixed_layout_counts_its_padding(family, tmp_path):
    """In the fixed layout the document begins at the same position after a short query and a long one."""
    backbone = load_backbone(tiny.checkpoint(tmp_path, family, labels=None, **SIZES))
    layout = backbone.pair_layout().fixed(6, 10)
    queries = [np.array([7, 8]), np.array([7, 8, 9, 10, 11])]
    batch = layout.collate(queries, [[np.array([12, 13])]] * 2)
    assert batch.position_ids is not None
    assert batch.position_ids.tolist() == [list(range(2, 2 + layout.specials + 6 + 10))] * 2


def test_unsupported_head_is_left_out_and_said_so(tmp_path, results, caplog):
    folder = tiny.checkpoint(tmp_path, "mpnet", **SIZES)
    model = ld.MaxP(folder, window_size=20, stride=10, max_query_len=8)
    with caplog.at_level(logging.WARNING), pytest.warns(ld.UntrainedWarning):
        out = model(results)
    assert "the classification head of mpnet is not among those that can be taken over" in caplog.text
    assert np.isfinite(out["score"]).all()


@pytest.mark.parametrize("family", ["bert", "electra", "distilbert", "deberta-v2", "roberta", "modernbert"])
def test_checkpoint_without_a_tokenizer(family, tmp_path, results):
    folder = tiny.checkpoint(tmp_path, family)
    for file in tmp_path.glob("*token*"):
        file.unlink()
    with pytest.raises(ValueError, match=r"no tokenizer files: copy|tokenizer of checkpoint .* cannot be"):
        ld.MaxP(folder, window_size=20, stride=10, max_query_len=8)(results)


LEAKY = {
    "convbert": {"head_ratio": 2, "embedding_size": 32},
    "fnet": {},
    "nystromformer": {},
}


@pytest.mark.parametrize("family", LEAKY)
@pytest.mark.parametrize("batch_size", [2, 64])
def test_encoders_that_let_padding_in(family, batch_size, tmp_path, results):
    folder = tiny.checkpoint(tmp_path, family, labels=None, **LEAKY[family])
    arguments = {"window_size": 20, "stride": 10, "max_query_len": 8}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        apart = [ld.MaxP(folder, batch_size=1, **arguments)(results.iloc[[i]])["score"].item() for i in range(5)]
        together = ld.MaxP(folder, batch_size=batch_size, **arguments)(results)["score"]
    np.testing.assert_allclose(together, apart, rtol=1e-4)
    assert len(set(apart)) > 3


@pytest.mark.parametrize("family", ["bert", "mpnet"])
def test_classifier_of_three_classes_is_no_ranker(family, tmp_path, results):
    sizes = SIZES if family == "mpnet" else {}
    folder = tiny.checkpoint(tmp_path, family, labels=3, **sizes)
    with pytest.raises(ValueError, match="is a classifier with 3 labels"):
        ld.MaxP(folder)(results)
