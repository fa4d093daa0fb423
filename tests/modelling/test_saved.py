"""Weights: what is in a saved model's folder and what comes back, and what may change in memory."""

from __future__ import annotations

import errno
import json
import os
import platform
import shutil
import warnings
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import pyterrier_longdoc as ld
from pyterrier_longdoc import modelling
from pyterrier_longdoc.common.arguments import arguments_of
from pyterrier_longdoc.rerankers.cross_encoder import UntrainedWarning

from ..support import processes, tiny
from ..support.systems import CROSS_ENCODERS, QRELS, QUIET, REPRESENTATIVE, make, reloaded, scores, slow_but

pytestmark = QUIET
LORA = ld.TrainingArgs(queries_per_step=2, learning_rates={"": 1e-2}, lora=ld.Lora(rank=2))
JSON = ("config.json", "training.json", "pt_meta.json")
FILES = {*JSON, "model.safetensors", "tokenizer.json", "tokenizer_config.json", "README.md"}


@pytest.fixture(scope="session")
def trained(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    make("MaxP", training=ld.TrainingArgs(margin=0.5)).fit(tiny.results(), QRELS).save(folder)
    return folder


@pytest.fixture
def saved(trained, tmp_path) -> Path:
    """A folder with a trained MaxP, which a test may damage."""
    return Path(shutil.copytree(trained, tmp_path / "saved"))


def edit(folder: Path, **changes) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


@pytest.mark.parametrize("name", slow_but(REPRESENTATIVE, CROSS_ENCODERS))
def test_a_trained_model_is_saved_and_loaded_with_scores_and_history(name, results, tmp_path):
    model, folder = make(name, seed=7, training=ld.TrainingArgs(learning_rates={"": 1e-2})), tmp_path / "new" / "folder"
    model.fit(results, QRELS).save(folder)
    expected = scores(model, results)
    for cls in (type(model), ld.CrossEncoder):
        restored = cls.load(folder)
        assert type(restored) is type(model)
        np.testing.assert_allclose(scores(restored, results), expected, rtol=1e-5, atol=1e-5)
        assert repr(restored) == repr(model)
        assert (restored.training, restored.trained_on) == (model.recipe, model.trained_on)
        pd.testing.assert_frame_equal(restored.history, model.history)
    torch.testing.assert_close(restored.model.state_dict(), model.model.state_dict(), rtol=1e-5, atol=0)


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("MaxP", {"windows": ld.SlidingWords(12, 6, max_windows=3, selection="first_last_random")}),
        ("MaxP", {"windows": ld.SentenceWindows(max_tokens=30), "text_field": ("title", "text")}),
        ("MaxP", {"text_field": ("title", "text"), "repeat": ("title",), "repeat_tokens": 10}),
        ("MaxP", {"max_windows": 2, "selection": "first_last_random", "seed": 3}),
        ("MaxP", {"max_doc_len": 30, "max_query_len": 5, "layout": "padded"}),
        ("MaxP", {"layout": ld.InputLayout(pad_query=True, lowercase=True)}),
        ("MaxP", {"max_query_len": None, "pooling": "cls"}),
        ("MaxP", {"backbone": Path(tiny.encoder())}),
        ("LateIR", {"interaction": Path(tiny.aggregator()), "aggregator": Path(tiny.aggregator())}),
        ("KMaxP", {"k": np.int64(2), "weights": np.array([1.0, 0.5])}),
    ],
    ids=lambda value: value if isinstance(value, str) else ", ".join(value),
)
def test_arguments_are_saved_and_loaded(name, arguments, results, tmp_path):
    results = results.assign(title=["snow", None, "", "a", "b"])
    sizes = {"window_size": 150, "stride": 100} if "windows" in arguments else {}
    model = make(name, **sizes, **arguments)
    restored = reloaded(model, tmp_path)
    np.testing.assert_allclose(scores(restored, results), scores(model, results), atol=1e-5)
    assert restored.windows == model.windows
    written = {name: str(value) if isinstance(value, Path) else value for name, value in arguments.items()}
    assert name == "KMaxP" or arguments_of(restored) == arguments_of(make(name, device="cpu", **{**sizes, **written}))


def test_untrained_models_stay_untrained(plain_encoder, results, saved):
    assert len(ld.MaxP.load(saved).history) == 1
    make("MaxP", plain_encoder).save(saved, overwrite=True)
    restored = ld.MaxP.load(saved)
    with pytest.warns(ld.UntrainedWarning):
        restored(results)
    assert restored.history.empty  # the training of the model that was there before does not stay
    assert not (saved / "training.json").exists()


def test_arguments_except_the_backbone_can_be_changed_when_loading(saved, results):
    model = ld.MaxP.load(saved, window_size=12, stride=6, batch_size=3, explain=True)
    assert (model.window_size, model.batch_size) == (12, 3)
    assert model(results)["window_spans"].map(len).max() > 10
    with pytest.raises(ValueError, match="backbone"):
        ld.MaxP.load(saved, backbone="another/model")(results)
    with pytest.raises(TypeError, match="no_such_argument"):
        ld.MaxP.load(saved, no_such_argument=1)


def test_a_saved_folder_contains_configuration_training_and_model_card(saved):
    names = {path.name for path in saved.iterdir()}
    assert names >= FILES
    assert not [name for name in names if name.endswith((".bin", ".pt", ".pkl", ".pickle", ".py"))]
    config, training, artifact = (json.loads((saved / name).read_text()) for name in JSON)
    assert (config["format"], config["format_version"], config["class"]) == ("pyterrier_longdoc", 1, "MaxP")
    of_this_machine = {"device", "dtype", "batch_size", "verbose", "text_loader", "trust_remote_code", "score_cache"}
    assert not of_this_machine & set(config["parameters"])
    assert (training["args"]["margin"], len(training["history"])) == (0.5, 1)
    assert artifact["type"] == "longdoc_reranker"
    assert "ld.MaxP.load(" in (saved / "README.md").read_text()


def test_a_saved_folder_contains_no_path_except_the_backbone(cross_encoder, tmp_path, monkeypatch):
    make("MaxP", cross_encoder).save(tmp_path / "absolute")
    mentions = {path.name: path.read_bytes().count(cross_encoder.encode()) for path in tmp_path.glob("absolute/*")}
    assert {name: count for name, count in mentions.items() if count} == {"config.json": 1, "README.md": 2}
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    folder = Path(cross_encoder).parent
    monkeypatch.chdir(folder)
    make("PARADE-pretrained", Path(cross_encoder).name).save(tmp_path / "relative")
    for path in tmp_path.glob("relative/*"):
        content = path.read_text(errors="ignore").replace(tiny.aggregator(), "")
        for private in (str(tmp_path), f"{folder}/", f"{Path.home()}/", "hf_secret", "_name_or_path"):
            assert private not in content, path.name


def test_remote_code_is_not_saved_and_no_folder_asks_for_it(saved, tmp_path):
    with pytest.raises(ValueError, match="remote code"):
        make("MaxP", trust_remote_code=True).save(tmp_path / "new")
    assert not (tmp_path / "new").exists()
    config = json.loads((saved / "config.json").read_text())
    edit(saved, parameters={**config["parameters"], "trust_remote_code": True})
    assert ld.MaxP.load(saved).trust_remote_code is False


class OwnMaxP(ld.MaxP):
    """What a user writes to give MaxP other defaults."""


class Stopped(BaseException):
    """Ends a save as a kill does: no code of the package goes on after it."""


def let_fail(monkeypatch, at: int, error: BaseException, places: list[tuple[object, str]]) -> list[int]:
    """Lets the call with a number fail, counted over all functions that are named; returns the calls so far."""
    calls = [0]

    def counted(function):
        def call(*args, **kwargs):
            calls[0] += 1
            if calls[0] == at:
                raise error
            return function(*args, **kwargs)

        return call

    for owner, name in places:
        monkeypatch.setattr(owner, name, counted(getattr(owner, name)))
    return calls


WRITES = [
    *((Path, name) for name in ("mkdir", "touch", "write_text", "write_bytes")),
    (modelling.saved, "save_file"),
    (transformers.PreTrainedTokenizerBase, "save_pretrained"),
]
CHANGES = [(os, "replace"), (Path, "unlink"), (shutil, "rmtree")]
"""What moves and removes files."""


def selecting(seed: int, tmp_path) -> ld.MaxP:
    """A MaxP with a selector that is a model, too; the weights of both depend on the seed."""
    model, selector = (tiny.checkpoint(tmp_path / f"{part} {seed}", seed=seed + part) for part in (10, 20))
    return make("MaxP", model, preselect=ld.CrossEncoderWindows(1, make("FirstP", selector)))


def files_of(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_disk_that_is_full_at_any_write_leaves_the_earlier_model(tmp_path):
    """Its weights, tokenizer and selector, byte for byte."""
    folder = tmp_path / "saved"
    selecting(1, tmp_path).save(folder)
    new = selecting(2, tmp_path)
    before, full, failed = files_of(folder), OSError(errno.ENOSPC, "No space left on device"), 0
    assert {"preselect/model.safetensors", "tokenizer.json"} <= before.keys()
    while files_of(folder) == before:
        with pytest.MonkeyPatch.context() as patch:
            calls = let_fail(patch, failed + 1, full, WRITES)
            try:
                new.save(folder, overwrite=True)
            except OSError:
                failed += 1
                assert files_of(folder) == before
    assert failed == calls[0] > 10


@pytest.mark.slow
def test_a_save_that_is_killed_between_two_files_leaves_a_whole_model_or_none(results, tmp_path):
    folder, killed, outcomes = tmp_path / "saved", 0, set()
    old, new = selecting(1, tmp_path), selecting(2, tmp_path)
    whole = {"old": scores(old, results), "new": scores(new, results)}
    old.save(tmp_path / "before")
    while "finished" not in outcomes:
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(tmp_path / "before", folder)
        with pytest.MonkeyPatch.context() as patch:
            let_fail(patch, killed + 1, Stopped(), CHANGES)
            try:
                new.save(folder, overwrite=True)
                outcomes.add("finished")
            except Stopped:
                killed += 1
        try:
            found = scores(ld.MaxP.load(folder), results)
        except ValueError as error:
            outcomes.add("refused" if "interrupted" in str(error) else str(error))
        else:
            same = [name for name, expected in whole.items() if np.allclose(found, expected, atol=0.01)]
            outcomes.add(*same or ["a mixture"])
    assert outcomes == {"finished", "old", "refused", "new"}
    assert killed > 3


def test_a_first_save_that_was_interrupted_can_be_repeated(results, tmp_path):
    model, folder, killed, finished = make("MaxP"), tmp_path / "saved", 0, False
    while not finished:
        shutil.rmtree(folder, ignore_errors=True)
        with pytest.MonkeyPatch.context() as patch, suppress(Stopped):
            let_fail(patch, killed + 1, Stopped(), CHANGES)
            model.save(folder)
            finished = True
        model.save(folder)
        killed += not finished
    assert killed > 3
    np.testing.assert_array_equal(scores(ld.MaxP.load(folder), results), scores(model, results))


@pytest.mark.parametrize("content", ["{}", "", "[]"])
@pytest.mark.parametrize("name", ["README.md", "config.json"])
def test_a_folder_with_other_files_is_not_overwritten(name, content, tmp_path):
    (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match=name):
        make("MaxP").save(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_weights_of_another_program_are_not_overwritten(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(b"of accelerate")
    with pytest.raises(ValueError, match=r"model\.safetensors"):
        make("MaxP").save(tmp_path)
    assert (tmp_path / "model.safetensors").read_bytes() == b"of accelerate"
    with pytest.raises(ValueError, match="is a file"):
        make("MaxP").save(tmp_path / "model.safetensors")


@pytest.mark.parametrize("other", [lambda _: make("FirstP"), lambda folder: make("MaxP", tiny.checkpoint(folder))])
def test_another_model_is_only_overwritten_on_request(other, saved, tmp_path):
    before, other = files_of(saved), other(tmp_path / "backbone")
    ld.MaxP.load(saved).save(saved)
    with pytest.raises(ValueError, match="overwrite=True"):
        other.save(saved)
    assert files_of(saved).keys() == before.keys()
    other.save(saved, overwrite=True)
    assert type(ld.CrossEncoder.load(saved)) is type(other)


def test_a_model_of_a_newer_version_is_only_overwritten_on_request(saved):
    model = ld.MaxP.load(saved)
    edit(saved, format_version=2)
    before = files_of(saved)
    with pytest.raises(ValueError, match="overwrite=True"):
        model.save(saved)
    assert files_of(saved) == before
    model.save(saved, overwrite=True)
    assert ld.MaxP.load(saved).model.fingerprint() == model.model.fingerprint()


def test_left_overs_of_killed_saves_are_removed(saved, tmp_path):
    dead = processes.start(lambda: None)
    processes.wait(dead)
    name = f".new.{platform.node()}-{{}}-0.part"
    left, living = saved / name.format(dead), saved / name.format(os.getppid())
    old = saved / ".new.elsewhere-1-0.part"
    foreign = [
        saved / name for name in (".data-2024-01.part", ".big-download-x.part", f".x.{platform.node()}-a-1.part")
    ]
    for folder in (left, living, old, *foreign):
        folder.mkdir()
        (folder / "model.safetensors").write_bytes(b"half")
        if folder != living:
            os.utime(folder, (0, 0))
    ld.MaxP.load(saved).save(saved)
    assert [folder.exists() for folder in (left, living, old)] == [False, True, False]
    assert all(folder.exists() for folder in foreign)


def holding(name: str, content: str | bytes):
    """Damage: the content of a file."""
    return lambda folder: (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())


def removed(*names: str):
    return lambda folder: [(folder / name).unlink() for name in names]


def halved(folder: Path) -> None:
    path = folder / WEIGHTS
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def weighing(change):
    """Damage: other tensors."""
    return lambda folder: save_file(change(load_file(folder / WEIGHTS)), folder / WEIGHTS)


def of_another_model(folder: Path) -> None:
    make("MaxP", seed=3, pooling="cls").save(folder / "other")
    shutil.copy(folder / "other" / WEIGHTS, folder)


WEIGHTS, FINAL = "model.safetensors", "head.final.weight"
LFS = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"
NOT_JSON = ("", "[1]", "[" * 100_000, '{"format": "pyterrier_longdoc"}', b"\xff")
DAMAGES = [
    *((holding(name, content), name) for name in ("config.json", "training.json") for content in NOT_JSON),
    *(
        (lambda folder, key=key: edit(folder, **{key: [None]}), "saved")
        for key in ("class", "encoder", "format_version", "head", "parameters", "weights")
    ),
    *(
        (lambda folder, changes=changes: edit(folder, **changes), word)
        for changes, word in (
            ({"format": "other"}, "not saved"),
            ({"format_version": 2}, "newer"),
            ({"class": "LongestP"}, "LongestP"),
            ({"class": "LongestP", "module": "__main__"}, "notebook"),
            ({"head": {"name": "minp", "options": {}, "ready": True}}, "minp"),
            ({"parameters": {"backbone": "b", "windows": {"type": "os.system"}}}, r"os\.system"),
        )
    ),
    *((holding("tokenizer.json", content), "tokenizer") for content in ("{", "{}")),
    (removed("tokenizer.json", "tokenizer_config.json"), "tokenizer"),
    (holding(WEIGHTS, LFS), "git lfs"),
    (of_another_model, "mixes two models"),
    *((damage, WEIGHTS) for damage in (halved, holding(WEIGHTS, b""), removed(WEIGHTS))),
    (weighing(lambda state: {key: value for key, value in state.items() if key != FINAL}), "weights"),
    (weighing(lambda state: {**state, FINAL: torch.zeros(1, 31)}), "weights"),
    (weighing(lambda state: {**state, "extra": torch.zeros(1)}), "weights"),
]


def test_a_damaged_folder_is_refused_by_what_is_wrong(trained, tmp_path):
    for number, (damage, word) in enumerate(DAMAGES):
        folder = Path(shutil.copytree(trained, tmp_path / f"{number}" / "saved"))
        damage(folder)
        with pytest.raises((ValueError, FileNotFoundError), match=word):
            ld.CrossEncoder.load(folder)


def test_a_damaged_file_can_be_saved_again(saved):
    model = ld.MaxP.load(saved)
    for name in ("config.json", "training.json"):
        for content in NOT_JSON:
            holding(name, content)(saved)
            model.save(saved)
            ld.MaxP.load(saved)


def test_a_tilde_in_a_path_is_the_home_folder(tmp_path, monkeypatch, results):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    shutil.copytree(tiny.encoder(), tmp_path / "backbone")
    model = make("MaxP", "~/backbone", score_cache="~/scores", training=ld.TrainingArgs(checkpoint="~/state"))
    model.fit(results, QRELS).save("~/model")
    expected = scores(ld.CrossEncoder.load("~/model"), results)
    np.testing.assert_allclose(expected, scores(model, results), rtol=1e-5, atol=1e-5)
    model.export("~/export")
    ld.rerank_to_disk(model, results, Path("~/job"))
    ld.merge_run("~/job", "~/run.res")
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"backbone", "scores", "state", "model", "export", "job", "run.res"}


def test_a_loaded_model_that_reads_much_longer_inputs_warns_once(saved, results):
    model = ld.MaxP.load(saved, window_size=60, stride=60)
    long = results.assign(text="cat " * 60)
    assert 0 < model.trained_on.longest_input < 30
    with pytest.warns(UserWarning, match="more than twice as long"):
        model(long)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", ".*twice as long")
        model(long)
        ld.MaxP.load(saved)(results)


def lowered(text, _):
    return text.lower()


def test_a_recipe_whose_function_is_not_saved_warns(results, tmp_path):
    make("MaxP", training=ld.TrainingArgs(augment=lowered, margin=2.0)).fit(results, QRELS).save(tmp_path)
    with pytest.warns(UserWarning, match="augment="):
        assert ld.MaxP.load(tmp_path).training.margin == 2.0


@pytest.mark.parametrize(
    ("saved_as", "loaded_as"),
    [(ld.MaxP, ld.FirstP), (ld.MaxP, ld.KMaxP), (ld.KMaxP, ld.MaxP), (OwnMaxP, ld.KMaxP)],
    ids=lambda cls: cls.__name__,
)
def test_loading_with_another_class_names_the_right_one(saved_as, loaded_as, tmp_path):
    saved_as(tiny.encoder(), window_size=20, max_query_len=8, stride=10).save(tmp_path)
    with pytest.raises(ValueError, match=saved_as.__name__):
        loaded_as.load(tmp_path)


def test_loading_from_a_place_without_a_model_is_refused(tmp_path, cross_encoder):
    (tmp_path / "file").write_text("")
    (tmp_path / "empty").mkdir()
    for place, word in (
        (tmp_path / "nothing", "no folder"),
        (tmp_path / "file", "no folder"),
        (tmp_path / "empty", "not saved"),
        (cross_encoder, "backbone"),
    ):
        with pytest.raises((ValueError, FileNotFoundError), match=word):
            ld.MaxP.load(place)


@dataclass(frozen=True)
class TwoTens(ld.Windows):
    largest = 20

    def spans(self, tokens):
        return [(0, 10), (10, 20)]


def test_a_model_of_parts_of_a_user_is_saved_and_loaded(cross_encoder, results, tmp_path):
    class LowestPHead(ld.Head, name="lowestp"):
        def forward(self, encoded):
            return self.score(encoded.cls).masked_fill(~encoded.mask, float("inf")).amin(1)

    class LowestP(ld.MaxP):
        def head_spec(self):
            return "lowestp", {}

    model = LowestP(cross_encoder, windows=TwoTens(), max_query_len=8)
    model.save(tmp_path)
    for cls in (ld.CrossEncoder, ld.MaxP):
        restored = cls.load(tmp_path)
        assert type(restored) is LowestP
        np.testing.assert_allclose(scores(restored, results), scores(model, results), atol=1e-5)
    assert f"from {__name__} import LowestP\n\nreranker = LowestP.load(" in (tmp_path / "README.md").read_text()
    config = json.loads((tmp_path / "config.json").read_text())
    assert {part["module"] for part in (config, config["head"], config["parameters"]["windows"])} == {__name__}


THERE = {"module": "some_parts"}


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({"class": "LocalP", **THERE}, "LocalP"),
        ({"head": {"name": "localp", "options": {}, "ready": True, **THERE}}, "localp"),
        ({"parameters": {"backbone": "b", "windows": {"type": "LocalWindows", **THERE}}}, "LocalWindows"),
    ],
    ids=["class", "head", "windows"],
)
def test_parts_that_are_not_imported_are_named_with_their_module(changes, part, saved, tmp_path, monkeypatch):
    (tmp_path / "some_parts.py").write_text("raise SystemExit('no model makes Python import anything')")
    monkeypatch.syspath_prepend(tmp_path)
    edit(saved, **changes)
    with pytest.raises(ValueError, match=f"'{part}'.*some_parts"):
        ld.CrossEncoder.load(saved)


def test_the_same_seed_gives_the_same_random_layers():
    first, again, other = (make("PARADE-transformer", seed=seed).model.head.final.weight for seed in (1, 1, 2))
    torch.testing.assert_close(first, again, rtol=1e-5, atol=0)
    assert not torch.isclose(first, other).any()


@pytest.mark.parametrize("name", ["LateIR", "MaxSim"])
def test_start_from_takes_over_all_weights(name, results):
    other, model = make(name, seed=5), make(name)
    with torch.no_grad():
        for parameter in other.model.parameters():
            parameter.mul_(1.05)
    expected = scores(other, results)
    assert not np.isclose(scores(model, results), expected, rtol=1e-4).any()
    np.testing.assert_allclose(scores(model.start_from(other), results), expected, rtol=1e-4)


@pytest.mark.parametrize("labels", [None, 1])
def test_start_from_a_bi_encoder_takes_over_only_the_backbone(labels, results, tmp_path):
    other = ld.BiEncoder(tiny.checkpoint(tmp_path / "embeds", labels=None, seed=3), window_size=12, stride=6)
    model = make("MaxP", tiny.checkpoint(tmp_path / "own", labels=labels)).start_from(other)
    its, own = (each.model.encoder.backbone.state_dict() for each in (other, model))
    assert all(torch.equal(own[name], its[name]) for name in its)
    with pytest.warns(UntrainedWarning):
        found = scores(model, results)
    if labels is None:
        np.testing.assert_allclose(found, scores(make("MaxP", other.backbone), results), rtol=1e-5)


def test_start_from_a_backbone_with_other_layers_is_refused(tmp_path):
    deeper = ld.BiEncoder(tiny.checkpoint(tmp_path, labels=None, num_hidden_layers=3), window_size=12, stride=6)
    with pytest.raises(ValueError, match=r"layer\.2"):
        make("MaxP").start_from(deeper)


def test_start_from_something_without_weights_is_refused():
    for other in ["longdoc:maxp", None, ld.MaxP() % 3]:
        with pytest.raises(ValueError, match="in memory"):
            make("MaxP").start_from(other)


def test_start_from_a_model_with_another_vocabulary_is_refused_and_changes_nothing(results, tmp_path):
    folder = tiny.checkpoint(tmp_path)
    file = Path(folder, "tokenizer.json")
    file.write_text(file.read_text().replace('"cat"', '"tac"'))
    model = make("MaxP")
    before = scores(model, results)
    with pytest.raises(ValueError, match="vocabulary"):
        model.start_from(make("MaxP", folder))
    np.testing.assert_array_equal(scores(model, results), before)


@pytest.mark.skipif(os.name != "posix", reason="files have no such modes")
@pytest.mark.parametrize("umask", [0o022, 0o027])
def test_files_have_the_mode_that_the_umask_leaves(umask, results, tmp_path):
    """Files of a model and a training state, including those that are overwritten."""
    before = os.umask(umask)
    try:
        model = make("MaxP", training=replace(LORA, checkpoint=tmp_path / "state"), preselect=ld.FirstK(2))
        model.fit(results, QRELS)
        for _ in range(2):
            model.save(tmp_path / "model")
        ld.rerank_to_disk(model, results, tmp_path / "blocks")
    finally:
        os.umask(before)
    modes = {path: path.stat().st_mode & 0o777 for path in tmp_path.rglob("*") if path.is_file()}
    assert len([path for path in modes if path.suffix == ".safetensors"]) == 2
    assert {path: oct(mode) for path, mode in modes.items() if mode != 0o666 & ~umask} == {}
