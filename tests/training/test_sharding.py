"""FSDP in a group of one process; test_loop.py has two."""

from __future__ import annotations

import pytest
import torch
from torch import distributed, nn

from pyterrier_longdoc.modelling.backbones.architectures import layer_stack
from pyterrier_longdoc.training import TrainingArgs
from pyterrier_longdoc.training.loop import Run, ranking_loss, trained_tensors
from pyterrier_longdoc.training.sharding import (
    Sharding,
    clip_gradients,
    divided_as,
    is_sharded,
    own_part,
    whole,
)

from ..support.systems import QUIET, make
from ..support.toy import Toy

pytest.importorskip("torch", minversion="2.9")
pytestmark = QUIET


@pytest.fixture
def scorer(cross_encoder):
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield make("PARADE-avg", cross_encoder, device="cpu").load_scorer()
    distributed.destroy_process_group()


@pytest.mark.parametrize("gather", [True, False])
def test_weights_come_back(gather, scorer):
    before = {name: tensor.clone() for name, tensor in scorer.state_dict().items()}
    expected = scorer(["cat"], ["the cat sat"])
    sharding = Sharding(scorer)
    kinds = {is_sharded(tensor): name for name, tensor in scorer.named_parameters()}
    assert kinds[True].startswith("encoder.backbone.")
    assert not kinds[False].startswith("encoder.backbone.")
    scores = scorer(["cat"], ["the cat sat"])
    torch.testing.assert_close(scores, expected)
    (scores.sum() + sharding.join()).backward()
    with torch.no_grad():
        for parameter in scorer.parameters():
            parameter.add_(1.0)
    sharding.end(gather=gather)
    assert scorer.state_dict().keys() == before.keys()
    for name, parameter in scorer.named_parameters():
        torch.testing.assert_close(parameter, before[name] + float(gather))
    assert not any(map(is_sharded, scorer.parameters()))


def test_tensors_and_gradients(scorer):
    names = [name for name, _ in scorer.named_parameters()]
    expected = {name: tensor.clone() for name, tensor in trained_tensors(scorer).items()}
    Sharding(scorer)
    for name, tensor in trained_tensors(scorer).items():
        assert torch.equal(whole(tensor), expected[name])
        assert torch.equal(own_part(tensor), expected[name])
        again = divided_as(tensor, expected[name])
        assert is_sharded(again) == is_sharded(tensor)
        assert torch.equal(whole(again), expected[name])
        assert not is_sharded(divided_as(tensor, torch.zeros(())))  # a count of steps
    plain = [nn.Parameter(expected[name]) for name in names]
    for own, parameter in zip(plain, scorer.parameters(), strict=True):
        own.grad = torch.ones_like(own)
        parameter.grad = divided_as(parameter, torch.ones_like(own))
    nn.utils.clip_grad_norm_(plain, 0.5)
    clip_gradients(list(scorer.parameters()), 0.5)
    for own, parameter in zip(plain, scorer.parameters(), strict=True):
        torch.testing.assert_close(whole(parameter.grad), own.grad)


@pytest.mark.parametrize("name", ["LateIR", "BiEncoder-max", "BeST"])
def test_what_is_no_cross_encoder_is_refused(name):
    scorer = nn.ModuleDict({"ranker": Toy()}) if name == "BeST" else make(name, device="cpu").load_scorer()
    with pytest.raises(ValueError, match=r"which a \w+(Encoder|Dict) has not: train it without, by --multi_gpu"):
        Sharding(scorer)


def test_what_else_is_refused(monkeypatch):
    with pytest.raises(ValueError, match="a stack of layers, and Linear is not"):
        layer_stack(nn.Linear(1, 1))
    run = Run(Toy(), TrainingArgs(dtype="float16"), ranking_loss, 1, [])
    run.shard()  # not asked for
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    run.processes = 2
    with pytest.raises(ValueError, match="dtype='float16' does not go with FSDP: use dtype='bfloat16'"):
        run.shard()
    monkeypatch.delattr("torch.distributed.fsdp.FSDPModule.set_force_sum_reduction_for_comms")
    with pytest.raises(ImportError, match=r"FSDP needs torch 2\.9 or later"):
        Sharding(Toy())
