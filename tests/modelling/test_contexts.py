"""Titles that are read with each window: token ids, room, selectors, coverage, every family of models."""

from __future__ import annotations

import io
from dataclasses import replace
from random import Random

import numpy as np
import pandas as pd
import pyterrier as pt
import pytest

import pyterrier_longdoc as ld
from pyterrier_longdoc.common.documents import Document
from pyterrier_longdoc.rerankers.base import LongDocReranker
from pyterrier_longdoc.training.examples import Texts, make_examples, make_groups

from ..support import tiny, tiny_long
from ..support.systems import CROSS_ENCODERS, QRELS, QUIET, REPRESENTATIVE, SYSTEMS, make, scores, slow_but

pytestmark = QUIET

TITLES = ["the red bird", "a cat", "snow and rain in a long winter's wind", "", None]
TITLED = {"text_field": ("title", "text"), "repeat": "title", "repeat_tokens": 10}
BODY = "dog bird fish tree river mountain city rain snow wind"


@pytest.fixture
def results() -> pd.DataFrame:
    """Five rows of two queries; d1 stands there twice, with two titles."""
    return tiny.results().assign(title=TITLES)


@pytest.fixture(scope="module")
def roberta(tmp_path_factory) -> str:
    return tiny.checkpoint(tmp_path_factory.mktemp("roberta"), "roberta")


@pytest.fixture(scope="module")
def decoder(tmp_path_factory) -> str:
    return tiny_long.decoder(tmp_path_factory.mktemp("decoder"))


def frame(title, text, query="old dog") -> pd.DataFrame:
    return pd.DataFrame([{"qid": "1", "query": query, "docno": "d", "title": title, "text": text}])


def read(model, rows: pd.DataFrame):
    """What is read of the rows, and the inputs that the backbone gets."""
    scorer, queries = model.load_scorer(), rows["query"].tolist()
    found = scorer.read(queries, scorer.read_queries(queries), scorer.tokenize(model.documents(rows)))
    return found, scorer.layout.collate(found.queries, found.windows), scorer.tokenizer


def inputs(model, rows: pd.DataFrame) -> list[str]:
    """The inputs that the backbone gets, in tokens."""
    _, batch, tokenizer = read(model, rows)
    real = (ids[mask].tolist() for ids, mask in zip(batch.input_ids, batch.attention_mask, strict=True))
    return [" ".join(tokenizer.convert_ids_to_tokens(ids)) for ids in real]


# Token ids.


def test_tokens_and_segments_of_each_window(cross_encoder):
    model = ld.MaxP(cross_encoder, window_size=4, stride=3, **TITLED)
    assert inputs(model, frame("red sun", BODY)) == [
        "[CLS] old dog [SEP] red sun dog bird fish tree [SEP]",
        "[CLS] old dog [SEP] red sun tree river mountain city [SEP]",
        "[CLS] old dog [SEP] red sun city rain snow wind [SEP]",
    ]
    _, batch, _ = read(model, frame("red sun", "dog bird"))
    assert batch.token_type_ids.tolist() == [[0, 0, 0, 0, 1, 1, 1, 1, 1]]
    assert (batch.content_start.tolist(), batch.content_length.tolist()) == ([4], [4])


def test_two_separators_as_the_tokenizer_has_them(roberta):
    model = ld.MaxP(roberta, window_size=6, stride=4, **TITLED)
    assert inputs(model, frame("red sun", BODY)) == [
        "[CLS] old dog [SEP] [SEP] red sun dog bird fish tree river mountain [SEP]",
        "[CLS] old dog [SEP] [SEP] red sun river mountain city rain snow wind [SEP]",
    ]


@pytest.mark.parametrize("title", ["", None, np.nan])
def test_without_a_title_a_window_is_read_alone(title, cross_encoder):
    model = ld.MaxP(cross_encoder, window_size=6, stride=4, **TITLED)
    assert inputs(model, frame(title, BODY)) == [
        "[CLS] old dog [SEP] dog bird fish tree river mountain [SEP]",
        "[CLS] old dog [SEP] river mountain city rain snow wind [SEP]",
    ]


def test_a_document_may_be_a_title_alone(cross_encoder):
    model = ld.MaxP(cross_encoder, window_size=20, stride=10, **TITLED)
    assert inputs(model, frame("red sun", None)) == ["[CLS] old dog [SEP] red sun [SEP]"]


def test_a_long_title_is_cut_and_a_long_text_is_not(cross_encoder):
    model = ld.MaxP(cross_encoder, window_size=6, stride=4, **{**TITLED, "repeat_tokens": 3})
    with pytest.warns(ld.TruncationWarning, match=r"4 of 7 tokens of titles .*cut by repeat_tokens=3"):
        model(frame("red sun and blue rain on fish", BODY))
    assert inputs(model, frame("red sun and blue rain on fish", BODY)) == [
        "[CLS] old dog [SEP] red sun and dog bird fish tree river mountain [SEP]",
        "[CLS] old dog [SEP] red sun and river mountain city rain snow wind [SEP]",
    ]


def test_several_columns_in_the_order_of_repeat(cross_encoder):
    fields = {"text_field": ("text", "url", "title", "more"), "repeat": ("title", "url")}
    model = ld.MaxP(cross_encoder, window_size=3, stride=3, **fields)
    assert inputs(model, frame("red sun", "dog bird").assign(url="a-b", more="fish tree")) == [
        "[CLS] old dog [SEP] red sun a - b dog bird fish [SEP]",
        "[CLS] old dog [SEP] red sun a - b tree [SEP]",
    ]


def test_the_fixed_layout_has_room_for_window_and_title(cross_encoder):
    fixed = {**TITLED, "repeat_tokens": 3, "layout": "padded", "max_query_len": 4}
    for title in ("", "red sun", "red sun and blue rain on fish"):
        _, batch, tokenizer = read(ld.MaxP(cross_encoder, window_size=6, stride=4, **fixed), frame(title, BODY))
        assert batch.lengths.tolist() == [1 + 4 + 1 + 3 + 6 + 1] * 2
        assert {tokenizer.convert_ids_to_tokens(ids.tolist())[-1] for ids in batch.input_ids} == {"[SEP]"}


def test_bytes_are_read_with_a_line_break_between(decoder):
    titled = ld.LongP(decoder, template="plain", **TITLED)
    text = ld.LongP(decoder, template="plain")
    assert inputs(titled, frame("red sun", BODY)) == inputs(text, frame("", f"red sun\n {BODY}"))
    (cut,) = inputs(titled, frame("fish " * 20, BODY))
    _, title, text = cut.split("Ċ")  # the first line break is the template's
    assert title.split().count("Ġfish") == 9  # the tenth token is the line break
    assert text.split() == [f"Ġ{word}" for word in BODY.split()]


def test_titles_stand_at_the_beginning_of_a_templates_text(decoder):
    words = {"template": ld.Template.of("Q: {query} D: {text} R:", answers=("yes", "no"))}
    titled, joined = ld.LongP(decoder, **words, **TITLED), ld.LongP(decoder, **words)
    assert inputs(titled, frame("red sun", BODY)) == inputs(joined, frame("", f"red sun\n {BODY}"))


def test_marks_stand_before_the_sentences_of_the_text_alone(tmp_path):
    longformer = tiny_long.encoder(tmp_path, "longformer", labels=1)
    model = ld.LongP(longformer, global_attention="sentences", **TITLED)
    (found,) = inputs(model, frame("red sun", "dog bird. fish tree."))
    assert found.endswith("[SEP] red sun [CLS] dog bird . [CLS] fish tree . [SEP]")


def test_cased_tokenizers_read_titles_in_lower_case_too(cross_encoder):
    model = ld.MaxP(cross_encoder, layout="padded-lowercase", window_size=20, stride=10, **TITLED)
    assert inputs(model, frame("RED sun", "Dog")) == inputs(model, frame("red sun", "dog"))


# Room.


def test_windows_leave_room_for_what_is_repeated(cross_encoder):
    sizes = {"max_query_len": 8, **TITLED}
    assert ld.FirstP(cross_encoder, **sizes).load_scorer().settings.windows.size == 128 - 3 - 8 - 10
    assert ld.LongP(cross_encoder, **sizes).load_scorer().settings.windows.size == 128 - 3 - 8 - 10
    everything = ld.MaxP(cross_encoder, window_size=40, stride=20, **{**sizes, "max_query_len": None})
    assert everything.load_scorer().settings.max_query_len == 128 - 3 - 40 - 10
    with pytest.raises(ValueError, match=r"takes 107 document tokens.*\(repeat_tokens=10 are kept .*: lower that\)"):
        ld.MaxP(cross_encoder, window_size=108, stride=50, **sizes).load_scorer()
    with pytest.raises(ValueError, match=r"repeat_tokens=120 are kept .* has 117 for both: lower repeat_tokens"):
        ld.MaxP(cross_encoder, **{**sizes, "repeat_tokens": 120}).load_scorer()


def test_the_largest_input_fits(cross_encoder):
    model = ld.FirstP(cross_encoder, max_query_len=8, **TITLED)
    row = frame("red " * 50, "cat " * 500, query="dog " * 50)
    assert read(model, row)[1].lengths.tolist() == [128]
    model(row)


# Every family.

REPEATING = [name for name in SYSTEMS if name != "TKL"]


@pytest.mark.parametrize("name", slow_but(REPRESENTATIVE, REPEATING))
def test_every_family_reads_titles(name, results):
    titled, plain = make(name, **TITLED), make(name)
    short = results[results["docno"] != "d1"]  # LongP's one window leaves room for titles
    np.testing.assert_allclose(scores(titled, short.assign(title="")), scores(plain, short), rtol=1e-5, atol=1e-6)
    with_titles, without = scores(titled, results), scores(plain, results)
    same = [title in ("", None) for title in TITLES]
    assert np.isclose(with_titles, without, rtol=1e-4).tolist() == same
    assert titled.coverage.windows >= plain.coverage.windows


@pytest.mark.parametrize("name", slow_but(["MaxP"], ["MaxP", "FirstP", "AvgP", "BiEncoder-max"]))
def test_a_window_is_scored_as_the_text_of_title_and_window(name, results):
    titled, alone = (
        make(name, explain=True, **TITLED),
        make("BiEncoder-first" if "Bi" in name else "FirstP", window_size=60),
    )
    out = titled(results.iloc[[0]])
    texts = [f"{TITLES[0]} {results['text'][0][a:b]}" for a, b in out["window_spans"][0]]
    expected = scores(alone, tiny.frame(["old dog"], texts))
    np.testing.assert_allclose(out["window_scores"][0], expected, rtol=1e-4, atol=1e-5)


def test_one_window_is_that_of_the_joined_columns(results):
    sizes = {"window_size": 80, "text_field": ("title", "text")}
    short = results[results["docno"] != "d1"]
    expected = scores(make("FirstP", **sizes), short)
    np.testing.assert_allclose(scores(make("FirstP", **sizes, repeat="title"), short), expected, rtol=1e-5)


def test_spans_point_into_the_text(results):
    titled, plain = make("MaxP", explain=True, **TITLED)(results), make("MaxP", explain=True)(results)
    assert titled["window_spans"].tolist() == plain["window_spans"].tolist()
    start, end = titled["best_start"][0], titled["best_end"][0]
    assert results["text"][0][start:end].split()[0] in tiny.WORDS


def test_scores_do_not_depend_on_other_rows(results):
    for name in ("MaxP", "CEDR-knrm"):
        table = ld.check_invariance(make(name, **TITLED), results, verbose=False)
        assert table["passed"].dropna().all()
    made_up = ld.check_invariance(make("MaxP", **TITLED), verbose=False)
    assert made_up["passed"].dropna().all()


def test_sliding_of_pyterrier_prepends_titles_by_default():
    """Where it neither drops the end of a text nor fails on a short one, a model over its passages gives our scores."""
    rows = pd.DataFrame(
        [
            {"qid": "1", "query": "old dog", "docno": f"d{i}", "title": title, "body": " ".join(words), "score": 1.0}
            for i, (title, words) in enumerate([("red sun", tiny.WORDS[:40]), ("a cat", tiny.WORDS[5:35])])
        ]
    )
    model = make("FirstP", text_field="body", window_size=80)
    passages = pt.text.sliding(length=20, stride=10) >> model >> pt.text.max_passage()
    expected = passages(rows.assign(rank=[0, 1])).set_index("docno")["score"]
    windows = {"windows": ld.SlidingWords(20, 10), "text_field": ("title", "body"), "repeat": "title"}
    titled = make("FirstP", window_size=80)
    titled = ld.MaxP(titled.backbone, max_query_len=8, **windows)
    found = titled(rows).set_index("docno")["score"]
    np.testing.assert_allclose(found, expected[found.index], rtol=1e-5)


# Selectors.


def test_bm25_counts_the_words_of_titles(cross_encoder):
    """Each window holds the title's word then, so that it tells nothing about which to keep."""
    text = "cat cat rain cat fish cat wind bird"
    chosen = {}
    for title in ("", "rain rain rain"):
        model = ld.MaxP(
            cross_encoder, windows=ld.SlidingWords(2, 2), preselect=ld.BM25Windows(1), explain=True, **TITLED
        )
        (span,) = model(frame(title, text, query="rain fish"))["window_spans"][0]
        chosen[title] = text[slice(*span)]
    assert chosen == {"": "rain cat", "rain rain rain": "fish cat"}


@pytest.mark.parametrize("kind", ["embeddings", "cross-encoder"])
def test_selecting_models_get_the_text_that_is_read(kind, results, monkeypatch):
    if kind == "embeddings":
        chosen = ld.EmbeddingWindows(2, make("BiEncoder-max"))
    else:
        chosen = ld.CrossEncoderWindows(2, make("FirstP"))
    seen = []
    score = chosen.model.score_pairs
    monkeypatch.setattr(
        chosen.model, "score_pairs", lambda queries, texts: (seen.extend(texts), score(queries, texts))[1]
    )
    model = make("MaxP", preselect=chosen, **{**TITLED, "repeat_tokens": 2})
    _, batch, tokenizer = read(model, results.iloc[[0]])
    text, windows = results["text"][0], make("MaxP").load_scorer()
    spans = windows.settings.windows(windows.tokenize([text])[0])
    assert len(seen) == len(spans) > 2
    assert all(shown.startswith("the red\n") for shown in seen)  # two of the title's three tokens
    assert all(shown.removeprefix("the red\n") in text for shown in seen)
    assert len(batch.lengths) == 2
    assert tokenizer.decode(batch.input_ids[0], skip_special_tokens=True).startswith("old dog the red ")


# What is told.


def test_coverage_counts_titles_once_for_each_pair(results, tmp_path):
    model = make("MaxP", score_cache=tmp_path / "scores.sqlite", **{**TITLED, "repeat_tokens": 4})
    for _ in range(2):
        with pt.tqdm(file=io.StringIO()) as bar:
            coverage = model.score_pairs(results["query"].tolist(), model.documents(results), bar).coverage
        tokens = 3 + 2 + 15  # of the three titles
        assert (coverage.repeated_tokens, coverage.repeated_tokens_read, coverage.repeats_cut) == (tokens, 3 + 2 + 4, 1)
        assert coverage.documents == 5
        assert coverage.is_cut
        assert "cut in 1 documents: 9 of 20 tokens read" in str(coverage)
    summary = make("MaxP", **{**TITLED, "repeat_tokens": 4}).summary(results)
    assert summary.coverage == coverage
    unread = summary.unread.set_index("of").loc["repeated"]
    assert unread[["tokens", "share", "argument"]].tolist() == [11, 11 / 20, "repeat_tokens=4"]
    assert "20 tokens of titles; tokens not read, in 1 of them: 11 (55.0%), cut by repeat" in repr(summary)


def test_without_titles_nothing_is_said_of_them(results):
    model = make("MaxP")
    model(results)
    assert "title" not in str(model.coverage) + repr(model.summary(results))


def test_cached_scores_are_those_of_text_and_title(results, tmp_path):
    cached = make("MaxP", score_cache=tmp_path / "scores.sqlite", **TITLED)
    for frame_ in (results, results.assign(title="fish"), results.assign(title="")):
        np.testing.assert_allclose(scores(cached, frame_), scores(make("MaxP", **TITLED), frame_), rtol=1e-5)
    cached.repeat, cached.repeat_tokens = None, 32
    expected = scores(make("MaxP", text_field=("title", "text")), results)
    np.testing.assert_allclose(scores(cached, results), expected, rtol=1e-5)


# Loaders, saved models, training, features.


def test_text_loaders_supply_all_columns(results):
    expected = scores(make("MaxP", **TITLED), results)
    loader = pt.apply.generic(lambda rows: rows.assign(title=results["title"], text=results["text"]))
    bare = results.drop(columns=["title", "text"])
    np.testing.assert_allclose(scores(make("MaxP", text_loader=loader, **TITLED), bare), expected, rtol=1e-5)


@pytest.mark.parametrize("name", slow_but(["MaxP"], ["MaxP", "PARADE-attn", "CEDR-knrm"]))
def test_a_saved_model_goes_on_reading_titles(name, results, tmp_path):
    model = make(name, **{**TITLED, "repeat": ("title",)})
    expected = scores(model, results)
    model.save(tmp_path)
    again = LongDocReranker.load(tmp_path)
    assert (again.repeat, again.repeat_tokens) == (("title",), 10)
    np.testing.assert_allclose(scores(again, results), expected, rtol=1e-5)
    plain = make(name, text_field=("title", "text"))
    assert model.describe() != plain.describe()


@pytest.mark.parametrize("name", slow_but(["MaxP"], [name for name in REPEATING if name in CROSS_ENCODERS]))
def test_fit_reads_titles(name, results):
    recipe = ld.TrainingArgs(learning_rates={"": 1e-2}, epochs=2, dropout=0.0)
    models = [make(name, training=recipe, **TITLED) for _ in range(2)]
    for model, title in zip(models, (results["title"], "fish"), strict=True):
        model.fit(results.assign(title=title), QRELS)
        assert model.coverage.repeated_tokens > 0
    assert not np.allclose(scores(models[0], results), scores(models[1], results), rtol=1e-3)


def test_augmentation_changes_the_text_and_leaves_the_title(results):
    def reverse(text: str, rng: Random) -> str:
        return " ".join(reversed(text.split()))

    model = make("MaxP", **TITLED)
    args = ld.TrainingArgs(augment=reverse)
    groups, texts = make_groups(results, QRELS, args), Texts(results, model.documents)
    (example,) = make_examples([(groups[0], (0, 1))], texts, args, epoch=0)
    assert example.texts[1] == Document("dog short a", "a cat")
    assert [text.repeated for text in example.texts] == [text.repeated for text in texts[groups[0].rows[:2]]]


def test_why_shows_the_text_and_not_the_title(results):
    from pyterrier_longdoc.experiment.why import _explained

    (windows,) = _explained(make("MaxP", **TITLED), results.iloc[[0]])[1]
    assert windows["text"][0] == results["text"][0][windows["start"][0] : windows["end"][0]]


# Refused.


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"repeat": "title"}, r"repeat='title' must name some of the columns in text_field='text' and leave one"),
        ({"repeat": "text"}, r"leave one, of which windows are made, e.g. text_field="),
        ({"repeat": ("title", "url"), "text_field": ("title", "text")}, "must name some of the columns"),
        ({"repeat": ("title", "text"), "text_field": ("title", "text")}, "and leave one"),
        ({"repeat": ()}, r"repeat=\(\) must be the name of a column"),
        ({"repeat": 3}, "repeat=3 must be the name of a column"),
        ({"repeat_tokens": 10}, "repeat_tokens=10 would have no effect: nothing is read with each window without"),
        ({**TITLED, "repeat_tokens": 0}, "repeat_tokens=0 must be at least 1"),
        ({**TITLED, "repeat_tokens": None}, "repeat_tokens=None must be a whole number"),
    ],
)
@pytest.mark.parametrize("model", [ld.MaxP, ld.BiEncoder])
def test_bad_arguments(model, arguments, message):
    with pytest.raises(ValueError, match=message):
        model(**arguments)


def test_a_shared_budget_repeats_nothing():
    with pytest.raises(ValueError, match="shared_budget is for one window, with which nothing need be repeated"):
        ld.FirstP(layout="shared", **TITLED)


def test_a_missing_title_column_is_named(results):
    with pytest.raises(pt.validate.InputValidationError, match=r"the column\(s\) title are missing"):
        make("MaxP", **TITLED)(results.drop(columns="title"))


def test_settings_of_nothing_repeated_are_those_of_before(cross_encoder):
    settings = ld.MaxP(cross_encoder).settings()
    assert settings.repeat_tokens == 0
    assert replace(settings, repeat_tokens=5).largest_window == 155
