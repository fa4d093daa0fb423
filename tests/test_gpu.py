"""What a GPU computes is what a CPU does; each test runs on the CPU too, smaller, so that a mistake in it is seen.

    pytest -n 0 -m gpu tests/test_gpu.py

Those marked `gpu` need CUDA.
"""

from __future__ import annotations

import copy

import numpy as np
import pandas as pd
import pytest
import torch

import pyterrier_longdoc as ld
from pyterrier_longdoc.training import Lora, TrainingArgs

from .support import tiny, tiny_long
from .support.systems import QUIET, REPRESENTATIVE, make, scores
from .support.toy import toy_task

HAS_GPU = torch.cuda.is_available()
ON_GPU = [pytest.mark.gpu, pytest.mark.skipif(not HAS_GPU, reason="torch sees no GPU here")]
pytestmark = [*QUIET, pytest.mark.filterwarnings("ignore::pyterrier_longdoc.rerankers.reranker.PrecisionWarning")]


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=ON_GPU)])
def device(request) -> str:
    return request.param


def run_of(lengths: list[int], queries: int = 2) -> pd.DataFrame:
    """Texts of so many words, which are tokens, each for every query."""
    rng = np.random.default_rng(0)
    texts = [" ".join(rng.choice(tiny.WORDS, length)) for length in lengths]
    rows = [
        (f"q{query}", tiny.WORDS[19 + query], f"d{number}", text)
        for query in range(queries)
        for number, text in enumerate(texts)
    ]
    return pd.DataFrame(rows, columns=["qid", "query", "docno", "text"])


UNEQUAL = run_of([5, 60, 13, 0, 33, 90, 41, 17, 17, 2])


def assert_near(found: np.ndarray, expected: np.ndarray) -> None:
    """As near as scores in bfloat16 are: a tenth of their spread, and 0.02 in the mean."""
    spread = float(np.ptp(expected))
    assert spread > 0
    off = np.abs(found - expected) / spread
    assert off.max() < 0.1
    assert off.mean() < 0.02


# Precision.


@pytest.mark.parametrize("name", REPRESENTATIVE)
def test_float32_gives_the_scores_of_the_cpu(name, device):
    expected = scores(make(name, device="cpu"), UNEQUAL)
    model = make(name, device=device, dtype="float32")
    np.testing.assert_allclose(scores(model, UNEQUAL), expected, rtol=1e-3, atol=1e-4 * np.abs(expected).max())
    assert (model.coverage.dtype, model.model.device.type) == ("float32", device)


@pytest.mark.parametrize("name", REPRESENTATIVE)
def test_bfloat16_gives_nearly_the_scores_of_float32(name, device):
    expected = scores(make(name, device="cpu"), UNEQUAL)
    model = make(name, device=device, dtype="bfloat16")
    assert_near(scores(model, UNEQUAL), expected)
    assert model.coverage.dtype == "bfloat16"
    # The weights stay as they are: only what is computed of them is rounded.
    assert {parameter.dtype for parameter in model.model.parameters()} == {torch.float32}


@pytest.mark.parametrize("name", [pytest.param("MaxP", marks=ON_GPU)])
def test_a_gpu_is_used_with_bfloat16_by_default(name):
    model = make(name)
    assert_near(scores(model, UNEQUAL), scores(make(name, device="cpu"), UNEQUAL))
    native = torch.cuda.is_bf16_supported(including_emulation=False)
    assert model.coverage.dtype == ("bfloat16" if native else "float32")
    assert model.model.device.type == "cuda"


# Training.


def test_fit_in_bfloat16_with_lora_and_checkpointing(device, tmp_path):
    run, judged = toy_task(0)
    recipe = TrainingArgs(
        epochs=8,
        queries_per_step=4,
        queries_per_forward=4,
        learning_rates={"": 5e-3},
        dtype="bfloat16",
        lora=Lora(rank=8),
        gradient_checkpointing=True,
        dropout=0.0,
    )
    model = make("MaxP", device=device, training=recipe)
    before = copy.deepcopy(model.model.state_dict())
    losses = model.fit(run, judged).history["loss"].tolist()
    assert np.mean(losses[-3:]) < 0.7 * losses[0]
    assert model.coverage.dtype == "bfloat16"
    after = model.model.state_dict()
    assert after.keys() == before.keys()
    assert any(not torch.equal(before[name], after[name]) for name in after if "query.weight" in name)
    assert {tensor.dtype for tensor in after.values() if tensor.is_floating_point()} == {torch.float32}
    model.save(tmp_path / "model")
    here = ld.CrossEncoder.load(tmp_path / "model", device="cpu")
    assert_near(scores(model, run), scores(here, run))


@pytest.mark.parametrize("name", [pytest.param("MaxP", marks=ON_GPU)])
def test_training_on_a_gpu_gives_the_losses_of_the_cpu(name):
    run, judged = toy_task(0)
    recipe = TrainingArgs(epochs=2, queries_per_step=4, learning_rates={"": 1e-3}, dropout=0.0)
    here, there = (make(name, device=own, training=recipe).fit(run, judged) for own in ("cpu", "cuda"))
    np.testing.assert_allclose(there.history["loss"], here.history["loss"], rtol=1e-3)


# Long inputs.


def test_longp_reads_its_longest_input(device, tmp_path):
    """8,192 tokens, of which the last ones count; an eighth of that on a CPU."""
    length = 8192 if device == "cuda" else 1024
    backbone = tiny_long.encoder(tmp_path, "modernbert", labels=1, max_position_embeddings=length)
    run = run_of([length - 20, length // 2, 9, length // 3], queries=1)
    model = ld.LongP(backbone, max_query_len=8, device=device, dtype="bfloat16")
    found = scores(model, run)
    assert_near(found, scores(ld.LongP(backbone, max_query_len=8, device=device, dtype="float32"), run))
    assert model.coverage.tokens_read == model.coverage.tokens > 1.5 * length
    other = run.assign(text=[" ".join([*text.split()[:-30], *["find"] * 30]) for text in run["text"]])
    assert not np.isclose(scores(model, other)[0], found[0], rtol=1e-3)
