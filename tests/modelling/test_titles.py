"""Titles that are read with each window: token ids, room, selectors, coverage, every family of models."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pyterrier as pt
import pytest

import pyterrier_longdoc as ld

from ..support import tiny, tiny_long
from ..support.systems import CONTRACT, QRELS, QUIET, REPRESENTATIVE, SELECTORS, TRAINABLE, make, scores, slow_but

pytestmark = QUIET

TITLES = ["the red bird", "a cat", "snow and rain in a long winter's wind", "", None]
TITLED = {"text_field": ("title", "text"), "repeat": "title", "repeat_tokens": 10}
BODY = "dog bird fish tree river mountain city rain snow wind"


@pytest.fixture
def results() -> pd.DataFrame:
    """Five rows of two queries; d1 stands there twice, with two titles."""
    return tiny.results().assign(title=TITLES)


@pytest.fixture(scope="module")
def decoder(tmp_path_factory) -> str:
    return tiny_long.decoder(tmp_path_factory.mktemp("decoder"))


def frame(title, text, query="old dog") -> pd.DataFrame:
    return pd.DataFrame([{"qid": "1", "query": query, "docno": "d", "title": title, "text": text}])


def windows_of(model, rows: pd.DataFrame):
    """What the backbone gets of the rows."""
    pairs = model.model.read(rows["query"].tolist(), model.documents(rows))
    return [window for pair in pairs for window in pair.windows]


def inputs(model, rows: pd.DataFrame) -> list[str]:
    """The same in tokens."""
    tokenizer = model.model.tokenizer
    return [" ".join(tokenizer.convert_ids_to_tokens(window.ids.tolist())) for window in windows_of(model, rows)]


MISSING = ("", None, np.nan)


def test_the_title_precedes_the_text_in_each_window(cross_encoder):
    for size, stride, title, text, expected in [
        (5, 5, "red sun", BODY, ["red sun dog bird fish tree river", "red sun mountain city rain snow wind"]),
        (6, 5, "a cat", BODY, ["a cat dog bird fish tree river mountain", "a cat mountain city rain snow wind"]),
        *((6, 4, "red sun", missing, ["red sun"]) for missing in MISSING),
        *((5, 5, missing, BODY, ["dog bird fish tree river", "mountain city rain snow wind"]) for missing in MISSING),
    ]:
        model = ld.MaxP(cross_encoder, window_size=size, stride=stride, **TITLED)
        assert inputs(model, frame(title, text)) == [f"[CLS] old dog [SEP] {window} [SEP]" for window in expected]


def test_a_title_belongs_to_the_second_segment_and_to_the_content(cross_encoder):
    [window] = windows_of(ld.FirstP(cross_encoder, **TITLED), frame("red sun", "dog bird"))
    assert window.types.tolist() == [0, 0, 0, 0, 1, 1, 1, 1, 1]
    assert window.content == (4, 4 + 4)


def test_a_long_title_is_cut_and_a_long_text_is_not(cross_encoder):
    model = ld.MaxP(cross_encoder, window_size=6, stride=4, **{**TITLED, "repeat_tokens": 3})
    with pytest.warns(ld.TruncationWarning, match="repeat_tokens=3"):
        model(frame("red sun and blue rain on fish", BODY))
    assert inputs(model, frame("red sun and blue rain on fish", BODY)) == [
        "[CLS] old dog [SEP] red sun and dog bird fish tree river mountain [SEP]",
        "[CLS] old dog [SEP] red sun and river mountain city rain snow wind [SEP]",
    ]


def test_several_columns_are_repeated_in_the_order_of_repeat(cross_encoder):
    fields = {"text_field": ("text", "url", "title", "more"), "repeat": ("title", "url")}
    model = ld.MaxP(cross_encoder, window_size=3, stride=3, **fields)
    assert inputs(model, frame("red sun", "dog bird").assign(url="a-b", more="fish tree")) == [
        "[CLS] old dog [SEP] red sun a - b dog bird fish [SEP]",
        "[CLS] old dog [SEP] red sun a - b tree [SEP]",
    ]


def test_bytes_are_read_with_a_line_break_between(decoder):
    titled = ld.LongP(decoder, template="plain", **TITLED)
    text = ld.LongP(decoder, template="plain")
    assert inputs(titled, frame("red sun", BODY)) == inputs(text, frame("", f"red sun\n{BODY}"))
    (cut,) = inputs(titled, frame("fish " * 20, BODY))
    _, title, text = cut.split("Ċ")  # the first line break is the template's
    assert title.split().count("Ġfish") == 9  # the tenth token is the line break
    assert text.replace(" Ġ", "~").replace(" ", "").split("~") == BODY.split()


def test_only_sentences_of_the_text_have_marks(tmp_path):
    longformer = tiny_long.encoder(tmp_path, "longformer", labels=1)
    model = ld.LongP(longformer, global_attention="sentences", **TITLED)
    (found,) = inputs(model, frame("red sun", "dog bird. fish tree."))
    assert found.endswith("[SEP] red sun [CLS] dog bird . [CLS] fish tree . [SEP]")


def test_the_longest_query_title_and_window_fit_the_input(cross_encoder):
    model = ld.FirstP(cross_encoder, max_query_len=8, **TITLED)
    row = frame("red " * 50, "cat " * 500, query="dog " * 50)
    assert [len(window) for window in windows_of(model, row)] == [128]
    assert np.isfinite(scores(model, row)).all()


@pytest.mark.parametrize("name", slow_but(REPRESENTATIVE, CONTRACT))
def test_every_family_reads_titles(name, results):
    titled, plain = make(name, **TITLED), make(name)
    short = results[results["docno"] != "d1"]  # LongP's one window leaves room for titles
    np.testing.assert_allclose(scores(titled, short.assign(title="")), scores(plain, short), rtol=1e-5, atol=1e-6)
    same = np.isclose(scores(titled, results), scores(plain, results), rtol=1e-4)
    assert same.tolist() == [title in ("", None) for title in TITLES]


def test_titles_are_repeated_as_by_sliding_of_pyterrier(cross_encoder):
    """Scores are equal for texts of which `sliding` does not drop the end."""
    rows = tiny.frame(["old dog"], [" ".join(tiny.WORDS[:40]), " ".join(tiny.WORDS[5:35])])
    rows = rows.rename(columns={"text": "body"}).assign(title=["red sun", "a cat"])
    model = make("FirstP", text_field="body", window_size=80)
    passages = pt.text.sliding(length=20, stride=10) >> model >> pt.text.max_passage()
    expected = passages(rows).set_index("docno")["score"]
    windows = {"windows": ld.SlidingWords(20, 10), "text_field": ("title", "body"), "repeat": "title"}
    found = ld.MaxP(cross_encoder, max_query_len=8, **windows)(rows).set_index("docno")["score"]
    np.testing.assert_allclose(found, expected[found.index], rtol=1e-5)


@pytest.mark.parametrize(("title", "best"), [("", "rain cat"), ("rain rain rain", "fish cat")])
def test_bm25_counts_the_words_of_titles(title, best, cross_encoder):
    """With the title, every window contains its word, so the word does not distinguish windows."""
    text, windows = "cat cat rain cat fish cat wind bird", ld.SlidingWords(2, 2)
    model = ld.MaxP(cross_encoder, windows=windows, preselect=ld.BM25Windows(1), explain=True, **TITLED)
    ((span,),) = model(frame(title, text, query="rain fish"))["window_spans"]
    assert text[slice(*span)] == best


@pytest.mark.parametrize("name", ["EmbeddingWindows", "CrossEncoderWindows"])
def test_selecting_models_get_titles_and_the_text_of_windows(name, results, monkeypatch):
    chosen, seen = SELECTORS[name](2), []
    score = chosen.model.score
    monkeypatch.setattr(chosen.model, "score", lambda queries, texts: (seen.extend(texts), score(queries, texts))[1])
    selecting = make("MaxP", preselect=chosen, **{**TITLED, "repeat_tokens": 2})
    first, _ = inputs(selecting, results.iloc[[0]])
    assert first.startswith("[CLS] old dog [SEP] the red ")  # two of the title's three tokens
    assert len(seen) == len(inputs(make("MaxP"), results.iloc[[0]])) > 2
    assert all(shown.startswith("the red\n") for shown in seen)
    assert all(shown.removeprefix("the red\n") in results["text"][0] for shown in seen)


@pytest.mark.parametrize("name", slow_but(["MaxP"], [name for name in REPRESENTATIVE if name in TRAINABLE]))
def test_fit_reads_titles(name, results):
    recipe = ld.TrainingArgs(learning_rates={"": 1e-2}, epochs=2, dropout=0.0)
    models = [make(name, training=recipe, **TITLED) for _ in range(2)]
    for model, title in zip(models, (results["title"], "fish"), strict=True):
        model.fit(results.assign(title=title), QRELS)
    assert not np.allclose(scores(models[0], results), scores(models[1], results), rtol=1e-3)


def test_window_spans_refer_to_the_text_without_title(results):
    titled, plain = (make("MaxP", explain=True, **arguments)(results) for arguments in (TITLED, {}))
    assert titled["window_spans"].tolist() == plain["window_spans"].tolist()


def test_cached_scores_are_those_of_text_and_title(results, tmp_path):
    cached = make("MaxP", score_cache=tmp_path / "scores.sqlite", **TITLED)
    for rows in (results, results.assign(title="fish"), results.assign(title="")):
        np.testing.assert_allclose(scores(cached, rows), scores(make("MaxP", **TITLED), rows), rtol=1e-5)
    cached.repeat, cached.repeat_tokens = None, 32
    expected = scores(make("MaxP", text_field=("title", "text")), results)
    np.testing.assert_allclose(scores(cached, results), expected, rtol=1e-5)
