"""Arguments: which are wrong, and what a change of one does to weights and scores."""

from __future__ import annotations

import inspect
import re
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import pandas as pd
import pyterrier as pt
import pytest
import torch

import pyterrier_longdoc as ld
from pyterrier_longdoc.modelling.encoder import WindowEncoder

from ..support import tiny
from ..support.systems import QRELS, QUIET, REPRESENTATIVE, SYSTEMS, TRAINABLE, changed, make, scores, slow_but

pytestmark = QUIET

CANDIDATES, LONGER = tiny.results(), tiny.longer_results()


TRANSFORMER = {"aggregation": "transformer"}
WRONG: dict[Any, list[tuple[dict[str, Any], str]]] = {
    ld.MaxP: [
        *(({"backbone": value}, "backbone") for value in (None, "", 3)),
        *(({"text_field": value}, "text_field") for value in ((), ("title", 3), "", 3)),
        ({"device": "gpu"}, "device"),
        ({"windows": 150}, "windows"),
        ({"seed": "a"}, "seed"),
        ({"text_loader": {"d1": "text"}}, "text_loader"),
        ({"training": {}}, "training"),
        ({"stride": 151}, "stride"),
        ({"windows": ld.SlidingWords(), "max_windows": 4}, "max_windows"),
        ({"windows": ld.SlidingWords(), "window_size": 40, "stride": 30}, "window_size, stride"),
        *(({"repeat": value}, "repeat") for value in ("title", "text", (), 3)),
        ({"repeat": ("title", "text"), "text_field": ("title", "text")}, "repeat"),
        ({"runtime": "openvino", "device": "cuda"}, "device"),
        ({"runtime": "openvino", "dtype": "float16"}, "dtype"),
        ({"template": "{query} {text}", "layout": "padded"}, "layout"),
        *(({"layout": layout, "max_query_len": None}, "max_query_len") for layout in ("padded", "shared")),
    ],
    ld.BiEncoder: [({"backbone": None}, "backbone")],
    ld.KMaxP: [
        *(({"k": 2, "weights": value}, "weights") for value in ([1.0], 1.0, [1.0, float("nan")])),
    ],
    ld.PARADE: [
        ({**TRANSFORMER, "separate_query_projection": True}, "separate_query_projection"),
        ({**TRANSFORMER, "aggregator": "a/b", "layers": 3}, "layers"),
    ],
    ld.CEDR: [({"aggregation": "pacrr", "max_query_len": None}, "max_query_len")],
    ld.LongP: [
        ({"attention_window": 7}, "attention_window"),
        *(({"template": t}, "query") for t in ("{query}", "{text}", "{query} {query} {text}", "none")),
    ],
    ld.LateIR: [({"interaction": None}, "interact")],
}
SEPARATE = ("pooling", "template", "instruction", "instruction_field")
WITHOUT: dict[Any, tuple[str, ...]] = {
    ld.FirstP: ("max_windows", "selection"),
    ld.LongP: ("max_windows", "selection"),
    ld.Birch: ("window_size", "stride"),
    ld.NeuralModel1: ("pooling",),
    ld.LateIR: SEPARATE,
    ld.MaxSim: (*SEPARATE, "layout"),
    ld.ListReranker: ("layout", "template", "pooling", "explain", "score_cache"),
}


def test_wrong_arguments_are_refused_by_name():
    for cls, arguments, word in [(cls, *case) for cls, cases in WRONG.items() for case in cases]:
        with pytest.raises((ValueError, RuntimeError), match=word):
            cls(**{"backbone": "any/model", **arguments})


def test_a_class_lacks_the_arguments_that_it_cannot_use():
    for cls, name in [(cls, name) for cls, names in WITHOUT.items() for name in names]:
        with pytest.raises(TypeError, match=name):
            cls("any/model", **{name: None})
        with pytest.raises(AttributeError, match=name):
            setattr(cls("any/model"), name, None)


def test_a_message_does_not_repeat_a_long_value():
    with pytest.raises(ValueError, match=r"pt\.apply\.text") as caught:
        ld.MaxP("any/model", text_loader={str(number): "text " * 100 for number in range(1000)})
    assert len(str(caught.value)) < 1500


def test_options_of_heads_are_checked_without_gpus_and_without_random_weights(monkeypatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: pytest.fail("looked for GPUs"))
    before = torch.get_rng_state()
    for cls in (ld.KMaxP, ld.Birch, ld.NeuralModel1):
        assert cls("any/model")._model is None
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("name", ["MaxP", "BiEncoder-max"])
def test_arguments_are_checked_again_at_transform(name, results, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    for argument, value in (("batch_size", 0), ("backbone", "/no/such/folder")):
        model = make(name)
        setattr(model, argument, value)
        with pytest.raises((ValueError, OSError), match=str(value)):
            model(results)


def test_an_argument_without_a_role_would_not_be_saved():
    @dataclass(eq=False, repr=False)
    class WithoutRole(ld.MaxP):
        q: float = 0.5

    with pytest.raises(TypeError, match=r"WithoutRole\.q"):
        WithoutRole("backbone")
    with pytest.raises(ValueError, match="haed"):
        ld.argument(0.5, role="haed")


def test_the_base_class_is_refused_without_windows_or_head(cross_encoder):
    with pytest.raises(NotImplementedError, match="default_windows"):
        ld.CrossEncoder()
    with pytest.raises(NotImplementedError, match="head_spec"):
        _ = ld.CrossEncoder(cross_encoder, windows=ld.GreedyChunks(20)).model


def test_names_are_short_and_unique():
    systems = [make(name, "a/b") for name in SYSTEMS]
    assert len(set(map(repr, systems))) == len(systems)
    assert repr(ld.MaxP("a/b", stride=50, verbose=True, text_loader=tiny.Store)) == "MaxP('a/b', stride=50)"


def test_these_tests_cover_every_reranker():
    public = {name: getattr(ld, name) for name in ld.__all__}
    classes = {name for name, cls in public.items() if inspect.isclass(cls) and issubclass(cls, ld.Reranker)}
    own_tests = {"ListReranker"}  # its scores depend on other rows
    assert classes - {"Reranker", "CrossEncoder"} - own_tests == {cls.__name__ for cls, _ in SYSTEMS.values()}


@pytest.mark.parametrize("name", slow_but(REPRESENTATIVE, TRAINABLE))
def test_apply_attributes_keeps_weights(name):
    model = make(name)
    parts = model.model
    weights = parts.encoder.representation[0].linear.weight if name == "MaxSim" else parts.head.final.weight
    weights.data.mul_(-3.0)
    clone = changed(model, batch_size=3)
    assert (clone.batch_size, model.batch_size) == (3, 64)
    np.testing.assert_allclose(scores(clone, CANDIDATES), scores(model, CANDIDATES), atol=1e-5)
    before = scores(clone, CANDIDATES)
    weights.data.zero_()
    np.testing.assert_array_equal(scores(clone, CANDIDATES), before)  # a copy, not a view


CHANGES: dict[str, list[dict[str, Any]]] = {
    "KMaxP": [{"k": 2}, {"weights": [1.0, 0.5, 0.1]}],
    "SoftMaxP": [{"temperature": 0.1}],
    "Birch": [{"first_stage_weight": 0.9}, {"k": 1}],
    "MaxP": [
        *({name: 12} for name in ("window_size", "stride", "max_doc_len")),
        {"max_windows": 1},
        {"max_query_len": 1},
        {"layout": "padded"},
        {"preselect": ld.FirstK(1)},
        {"windows": ld.SentenceWindows(max_tokens=7), "window_size": 150, "stride": 100},
    ],
    "PARADE-attn": [{"window_size": 12}],
    "BiEncoder-max": [
        *({name: 12} for name in ("window_size", "max_doc_len")),
        {"aggregation": "avg"},
        {"pooling": "cls"},
        {"similarity": "dot"},
        {"query_prefix": "find "},
        {"passage_prefix": "the "},
    ],
}


@pytest.mark.parametrize(("name", "changes"), [(name, each) for name, own in CHANGES.items() for each in own], ids=str)
def test_a_changed_argument_takes_effect(name, changes):
    model = make(name)
    before, original = scores(model, LONGER), {name: getattr(model, name) for name in changes}
    after = scores(make(name, **changes), LONGER)
    for arguments, expected in ((changes, after), (original, before)):
        for parameter, value in arguments.items():
            model.set_parameter(parameter, value)
        np.testing.assert_allclose(scores(model, LONGER), expected, atol=1e-5)
    assert np.abs(after - before).max() > 1e-4


@pytest.mark.parametrize("weights", [[1.0, 0.5, 0.1], np.array([1.0, 0.5, 0.1])], ids=["list", "array"])
def test_a_list_that_changes_in_place_has_no_effect(weights):
    model = make("KMaxP", weights=weights)
    expected = scores(model, LONGER)
    weights[0] = -1.0
    np.testing.assert_allclose(scores(model, LONGER), expected, atol=1e-6)
    assert list(model.weights) == [1.0, 0.5, 0.1]


@pytest.mark.parametrize("name", ["MaxP", "LateIR", "BiEncoder-max"])
def test_an_unchanged_model_is_not_set_up_again(name, results, monkeypatch):
    reranker = make(name)
    expected, model = scores(reranker, results), reranker.model
    monkeypatch.setattr(type(reranker), "check", None)
    monkeypatch.setattr(WindowEncoder, "use", None)
    np.testing.assert_allclose(scores(reranker, results), expected, atol=1e-6)
    assert reranker.model is model


@pytest.mark.parametrize(
    ("name", "changes"),
    [("KMaxP", {"k": 1}), ("Birch", {"first_stage_weight": 1.0}), ("MaxP", {"window_size": 12, "stride": 6})],
)
def test_a_changed_argument_keeps_trained_weights(name, changes):
    model = make(name).fit(CANDIDATES, QRELS)
    trained = model.model.head.final.weight.clone()
    for parameter, value in changes.items():
        model.set_parameter(parameter, value)
    model(CANDIDATES)
    assert model.model.head.final.weight.equal(trained)
    assert len(model.history) == 1


def test_a_failed_change_of_arguments_can_be_undone():
    model = make("KMaxP")
    before = scores(model, LONGER)
    model.k, model.window_size = 1, 150
    with pytest.raises(ValueError, match="150"):
        model(LONGER)
    model.k, model.window_size = 3, 20
    np.testing.assert_array_equal(scores(model, LONGER), before)


def test_a_copy_of_an_untrained_model_can_have_another_backbone_and_aggregation(tmp_path):
    other = tiny.checkpoint(tmp_path, seed=1)
    model = make("PARADE-attn")
    first = scores(model, CANDIDATES)
    changed = model.apply_attributes(aggregation="max", backbone=other)
    np.testing.assert_allclose(scores(changed, CANDIDATES), scores(make("PARADE-max", other), CANDIDATES), atol=1e-5)
    model.backbone = other
    with pytest.raises(ValueError, match="backbone"):
        model(CANDIDATES)
    model.backbone = changed.apply_attributes(backbone=make("PARADE-attn").backbone).backbone
    np.testing.assert_array_equal(scores(model, CANDIDATES), first)


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("PARADE-attn", {"aggregation": "max", "attention": "elementwise"}),
        ("PARADE-attn", {"backbone": tiny.encoder(None), "seed": 1, "pooling": "cls"}),
        ("PARADE-transformer", {"attention_heads": 2}),  # although the weights would fit
        ("LateIR", {"interaction": tiny.encoder()}),
        ("LongP", {"pooling": "mean"}),
    ],
)
def test_a_trained_model_refuses_changes_that_discard_its_weights(name, changes):
    model = make(name).fit(CANDIDATES, QRELS)
    expected = scores(model, CANDIDATES)
    for parameter, value in changes.items():
        kept = getattr(model, parameter)
        setattr(model, parameter, value)
        about = "the aggregation" if parameter.startswith(("aggr", "atte")) else parameter
        with pytest.raises(ValueError, match=about):
            model(CANDIDATES)
        setattr(model, parameter, kept)
    np.testing.assert_array_equal(scores(model, CANDIDATES), expected)


def test_arguments_may_be_numbers_of_numpy(results, tmp_path):
    """Values from an array of settings are converted, so that the model can be saved."""
    size, seed = np.array([12, 7])
    model = make("KMaxP", window_size=size, k=seed, seed=seed, preselect=ld.BM25Windows(size))
    model.max_query_len, model.training = size, ld.TrainingArgs(seed=seed, learning_rates={"": 1e-3})
    out = model.fit(results, QRELS)(results)
    model.save(tmp_path)
    pd.testing.assert_frame_equal(ld.KMaxP.load(tmp_path)(results), out)


def test_the_docstring_explains_every_argument():
    for name in SYSTEMS:
        cls = SYSTEMS[name][0]
        doc = inspect.getdoc(cls)
        described = re.findall(r"^    (\w+): ", doc.partition("\nArgs:\n")[2].split("\n\n")[0], re.MULTILINE)
        assert {field.name for field in fields(cls) if field.init} == set(described)
        if cls.__module__.startswith("pyterrier_longdoc"):
            assert f"ld.{cls.__name__}(" in doc[doc.index("\nExample:") :]
            assert re.search(r"^`score = ", doc, re.MULTILINE)


def test_a_docstring_ends_with_all_arguments():
    """Those that most people set come first, and an entry of the class itself replaces an inherited one."""

    @dataclass(eq=False, repr=False)
    class Two(ld.FirstP):
        """Scores two windows.

        Args:
            share (float): of the second window,
                from 0 to 1.
            seed: of mine.

        Example:
            `Two()`
        """

        share: float = ld.argument(0.5, role="head")

    text, _, arguments = Two.__doc__.partition("\n\nArgs:\n")
    assert text == "Scores two windows.\n\nExample:\n    `Two()`"
    described = re.findall(r"^    (\w+)", arguments, re.MULTILINE)
    assert described[:3] == ["backbone", "window_size", "max_doc_len"]
    assert described[10:13] == ["training", "share", "seed"]
    assert "    share (float): of the second window,\n        from 0 to 1.\n    seed: of mine.\n" in arguments
    assert sorted(described) == sorted(field.name for field in fields(Two))


def test_a_class_without_a_docstring_or_with_its_own_init_keeps_it():
    class Silent(ld.MaxP):
        pass

    class Mine(ld.MaxP):
        """Asks a server."""

        def __init__(self, *, url):
            super().__init__(url)

    assert Silent.__doc__ is None
    assert Mine.__doc__ == "Asks a server."


def test_a_user_class_takes_the_arguments_of_its_own_init():
    class Mine(ld.MaxP):
        def __init__(self, *, url):
            super().__init__(url)

    assert Mine(url="some/model").backbone == "some/model"


def test_the_constructor_names_the_cure():
    for create, cure in [
        (lambda: ld.MaxP("longdoc:maxp"), r"ld\.MaxP\.load\('longdoc:maxp'\)"),
        (lambda: ld.MaxP("longdoc:parade-attn"), r"ld\.PARADE\.load\('longdoc:parade-attn'\)"),
        (lambda: ld.BiEncoder("longdoc:maxp"), r"ld\.MaxP\.load"),
        (lambda: ld.MaxP("longdoc:none"), "longdoc:minilm-l6"),
        (lambda: ld.MaxP(device="gpu"), "'cuda'"),
        (lambda: ld.BiEncoder(device="gpu"), "'cuda'"),
    ]:
        with pytest.raises(ValueError, match=cure):
            create()


def test_missing_columns_name_the_cure():
    for frame, cure in [
        ({"qid": ["1"], "query": ["a cat"]}, "first stage"),
        ({"qid": ["1"], "query": ["a cat"], "docno": ["d"], "url": ["x"], "body": ["a cat sat"]}, "text_field='body'"),
        ({"qid": ["1"], "query": ["a cat"], "docno": ["d"]}, "text_loader"),
    ]:
        with pytest.raises(pt.validate.InputValidationError, match=cure):
            ld.MaxP()(pd.DataFrame(frame))
