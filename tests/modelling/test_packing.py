"""Packing: a pass without its padding has the states of the padded pass."""

from __future__ import annotations

import copy
import inspect
import pickle
import sys
import types
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import BertModel

from pyterrier_longdoc.modelling import encoder as encoder_module
from pyterrier_longdoc.modelling import runtimes
from pyterrier_longdoc.modelling.backbones.architectures import BackboneOptions
from pyterrier_longdoc.modelling.backbones.load import load_backbone
from pyterrier_longdoc.modelling.encoder import WindowEncoder
from pyterrier_longdoc.modelling.settings import Settings
from pyterrier_longdoc.modelling.windows import WholeText

from ..support import tiny
from ..support.packing import attend_in_groups

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
            folder = tiny.checkpoint(tmp_path_factory.mktemp(family), family, **changes)
            made[family] = load_backbone(folder)
        return made[family]

    return backbone


@pytest.fixture
def packed(monkeypatch):
    """Within the context that it opens, passes are packed where that is possible; yields what they were packed to."""

    @contextmanager
    def context(kernel=attend_in_groups):
        seen = []
        with monkeypatch.context() as patch:
            patch.setattr(runtimes, "kernel_for", lambda *_: kernel)
            patch.setattr(encoder_module, "pack", lambda *args: seen.append(runtimes.pack(*args)) or seen[-1])
            # A CPU makes passes of windows of one length, which leaves nothing to pack.
            patch.setattr(encoder_module, "EXACT_RUN", 10**9)
            patch.setattr(encoder_module, "PACKING_DEVICES", ("cpu",))
            yield seen

    return context


SETTINGS = Settings(WholeText(), batch_size=4)


def encoder_of(backbone):
    return WindowEncoder(backbone).eval()


def windows_of(layout, lengths=LENGTHS):
    """A layout, queries, and windows of documents that have two each, the last but one."""
    rng = np.random.default_rng(0)
    windows = [rng.integers(5, 60, length) for length in lengths]
    documents = [windows[i : i + 2] for i in range(0, len(windows), 2)]
    return layout, [rng.integers(5, 60, 2 + i % 3) for i in range(len(documents))], documents


def cosine(queries, states, same):
    return torch.cosine_similarity(queries.unsqueeze(2), states.unsqueeze(1), dim=-1)


@torch.inference_mode()
def encode(encoder, batch):
    """All that an encoder gives: vectors, the query's states, matches in every layer, and tokens' states."""
    layout, *inputs = batch
    encoded = encoder(*inputs, layout, SETTINGS, needs="all", match=cosine)
    query = encoder(*inputs, layout, SETTINGS, needs="query").query
    states = encoder.token_states(layout.collate(*inputs), SETTINGS)
    return [encoded.cls, query.states, encoded.matches.values, *states]


def assert_same(actual, expected):
    for one, other in zip(actual, expected, strict=True):
        torch.testing.assert_close(one, other, **CLOSE)


# The same states.

CASES = {
    **{family: (family, lambda layout: layout, "cls") for family in runtimes.PACKED_FAMILIES},
    **{pooling: ("bert", lambda layout: layout, pooling) for pooling in ("mean", "last", "late")},
    "padding inside windows": ("bert", lambda layout: layout.fixed(6, 90), "cls"),
    "padding inside RoBERTa's": ("roberta", lambda layout: layout.fixed(6, 90), "cls"),
    "given positions": ("bert", lambda layout: replace(layout, spread=(64, 2)), "cls"),
}


@exchangeable
@pytest.mark.parametrize("case", CASES)
def test_states_are_those_of_the_padded_pass(case, backbones, packed):
    family, change, pooling = CASES[case]
    backbone = backbones(family)
    encoder, batch = encoder_of(backbone), windows_of(change(backbone.pair_layout()))
    encoder.pooling = pooling
    expected = encode(encoder, batch)
    with packed() as seen:
        assert_same(encode(encoder, batch), expected)
        assert sum(pass_ is not None for pass_ in seen) >= 4
        with torch.autocast("cpu", torch.bfloat16):
            vectors = encode(encoder, batch)[0]
    torch.testing.assert_close(vectors, expected[0], rtol=0.1, atol=0.2)


# When passes are packed.

SITUATIONS = (
    *("inference", "gradients", "dropout", "eager", "decoder", "compiled", "own code", "another family", "no kernel"),
    *("nothing padded", "local attention that counts padding"),
)


@pytest.mark.parametrize("situation", SITUATIONS)
def test_situations_in_which_passes_are_padded(situation, tmp_path, packed, monkeypatch):
    families = {"another family": "deberta-v2", "local attention that counts padding": "modernbert"}
    options = BackboneOptions(attn_implementation="eager" if situation == "eager" else None)
    backbone = load_backbone(tiny.checkpoint(tmp_path, families.get(situation, "bert")), options=options)
    encoder, layout = encoder_of(backbone), backbone.pair_layout()
    if situation == "dropout":
        encoder.train()
    if situation == "decoder":
        backbone.model.config.is_decoder = True
    if situation == "compiled":
        # What `compile()` sets, without waiting for a compiler.
        backbone.model._compiled_call_impl = backbone.model._call_impl
    if situation == "own code":
        monkeypatch.setattr(type(backbone.model), "__module__", "transformers_modules.bert")
    if situation == "local attention that counts padding":
        layout = layout.fixed(6, 90)
    kernel = None if situation == "no kernel" else attend_in_groups
    batch = windows_of(layout, (20, 20)) if situation == "nothing padded" else windows_of(layout)
    with packed(kernel) as seen, torch.set_grad_enabled(situation == "gradients"):
        layout, *inputs = batch
        encoder(*inputs, layout, SETTINGS, needs="query")
    assert seen
    assert any(seen) == (EXCHANGEABLE and situation == "inference")


# The model is left as it was.


@exchangeable
@pytest.mark.parametrize("fails", [False, True])
def test_the_model_is_left_as_it_was(fails, cross_encoder, packed):
    backbone = load_backbone(cross_encoder)
    encoder, batch = encoder_of(backbone), windows_of(backbone.pair_layout())
    config, expected = backbone.model.config, encode(encoder, batch)
    before = copy.deepcopy(config.to_dict()), pickle.dumps(config), backbone.describe()

    def failing(*args, **kwargs):
        raise ValueError("no such kernel")

    if fails:
        with packed(failing), pytest.raises(ValueError, match="no such kernel"):
            encode(encoder, batch)
    for _ in range(2):
        with packed() as seen:
            assert_same(encode(encoder, batch), expected)
        assert any(seen)
        assert config._attn_implementation == "sdpa"
        assert (config.to_dict(), pickle.dumps(config), backbone.describe()) == before
    assert_same(encode(pickle.loads(pickle.dumps(encoder)), batch), expected)


@exchangeable
@pytest.mark.parametrize("family", ["bert", "modernbert"])
def test_other_threads_attend_as_before(backbones, packed, family):
    """Another thread finds the model switched, and has no packing of its own."""
    backbone = backbones(family)
    encoder, batch = encoder_of(backbone), windows_of(backbone.pair_layout())
    expected = encode(encoder, batch)
    backbone.model.config._attn_implementation = "longdoc_packed"
    try:
        with packed() as seen:
            assert_same(encode(encoder, batch), expected)
    finally:
        backbone.model.config._attn_implementation = "sdpa"
    assert set(seen) == {None}


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


@pytest.mark.gpu
@exchangeable
@pytest.mark.parametrize("family", runtimes.PACKED_FAMILIES)
def test_states_on_a_gpu(backbones, monkeypatch, family):
    backbone = backbones(family)
    layout, *inputs = windows_of(backbone.pair_layout())
    with torch.inference_mode():
        expected = encoder_of(backbone)(*inputs, layout, SETTINGS).cls
    encoder = encoder_of(copy.deepcopy(backbone)).cuda()
    seen = []
    monkeypatch.setattr(encoder_module, "pack", lambda *args: seen.append(runtimes.pack(*args)) or seen[-1])
    with torch.inference_mode(), torch.autocast("cuda", torch.bfloat16):
        vectors = encoder(*inputs, layout, replace(SETTINGS, device=torch.device("cuda"))).cls
    assert any(seen)
    torch.testing.assert_close(vectors.cpu(), expected, rtol=0.1, atol=0.1)
