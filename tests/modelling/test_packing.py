"""Packing: a pass without its padding has the states of the padded pass."""

from __future__ import annotations

import copy
import inspect
import pickle
import sys
import types
from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import BertModel

from pyterrier_longdoc.modelling import encoder as encoder_module
from pyterrier_longdoc.modelling import runtimes
from pyterrier_longdoc.modelling.backbones.architectures import BackboneOptions
from pyterrier_longdoc.modelling.backbones.load import load_backbone
from pyterrier_longdoc.modelling.heads import build_head
from pyterrier_longdoc.modelling.windows import GreedyChunks

from ..support import tiny
from ..support.packing import attend_in_groups
from ..support.scorers import scorer_of

CLOSE = {"rtol": 1e-5, "atol": 1e-5}
CAMEMBERT = {"max_position_embeddings": 130, "type_vocab_size": 1, "pad_token_id": 0}
LENGTHS = (40, 3, 90, 0, 40, 17, 17, 64, 1, 33)
"""Document tokens of each window; with them local attention, 8 tokens to each side in the tiny ModernBERT, matters."""

EXCHANGEABLE = getattr(BertModel, "_supports_attention_backend", False)
"""Not with transformers 4: there all passes are padded."""

exchangeable = pytest.mark.skipif(not EXCHANGEABLE, reason="transformers 4 has no exchangeable attention of encoders")


@pytest.fixture(scope="module")
def backbones(tmp_path_factory):
    """Tiny backbones by family, each made once."""
    made = {}

    def backbone(family):
        if family not in made:
            changes = CAMEMBERT if family == "camembert" else {}
            made[family] = load_backbone(tiny.checkpoint(tmp_path_factory.mktemp(family), family, **changes))
            made[family].model.eval()
        return made[family]

    return backbone


@pytest.fixture
def kernel(monkeypatch):
    """Lets a CPU pack by the kernel that it is called with."""

    def use(found=attend_in_groups):
        monkeypatch.setattr(runtimes, "kernel_for", lambda *_: found)

    use()
    return use


def pass_of(layout, lengths=LENGTHS):
    """A pass as the encoder makes it: what the backbone reads, and the mask."""
    rng = np.random.default_rng(0)
    queries = [rng.integers(5, 60, 2 + i % 3) for i in range(len(lengths))]
    batch = layout.collate(queries, [[rng.integers(5, 60, length)] for length in lengths])
    mask = batch.attention_mask
    inputs = {"input_ids": batch.input_ids} | ({} if bool(mask.all()) else {"attention_mask": mask.long()})
    further = {"token_type_ids": batch.token_type_ids, "position_ids": batch.position_ids}
    return inputs | {name: values for name, values in further.items() if values is not None}, mask


@torch.inference_mode()
def padded(model, inputs, mask):
    """The states of real tokens in the padded pass."""
    return model(**inputs).last_hidden_state[mask]


@torch.inference_mode()
def packed(model, inputs, mask):
    """The same without padding, zeros at padding."""
    packing = runtimes.pack(model, inputs, mask)
    states = packing.padded(packing.encode(model))
    assert (states[~mask] == 0).all()
    return states[mask]


# The same states.

CASES = {
    **{family: (family, lambda layout: layout) for family in runtimes.PACKED_FAMILIES},
    "padding inside windows": ("bert", lambda layout: layout.fixed(6, 90)),
    "padding inside RoBERTa's": ("roberta", lambda layout: layout.fixed(6, 90)),
    "given positions": ("bert", lambda layout: replace(layout, spread=(64, 2))),
}


@exchangeable
@pytest.mark.parametrize("case", CASES)
def test_states_are_those_of_the_padded_pass(case, backbones, kernel):
    family, change = CASES[case]
    backbone = backbones(family)
    inputs, mask = pass_of(change(backbone.pair_layout()))
    expected = padded(backbone.model, inputs, mask)
    torch.testing.assert_close(packed(backbone.model, inputs, mask), expected, **CLOSE)
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(packed(backbone.model, inputs, mask).float(), expected, rtol=0.1, atol=0.3)


@exchangeable
@pytest.mark.parametrize("head", ["maxp", "parade-transformer-query", "cedr-knrm"])
def test_scores_are_those_of_padded_passes(head, backbones, kernel, monkeypatch):
    """Also for heads that look at the query's states, and at the states of all layers."""
    backbone = backbones("bert")
    module = build_head(head, backbone.hidden_size, channels=backbone.channels)
    scorer = scorer_of(backbone, GreedyChunks(20), module, max_query_len=8)
    pairs = ["old dog", "snow", "a red fish"], ["the cat " * 30, "rain", "a dog and a bird " * 8]
    monkeypatch.setattr(encoder_module, "EXACT_RUN", 1000)  # so that passes have windows of several lengths
    expected = scorer.score(*pairs).scores
    seen = []
    monkeypatch.setattr(encoder_module, "PACKING_DEVICES", ("cpu",))
    monkeypatch.setattr(encoder_module, "pack", lambda *args: seen.append(runtimes.pack(*args)) or seen[-1])
    np.testing.assert_allclose(scorer.score(*pairs).scores, expected, rtol=1e-4, atol=1e-5)
    assert any(seen)


# When passes are packed.

SITUATIONS = (
    *("inference", "gradients", "dropout", "eager", "decoder", "compiled", "own code", "another family", "no kernel"),
    *("nothing padded", "local attention that counts padding"),
)


@pytest.mark.parametrize("situation", SITUATIONS)
def test_situations_in_which_passes_are_padded(situation, tmp_path, kernel, monkeypatch):
    families = {"another family": "deberta-v2", "local attention that counts padding": "modernbert"}
    options = BackboneOptions(attn_implementation="eager" if situation == "eager" else None)
    backbone = load_backbone(tiny.checkpoint(tmp_path, families.get(situation, "bert")), options=options)
    model, layout = backbone.model.train(situation == "dropout"), backbone.pair_layout()
    if situation == "decoder":
        model.config.is_decoder = True
    if situation == "compiled":
        # What `compile()` sets, without waiting for a compiler.
        model._compiled_call_impl = model._call_impl
    if situation == "own code":
        monkeypatch.setattr(type(model), "__module__", "transformers_modules.bert")
    if situation == "local attention that counts padding":
        layout = layout.fixed(6, 90)
    if situation == "no kernel":
        kernel(None)
    inputs, mask = pass_of(layout, (20,) if situation == "nothing padded" else LENGTHS)
    with torch.set_grad_enabled(situation == "gradients"):
        packing = runtimes.pack(model, inputs, mask)
    assert (packing is not None) == (EXCHANGEABLE and situation == "inference")


# The model is left as it was.


@exchangeable
@pytest.mark.parametrize("fails", [False, True])
def test_the_model_is_left_as_it_was(fails, cross_encoder, kernel):
    backbone = load_backbone(cross_encoder)
    model, given = backbone.model.eval(), pass_of(backbone.pair_layout())
    config, expected = model.config, padded(model, *given)
    before = copy.deepcopy(config.to_dict()), pickle.dumps(config), backbone.describe()

    def failing(*args, **kwargs):
        raise ValueError("no such kernel")

    if fails:
        kernel(failing)
        with pytest.raises(ValueError, match="no such kernel"):
            packed(model, *given)
        kernel()
    for _ in range(2):
        torch.testing.assert_close(packed(model, *given), expected, **CLOSE)
        assert config._attn_implementation == "sdpa"
        assert (config.to_dict(), pickle.dumps(config), backbone.describe()) == before
    torch.testing.assert_close(padded(pickle.loads(pickle.dumps(model)), *given), expected, **CLOSE)


@exchangeable
@pytest.mark.parametrize("family", ["bert", "modernbert"])
def test_other_threads_attend_as_before(backbones, family):
    """Another thread finds the model switched, and has no packing of its own."""
    backbone = backbones(family)
    given = pass_of(backbone.pair_layout())
    expected = padded(backbone.model, *given)
    backbone.model.config._attn_implementation = "longdoc_packed"
    try:
        torch.testing.assert_close(padded(backbone.model, *given), expected, **CLOSE)
    finally:
        backbone.model.config._attn_implementation = "sdpa"


# Kernels.


@pytest.mark.parametrize(
    ("device", "dtype", "head_size", "capability", "found"),
    [
        ("cpu", torch.bfloat16, 64, (8, 0), None),
        ("cuda", torch.float32, 64, (8, 0), None),
        ("cuda", torch.bfloat16, 20, (8, 0), None),
        ("cuda", torch.bfloat16, 264, (8, 0), None),
        ("cuda", torch.bfloat16, 64, (7, 5), None),
        ("cuda", torch.bfloat16, 64, (8, 0), "flash-attn"),
        ("cuda", torch.float16, 64, (9, 0), "flash-attn"),
    ],
)
def test_kernels_by_gpu(monkeypatch, device, dtype, head_size, capability, found):
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(runtimes, "flash_attn_kernel", lambda: "flash-attn")
    assert runtimes.kernel_for.__wrapped__(torch.device(device), dtype, head_size) == found
    monkeypatch.setattr(runtimes, "flash_attn_kernel", lambda: None)
    monkeypatch.setattr(runtimes, "torch_kernel", lambda: "torch")
    expected = "torch" if found else None
    assert runtimes.kernel_for.__wrapped__(torch.device(device), dtype, head_size) == expected


def unequal():
    """Arguments of a kernel: queries, keys and values of windows of 5, 1 and 9 tokens, and where they lie."""
    boundaries = torch.tensor([0, 5, 6, 15], dtype=torch.int32)
    states = torch.randn(3, 15, 4, 8, generator=torch.Generator().manual_seed(0))
    return *states, boundaries, boundaries, 9, 9


def assert_called_as_it_wants(kernel):
    called = kernel(*unequal(), scale=0.3, window=(2, 2))
    torch.testing.assert_close(called, attend_in_groups(*unequal(), scale=0.3, window=(2, 2)))


def test_flash_attn(monkeypatch):
    """The signature is that of flash-attn 2.3.3 and later."""

    def flash_attn_varlen_func(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k,
        dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1),
    ):  # fmt: skip
        assert (dropout_p, causal) == (0.0, False)
        bounds = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
        return attend_in_groups(q, k, v, *bounds, scale=softmax_scale, window=window_size)

    package = types.ModuleType("flash_attn")
    package.flash_attn_varlen_func = flash_attn_varlen_func
    monkeypatch.setitem(sys.modules, "flash_attn", package)
    monkeypatch.setattr(runtimes, "is_flash_attn_2_available", lambda: True)
    assert_called_as_it_wants(runtimes.flash_attn_kernel())
    monkeypatch.setitem(sys.modules, "flash_attn", None)  # made for another torch
    assert runtimes.flash_attn_kernel() is None
    monkeypatch.setattr(runtimes, "is_flash_attn_2_available", lambda: False)
    assert runtimes.flash_attn_kernel() is None


def test_kernel_of_torch(monkeypatch):
    varlen = pytest.importorskip("torch.nn.attention.varlen", reason="before torch 2.10")
    signature = inspect.signature(varlen.varlen_attn)
    if "num_splits" not in signature.parameters:
        pytest.skip("before torch 2.12")

    def varlen_attn(*args, **kwargs):
        bound = signature.bind(*args, **kwargs).arguments
        assert bound.pop("num_splits") == 1
        names = ("query", "key", "value", "cu_seq_q", "cu_seq_k", "max_q", "max_k")
        arguments = [bound.pop(name) for name in names]
        return attend_in_groups(*arguments, scale=bound.pop("scale"), window=bound.pop("window_size"))

    varlen_attn.__signature__ = signature
    monkeypatch.setattr(varlen, "varlen_attn", varlen_attn)
    assert_called_as_it_wants(runtimes.torch_kernel())


def test_kernel_of_an_older_torch(monkeypatch):
    older = types.ModuleType("torch.nn.attention.varlen")
    older.varlen_attn = lambda query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, is_causal=False: query
    for module in (older, None):
        monkeypatch.setitem(sys.modules, "torch.nn.attention.varlen", module)
        assert runtimes.torch_kernel() is None
