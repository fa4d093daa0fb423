"""What every aggregation head must do, known by name or not: a new head meets most of these tests without a change.

Tests over `ALL` hold for any head. The sets below name the heads that are meant to behave otherwise.
"""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn
from transformers import AutoModel

import pyterrier_longdoc as ld
from pyterrier_longdoc.modelling.heads import base, build_head, registered_heads
from pyterrier_longdoc.modelling.heads.base import Head, WarmStart, head_options
from pyterrier_longdoc.modelling.heads.maxsim import MaxSimStart
from pyterrier_longdoc.modelling.inputs import Encoded, Matches, QueryStates

from ..support import tiny, tiny_long
from ..support.arithmetic import array, bert, linear, softmax
from ..support.systems import QRELS, QUIET, reloaded, told_of

pytestmark = QUIET

H = 24
CHANNELS = 3
QUERY = 5
ALL = [name for name, head in registered_heads().items() if head.__module__.startswith("pyterrier_longdoc")]
TRANSFORMERS = {"parade-transformer", "parade-transformer-query"}

# Exceptions, and why.
ORDERED = {"firstp", "cosine", *TRANSFORMERS, "cedr-pacrr"}  # the order of the windows matters
NEEDS_TRAINING = {*TRANSFORMERS, "cedr-pacrr", "cedr-drmm", "model1"}
WITHOUT_WEIGHTS = {"maxsim", "cosine"}
SHIFTS = ("attention.bias", "key.bias")  # added to all logits of a softmax, which does not change with it

CLOSE = {"rtol": 1e-5, "atol": 1e-5}
"""Scores are sums of numbers of the order of one, which may cancel out: rounding shows in the sixth decimal."""


def make(name, seed=0, hidden_size=H, **options):
    """A head with random weights, in evaluation mode."""
    torch.manual_seed(seed)
    head = build_head(name, hidden_size, channels=CHANNELS, **options)
    with torch.no_grad():
        for parameter in head.parameters():
            # No parameter stays at a value, such as zero, that would hide it.
            parameter.add_(torch.randn_like(parameter) * 0.3)
    return head.eval()


def encoded(counts=(4, 1, 3, 2), seed=1, windows=None, garbage=None):
    """Documents with this many windows each, their tokens' matches with a query, and the query's states.

    With `garbage` there are random vectors where no window or query token is. Padding of matches is always zero.
    """
    generator = torch.Generator().manual_seed(seed)
    longest = windows or max(counts)
    cls = torch.zeros(len(counts), longest, H)
    mask = torch.zeros(len(counts), longest, dtype=torch.bool)
    for i, count in enumerate(counts):
        cls[i, :count] = torch.randn(count, H, generator=generator)
        mask[i, :count] = True
    matched = matches(counts, generator, extra=longest - max(counts))
    states = torch.zeros(*matched.query_mask.shape, H)
    states[:, :QUERY] = torch.randn(len(counts), QUERY, H, generator=generator)
    states = states * matched.query_mask.unsqueeze(-1)
    if garbage is not None:
        cls, states = (noisy(x, m, garbage) for x, m in ((cls, mask), (states, matched.query_mask)))
    return Encoded(cls, mask, matched, QueryStates(states, matched.query_mask))


def noisy(vectors, mask, seed):
    noise = 100 * torch.randn(vectors.shape, generator=torch.Generator().manual_seed(seed))
    return torch.where(mask.unsqueeze(-1), vectors, noise)


def matches(counts, generator, extra=0):
    """Random matches: windows of 2 to 5 tokens, queries of 2 to 5; the padding grows with `extra`."""
    sizes = [torch.randint(2, 6, (count,), generator=generator) for count in counts]
    width = max(int(size.sum()) for size in sizes) + 3 * extra
    window = torch.full((len(counts), width), -1)
    for i, size in enumerate(sizes):
        window[i, : int(size.sum())] = torch.arange(len(size)).repeat_interleave(size)
    query_mask = torch.arange(QUERY + extra) < torch.tensor([QUERY - i % 4 for i in range(len(counts))]).unsqueeze(1)
    values = torch.zeros(len(counts), CHANNELS, QUERY + extra, width)
    for i in range(len(counts)):
        real = (int(query_mask[i].sum()), int((window[i] >= 0).sum()))
        values[i, :, : real[0], : real[1]] = torch.rand(CHANNELS, *real, generator=generator)
        values[i, 0, 0, 0] = 0.9995  # in reach of the narrowest kernel
    return Matches(values, query_mask, window >= 0, window)


def only(batch, i, windows):
    """Some windows of one document, in this order, as a batch of its own and without any padding."""
    whole = batch.matches
    tokens = torch.cat([(whole.window[i] == n).nonzero().flatten() for n in windows])
    number = torch.tensor([windows.index(n) for n in whole.window[i, tokens].tolist()])
    values = whole.values[i : i + 1][:, :, whole.query_mask[i]][..., tokens]
    real = [torch.ones(1, size, dtype=torch.bool) for size in (len(windows), *values.shape[2:])]
    return Encoded(
        batch.cls[i : i + 1, windows],
        real[0],
        Matches(values, real[1], real[2], number.unsqueeze(0)),
        QueryStates(batch.query.states[i : i + 1, whole.query_mask[i]], real[1]),
    )


def documents_of(batch):
    """Each document as a batch of its own."""
    return [only(batch, i, list(range(int(mask.sum())))) for i, mask in enumerate(batch.mask)]


def matching(head):
    """What a head makes of random token states, the second document token being the first query token."""
    generator = torch.Generator().manual_seed(2)
    query, document = (torch.randn(2, size, H, generator=generator) for size in (3, 4))
    same = torch.zeros(2, 3, 4, dtype=torch.bool)
    same[:, 0, 1] = True
    return head.match(query, document, same) if head.needs in ("last", "all") else torch.zeros(0)


def test_scores_do_not_depend_on_other_documents_or_padding():
    for name in ALL:
        head = make(name)
        batch = encoded()
        scores = head(batch)
        assert scores.shape == (4,)
        assert len(set(scores.tolist())) == 4
        alone = torch.cat([head(document) for document in documents_of(batch)])
        torch.testing.assert_close(scores, alone, **CLOSE)
        for garbage in (None, 0, 1):
            torch.testing.assert_close(head(encoded(windows=8, garbage=garbage)), scores, **CLOSE)


def test_only_ordered_heads_depend_on_the_order_of_windows():
    for name in ALL:
        head = make(name)
        batch = encoded((5, 3))
        there = head(batch)
        back = torch.cat([head(only(batch, i, order)) for i, order in enumerate(([3, 4, 0, 1, 2], [2, 1, 0]))])
        if name in ORDERED:
            assert not torch.isclose(there, back, **CLOSE).any()
        else:
            torch.testing.assert_close(there, back, **CLOSE)


def test_gradients_reach_every_parameter():
    # Also where attention starts at zero: its gradient does not vanish there.
    for name, initial in [(name, initial) for name in ALL for initial in (True, False)]:
        torch.manual_seed(0)
        head = build_head(name, H, channels=CHANNELS).eval() if initial else make(name)
        if name in WITHOUT_WEIGHTS:
            assert not list(head.parameters())
            continue
        # Some parameters work on token states, before the matches.
        (head(encoded()).square().sum() + matching(head).square().sum()).backward()
        sizes = {key: 0.0 if p.grad is None else p.grad.abs().max().item() for key, p in head.named_parameters()}
        without = [key for key, size in sizes.items() if size < 1e-6 * max(sizes.values())]
        assert without == [key for key, _ in head.named_parameters() if key.endswith(SHIFTS)], name


def test_window_scores_are_scores_of_documents_of_one_window():
    for name in ALL:
        head = make(name)
        batch = encoded(garbage=0)
        by_window = head.window_scores(batch)
        assert by_window.shape == batch.mask.shape
        assert torch.equal(by_window.isnan(), ~batch.mask)
        for i, j in batch.mask.nonzero().tolist():
            torch.testing.assert_close(by_window[i, j], head(only(batch, i, [j]))[0], **CLOSE)


def test_window_weights_are_a_distribution_over_the_real_windows():
    for name in ALL:
        head = make(name)
        batch = encoded(garbage=0)
        weights = head.window_weights(batch)
        assert (weights is not None) == (type(head).window_weights is not Head.window_weights)
        assert weights is not None or name not in ("parade-attn", "parade-attn-elementwise")
        if weights is not None:
            assert weights.shape == batch.mask.shape
            torch.testing.assert_close(weights.sum(1), torch.ones(4), **CLOSE)
            assert (weights[~batch.mask] == 0).all()
            assert (weights[batch.mask] > 0).all()


def final(head, x):
    return linear(x, head.final)[0]


def attn(head, p):
    return final(head, (softmax(p @ array(head.attention))[:, None] * p).sum(0))


def attn_elementwise(head, p):
    return final(head, (softmax(linear(p, head.attention)) * p).sum(0))


def transformer(head, p, q=None):
    """BERT over special vectors, the query's states and windows."""
    c, s = array(head.cls_vector), [array(head.sep_vector)] if head.separators else []
    before = [c, *s] if q is None else [c, *s, *q, *s]
    segments = [0] * len(before) + [1] * len(p) + [0] * len(s)
    return final(head, bert(head.aggregator, np.vstack([*before, *p, *s]), segments))


def kmaxp(head, p):
    best = sorted((final(head, x) for x in p), reverse=True)[: head.k]
    return np.mean(best) if head.weights is None else sum(w * s for w, s in zip(head.weights, best, strict=False))


def softmaxp(head, p):
    return head.temperature * np.log(np.mean([np.exp(final(head, x) / head.temperature) for x in p]))


FORMULAS = {
    ("firstp", ()): lambda head, p: final(head, p[0]),
    ("maxp", ()): lambda head, p: max(final(head, x) for x in p),
    ("sump", ()): lambda head, p: sum(final(head, x) for x in p),
    ("avgp", ()): lambda head, p: sum(final(head, x) for x in p) / len(p),
    ("kmaxp", ()): kmaxp,
    ("kmaxp", (("weights", (1, 0.5, 0.25)),)): kmaxp,
    ("softmaxp", ()): softmaxp,
    ("softmaxp", (("temperature", 0.2),)): softmaxp,
    ("parade-avg", ()): lambda head, p: final(head, p.mean(0)),
    ("parade-max", ()): lambda head, p: final(head, p.max(0)),
    ("parade-attn", ()): attn,
    ("parade-attn-elementwise", ()): attn_elementwise,
    ("parade-transformer", ()): transformer,
    ("parade-transformer", (("separators", False),)): transformer,
}


def test_scores_of_heads_equal_their_formulas():
    for name, options in FORMULAS:
        head, batch = make(name, **dict(options)), encoded((6, 1, 3, 2))
        expected = [FORMULAS[name, options](head, array(document.cls[0])) for document in documents_of(batch)]
        assert head(batch).tolist() == pytest.approx(expected, rel=1e-4, abs=1e-5)


def test_the_soft_maximum_of_an_extreme_temperature_is_its_limit():
    for temperature, limit, tolerance in [(1e-3, "maxp", 0.01), (1e5, "avgp", 1e-4), (1e8, "avgp", 1e-4)]:
        head, batch = make("softmaxp", temperature=temperature), encoded((6, 1, 3, 2))
        other = make(limit)
        other.load_state_dict(head.state_dict())
        torch.testing.assert_close(head(batch), other(batch), atol=tolerance, rtol=1e-4)
        head(batch).sum().backward()
        assert all(torch.isfinite(parameter.grad).all() for parameter in head.parameters())


def test_transformer_heads_with_projections_and_query_states_equal_their_formulas():
    for separators in [True, False]:
        for aggregator in [None, tiny.AGGREGATOR]:
            for separate in [False, True]:
                options = {"aggregator": aggregator, "separators": separators}
                head, batch = (
                    make("parade-transformer-query", separate_projection=separate, **options),
                    encoded((6, 1, 3, 2)),
                )
                plain = make("parade-transformer", **options)
                for document, score, without in zip(documents_of(batch), head(batch), plain(batch), strict=True):
                    p, q = array(document.cls[0]), array(document.query.states[0])
                    if aggregator:
                        assert without.item() == pytest.approx(
                            transformer(plain, linear(p, plain.project)), rel=1e-4, abs=1e-5
                        )
                    q = linear(q, head.project_query if separate else head.project) if separate or aggregator else q
                    expected = transformer(head, linear(p, head.project) if aggregator else p, q)
                    assert score.item() == pytest.approx(expected, rel=1e-4, abs=1e-5)


def test_attention_starts_as_the_average():
    for name in ["parade-attn", "parade-attn-elementwise"]:
        torch.manual_seed(0)
        head = build_head(name, H).eval()
        average = build_head("parade-avg", H).eval()
        average.final.load_state_dict(head.final.state_dict())
        batch = encoded()
        torch.testing.assert_close(head(batch), average(batch), **CLOSE)
        expected = batch.mask / batch.mask.sum(1, keepdim=True)
        torch.testing.assert_close(head.window_weights(batch), expected, **CLOSE)


def test_the_number_of_attention_heads_depends_on_the_hidden_size():
    numbers = {24: 12, 32: 8, 20: 10, 7: 7, 13: 1, 768: 12, 384: 12}
    with torch.device("meta"):
        for hidden_size, expected in numbers.items():
            head = build_head("parade-transformer", hidden_size, layers=1)
            assert head.aggregator.config.num_attention_heads == expected
    with pytest.raises(ValueError, match="attention heads"):
        build_head("parade-transformer", H, attention_heads=5)


def test_the_aggregator_starts_with_the_weights_of_its_checkpoint(tmp_path):
    folder = tiny.checkpoint(tmp_path, hidden_size=16)
    reference = AutoModel.from_pretrained(folder)
    words = reference.get_input_embeddings().weight
    cls, sep = (words[tiny.tokenizer().convert_tokens_to_ids(token)] for token in ("[CLS]", "[SEP]"))
    head = build_head("parade-transformer", H, aggregator=folder, special_vectors="words")
    torch.testing.assert_close(head.cls_vector, cls, rtol=1e-5, atol=0)
    torch.testing.assert_close(head.sep_vector, sep, rtol=1e-5, atol=0)
    own = head.aggregator.state_dict()
    dropped = {key for key in reference.state_dict() if key not in own}
    assert dropped == {"embeddings.word_embeddings.weight", "pooler.dense.weight", "pooler.dense.bias"}
    torch.testing.assert_close(own, {key: reference.state_dict()[key] for key in own}, rtol=1e-5, atol=0)
    for special in (None, "random"):
        head = build_head("parade-transformer", H, aggregator=folder, special_vectors=special)
        assert not torch.isclose(head.cls_vector, cls).any()
        before = head.cls_vector.clone()
        head.warm_start(start(width=16))  # words of the backbone: another vocabulary's
        assert torch.equal(head.cls_vector, before)


@pytest.mark.parametrize(
    ("save", "family", "kind"),
    [
        (tiny_long.decoder, "qwen3", "qwen3"),
        *((tiny_long.encoder, family, family) for family in ("longformer", "big_bird")),
        (tiny_long.published, "jina", "alibi-bert"),
        (tiny.checkpoint, "nystromformer", "nystromformer"),
    ],
)
def test_checkpoints_that_cannot_aggregate_are_refused(save, family, kind, tmp_path):
    """The first state of a language model sees no other token; other models need token ids or attend to padding."""
    with pytest.raises(ValueError, match=kind):
        build_head("parade-transformer", H, aggregator=save(tmp_path, family))


def start(width=H, final=True):
    layer = nn.Linear(width, 1) if final else None
    return WarmStart(layer, torch.full((width,), 2.0), torch.full((width,), 3.0))


def test_warm_start_takes_over_the_final_layer():
    for name in ALL:
        head, warm = make(name), start()
        if name in WITHOUT_WEIGHTS:
            assert head.ready_from(warm) == (name == "cosine")  # MaxSim also asks for the projection
            assert head.ready_from(MaxSimStart(warm.final, warm.cls_embedding, warm.sep_embedding, trained=True))
            continue
        before = head.final.weight.clone()
        for nothing_to_copy in (start(final=False), start(width=H + 8)):
            head.warm_start(nothing_to_copy)
            assert not head.ready_from(nothing_to_copy)
            assert torch.equal(head.final.weight, before)
        head.warm_start(warm)
        assert head.ready_from(warm) == (name not in NEEDS_TRAINING)
        if name not in NEEDS_TRAINING:
            own = head.final.weight[:, -H:]
            assert torch.equal(own, warm.final.weight)
            assert (head.final.weight[:, :-H] == 0).all()  # features that the checkpoint knows nothing of
            assert torch.equal(head.final.bias, warm.final.bias)
            nn.init.zeros_(warm.final.weight)  # a copy, not the checkpoint's own layer
            assert own.abs().min() > 0
        else:
            assert torch.equal(head.final.weight, before)


OTHER_VALUES = {
    **{(name, "aggregator"): tiny.AGGREGATOR for name in TRANSFORMERS},
    **{(name, "special_vectors"): "random" for name in TRANSFORMERS},
    **{(name, "attention_heads"): 2 for name in TRANSFORMERS},
    ("kmaxp", "weights"): [1.0, 0.5, 0.2],
    ("maxsim", "aggregation"): "max",
    ("model1", "self_translation"): 0.3,
}


def other_value(name, option, default):
    """Some value of an option that is not its default."""
    if (name, option) in OTHER_VALUES:
        return OTHER_VALUES[name, option]
    if isinstance(default, bool):
        return not default
    assert isinstance(default, int | float), f"name another value for option {option} of {name} in OTHER_VALUES"
    return default + 1 if isinstance(default, int) else default + 0.25


@pytest.mark.parametrize("name", [name for name in ALL if head_options(name)])
def test_every_option_of_a_head_has_an_effect(name):
    def outcome(**options):
        torch.manual_seed(0)
        head = build_head(name, H, channels=CHANNELS, **options).train()
        head.warm_start(start())
        torch.manual_seed(1)
        parameters = sum(p.numel() for p in head.parameters())
        return parameters, head(encoded((12, 4))).tolist(), matching(head).tolist()

    for option, default in head_options(name).items():
        assert outcome() == outcome(**{option: default}), option
        assert outcome() != outcome(**{option: other_value(name, option, default)}), option


def test_unknown_names_and_options_of_heads_are_refused():
    with pytest.raises(ValueError, match="minp"):
        build_head("minp", H)
    with pytest.raises(TypeError, match="weights"):
        build_head("maxp", H, weights=[1.0])


@pytest.mark.parametrize(("query", "separators", "room"), [(0, True, 9), (0, False, 11), (3, True, 5), (3, False, 8)])
def test_a_transformer_head_refuses_more_windows_than_positions(query, separators, room):
    name = "parade-transformer-query" if query else "parade-transformer"
    head = make(name, max_positions=12, separators=separators)
    batch = encoded((room, 1))
    batch = replace(batch, query=QueryStates(batch.query.states[:, :query], batch.query.mask[:, :query]))
    assert head(batch).isfinite().all()
    head.check_windows(room, query or 30)
    with pytest.raises(ValueError, match=f"{room + 1} windows"):
        head.check_windows(room + 1, query or 30)
    anywhere = make(name, max_positions=12, separators=separators, positions=False)
    anywhere.check_windows(40, query)
    assert anywhere(encoded((40,))).isfinite().all()


# A head of a user's own, with a weight that no checkpoint has.


class GatedHead(ld.Head):
    """Scales the vectors by a learned gate, which it does not call neutral."""

    def __init__(self, hidden_size, **options):
        super().__init__(hidden_size, **options)
        self.gate = nn.Parameter(torch.randn(hidden_size))

    def forward(self, encoded):
        return self.score(encoded.cls[:, 0] * self.gate)


class NeutralHead(GatedHead):
    """Starts the gate at a value that changes nothing."""

    neutral = ("gate",)

    def warm_start(self, start):
        nn.init.ones_(self.gate)
        super().warm_start(start)


class MoreThanAttentionHead(registered_heads()["parade-attn"]):
    """Adds a gate to a head that only calls its attention neutral."""

    def __init__(self, hidden_size, **options):
        super().__init__(hidden_size, **options)
        self.gate = nn.Parameter(torch.randn(hidden_size))


class OtherForwardHead(registered_heads()["parade-attn"]):
    """Adds no weights."""

    def forward(self, encoded):
        return super().forward(encoded) * 2


def first_window_with(head, **options):
    """FirstP with one of the heads above, which the package knows until the end of the test."""
    base._REGISTRY[head.__name__] = head
    own = type(f"FirstPWith{head.__name__}", (ld.FirstP,), {"head_name": head.__name__})
    return own(tiny.encoder(), window_size=20, max_query_len=8, device="cpu", **options)


def is_untrained(model):
    """Whether scores come with the warning of random layers, which names the weight and the cure."""
    told = told_of(ld.UntrainedWarning, lambda: model(tiny.results()))
    assert all("head.gate is not in the checkpoint: train it, or list it in `neutral`" in message for message in told)
    return bool(told)


HEADS = {GatedHead: True, MoreThanAttentionHead: True, NeutralHead: False, OtherForwardHead: False}
"""Heads, and whether they have a weight that is neither the checkpoint's nor neutral."""


@pytest.mark.parametrize("started", [False, True], ids=["of a cross-encoder", "after start_from"])
@pytest.mark.parametrize(("head", "untrained"), HEADS.items())
def test_an_additional_weight_of_a_custom_head_is_untrained_unless_it_is_neutral(head, untrained, started):
    model = first_window_with(head)
    if started:
        model.start_from(ld.FirstP(tiny.encoder(), window_size=20))
    assert is_untrained(model) == untrained


def test_a_neutral_head_starts_with_the_scores_of_the_model_it_starts_from(tmp_path):
    trained = ld.FirstP(tiny.checkpoint(tmp_path, seed=5), window_size=20, max_query_len=8, device="cpu")
    model = first_window_with(NeutralHead).start_from(trained)
    np.testing.assert_allclose(model(tiny.results())["score"], trained(tiny.results())["score"], rtol=1e-5)


def test_the_last_layer_of_a_head_with_more_weights_is_taken_over():
    other = first_window_with(NeutralHead)
    with torch.no_grad():
        other.model.head.final.weight.mul_(3.0)
    model = ld.FirstP(tiny.encoder(), device="cpu").start_from(other)
    assert torch.equal(model.model.head.final.weight, other.model.head.final.weight)


def test_a_saved_model_with_an_untrained_weight_is_untrained_when_loaded(tmp_path):
    model = first_window_with(GatedHead).start_from(ld.FirstP(tiny.encoder(), window_size=20))
    assert is_untrained(reloaded(model, tmp_path))


def test_training_makes_the_additional_weights_of_a_custom_head_trained():
    model = first_window_with(GatedHead, training=ld.TrainingArgs(max_steps=1, queries_per_step=1))
    assert not is_untrained(model.fit(tiny.results(), QRELS))
