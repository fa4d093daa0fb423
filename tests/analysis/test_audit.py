"""audit: what systems with known answers read, and on what else their scores depend."""

from __future__ import annotations

import re
import warnings

import numpy as np
import pandas as pd
import pyterrier as pt
import pytest
import torch

import pyterrier_longdoc as ld
from pyterrier_longdoc.analysis import Audit
from pyterrier_longdoc.analysis.audit import FILLER, cycled

from ..support import llm, tiny_long
from ..support.passages import Writer

LENGTHS = (333, 990, 1000)


def matches(query: str, words: list[str]) -> float:
    return float(sum(word in query.split() for word in words))


def reader(part=lambda words: words, *, query_words: int | None = None):
    """A function that counts the words of a query in a part of a text."""

    def score(queries, texts):
        cut = [" ".join(query.split()[:query_words]) for query in queries]
        return [matches(query, part(text.split())) for query, text in zip(cut, texts, strict=True)]

    return score


def best_window(words: list[str]) -> list[str]:
    """Of 60 words; the last one may be shorter."""
    windows = [words[start : start + 60] for start in range(0, max(1, len(words) - 20), 40)]
    return max(windows, key=lambda window: "bees" in window or "honey" in window)


def scorer(part=lambda words: words) -> pt.Transformer:
    return pt.apply.doc_score(lambda row: matches(row["query"], part(row["text"].split())))


def sliding(length: int, stride: int) -> pt.Transformer:
    return pt.text.sliding("text", length=length, stride=stride, prepend_attr=None) >> scorer() >> pt.text.max_passage()


def ranks(part, method: str) -> pt.Transformer:
    """Scores are ranks by the matches, the same for each text alone; ties are in the order of rows or reversed."""

    def rank(frame: pd.DataFrame) -> pd.DataFrame:
        texts = frame["text"].str.split().map(part)
        found = pd.Series([matches(*row) for row in zip(frame["query"], texts, strict=True)], frame.index)
        order = found if method == "first" else found[::-1]
        scores = order.groupby(frame["qid"]).rank(method="first")
        return pt.model.add_ranks(frame.drop(columns="rank").assign(score=scores))

    return pt.apply.generic(rank)


def read_parts(found: Audit, of: str = "text") -> dict[int, list[tuple[int, int]]]:
    parts = found.frame[found.frame["of"] == of]
    read = parts[parts["read"]]
    return {
        int(length): list(zip(own["start"], own["end"], strict=True))
        for length, own in ((length, read[read["length"] == length]) for length in parts["length"].unique())
    }


READS_ALL = {length: [(0, length)] for length in LENGTHS}
KNOWN = {
    "everything": (reader(), READS_ALL),
    "the first 250": (reader(lambda words: words[:250]), {length: [(0, 250)] for length in LENGTHS}),
    "the last 101": (reader(lambda words: words[-101:]), {length: [(length - 101, length)] for length in LENGTHS}),
    "the first and the last window": (
        reader(lambda words: words[:120] + words[-77:]),
        {length: [(0, 120), (length - 77, length)] for length in LENGTHS},
    ),
    "the middle": (
        reader(lambda words: words[len(words) // 3 : len(words) // 2]),
        {length: [(length // 3, length // 2)] for length in LENGTHS},
    ),
    "ten words": (reader(lambda words: words[110:120]), {length: [(110, 120)] for length in LENGTHS}),
    "near both ends": (
        reader(lambda words: words[10:50] + words[-30:-5]),
        {length: [(10, 50), (length - 30, length - 5)] for length in LENGTHS},
    ),
    "all but a hole": (
        reader(lambda words: words[:200] + words[260:]),
        {length: [(0, 200), (260, length)] for length in LENGTHS},
    ),
    "the best window": (reader(best_window), READS_ALL),
    "whole windows of pt.text.sliding": (
        sliding(150, 75),
        {333: [(0, 300)], 990: [(0, 975)], 1000: [(0, 975)]},
    ),
    "MaxP over windows of words": (ld.MaxP(ld.PairScorer(reader()), windows=ld.SlidingWords(150, 75)), READS_ALL),
    "FirstP over words": (
        ld.FirstP(ld.PairScorer(reader()), windows=ld.Truncate(131)),
        {length: [(0, 131)] for length in LENGTHS},
    ),
    "what BM25 selects": (
        ld.MaxP(ld.PairScorer(reader()), windows=ld.SlidingWords(50, 40), preselect=ld.BM25Windows(1)),
        READS_ALL,
    ),
    "a z-score among rows": (
        scorer(lambda words: words[:77]) >> ld.ZScore(),
        {length: [(0, 77)] for length in LENGTHS},
    ),
    "ranks": (ranks(lambda words: words[:77], "first"), {length: [(0, 77)] for length in LENGTHS}),
    "ranks of reversed ties": (ranks(lambda words: words[:77], "last"), {length: [(0, 77)] for length in LENGTHS}),
}


@pytest.mark.parametrize("name", KNOWN)
def test_the_read_parts_of_a_system_are_found_to_the_word(name):
    system, expected = KNOWN[name]
    assert read_parts(ld.audit(system, lengths=LENGTHS)) == expected


def test_windows_far_apart_in_a_long_text_are_found_to_the_word():
    spans = [(start, start + 150) for start in range(700, 10_000, 1200)]
    found = ld.audit(
        reader(lambda words: [word for start, end in spans for word in words[start:end]]), lengths=[10_000]
    )
    assert read_parts(found) == {10_000: spans}


def test_gaps_that_can_go_unseen_are_told():
    found = ld.audit(reader(lambda words: words[:90] + words[110:]), lengths=[200])
    assert read_parts(found) == {200: [(0, 200)]}
    assert "Gaps shorter than 50 words" in str(found)


def test_the_parts_of_a_text_follow_each_other_and_alternate():
    frame = ld.audit(KNOWN["all but a hole"][0], lengths=[500]).frame
    parts = frame[frame["of"] == "text"]
    assert parts["start"].tolist() == [0, 200, 260]
    assert parts["end"].tolist() == [200, 260, 500]
    assert parts["read"].tolist() == [True, False, True]


def test_places_are_in_tokens_of_a_given_tokenizer():
    characters = ld.audit(reader(lambda words: words[:250]), lengths=[500], tokenizer="longdoc:minilm-l6")
    assert characters.unit == "tokens"
    assert read_parts(characters) == {500: [(0, 250)]}


@pytest.mark.parametrize(
    ("lengths", "sentence"),
    [
        ([1000], "Reads the first 250 words of a text of 1,000."),
        ([333, 1000], "Reads the first 250 words of a text (up to 1,000 tried)."),
        ([200, 1000], "Of a text, reads the words 1 to 200 of 200; 1 to 250 of 1,000."),
        ([100, 200], "Reads all words of a text (up to 200 tried)."),
    ],
)
def test_a_beginning_is_told_in_short(lengths, sentence):
    assert ld.audit(reader(lambda words: words[:250]), lengths=lengths).sentences()[0] == sentence


def test_a_limit_of_queries_is_found():
    found = ld.audit(reader(query_words=16), lengths=[200])
    assert read_parts(found, "query") == {100: [(0, 16)]}
    assert read_parts(found) == {200: [(0, 200)]}
    assert read_parts(ld.audit(KNOWN["ranks"][0], lengths=[200]), "query") == {100: [(0, 100)]}


def test_the_shortest_text_that_raises_is_found_and_shorter_ones_are_audited():
    def limited(queries, texts):
        if any(len(text.split()) > 600 for text in texts):
            raise RuntimeError("at most 600 words")
        return reader()(queries, texts)

    found = ld.audit(limited)
    assert found.errors[["of", "first", "last"]].to_numpy().tolist() == [["text", 601, 1777]]
    assert "RuntimeError: at most 600 words" in str(found)
    assert read_parts(found) == {333: [(0, 333)], 600: [(0, 600)]}


def test_texts_that_are_too_short_are_found():
    def limited(queries, texts):
        assert min(len(text.split()) for text in texts) >= 50
        return reader()(queries, texts)

    assert ld.audit(limited, lengths=[333]).errors[["first", "last"]].to_numpy().tolist() == [[0, 49]]


def test_a_system_that_raises_at_every_length_raises():
    with pytest.raises(pt.validate.InputValidationError, match="title"):
        ld.audit(pt.text.sliding("text", length=150, stride=75) >> scorer() >> pt.text.max_passage())


def test_a_random_scorer_is_reported_and_not_searched():
    rng = np.random.default_rng(0)
    found = ld.audit(lambda queries, texts: rng.random(len(texts)))
    assert found.dependence["repeat"] > 0.05
    assert found.frame.empty
    assert "cannot be seen" in str(found)


def test_a_little_noise_is_not_taken_for_reading():
    rng = np.random.default_rng(0)
    exact = reader(lambda words: words[:250])
    found = ld.audit(lambda queries, texts: exact(queries, texts) + 0.05 * rng.random(len(texts)), lengths=[1000])
    assert read_parts(found) == {1000: [(0, 250)]}
    assert "Reads at least the first 250 words of a text of 1,000." in found.sentences()
    assert "approximate" in str(found)


def test_noise_calls_nothing_unread(known_run):
    rng = np.random.default_rng(0)
    exact = reader(lambda words: words[:200])
    found = ld.audit(lambda queries, texts: exact(queries, texts) + rng.random(len(texts)), *known_run, lengths=[333])
    assert found.frame["read"].any()
    assert not (~found.frame["read"]).any()
    assert found.run.empty
    assert "never read" not in str(found)


@pytest.mark.parametrize(("size", "number"), [(50, 4), (50, 16), (200, 3), (10, 30)])
def test_windows_that_differ_from_text_to_text_are_not_called_unread(size, number):
    windows = ld.SlidingWords(size, size, max_windows=number, selection="first_last_random")
    found = ld.audit(ld.MaxP(ld.PairScorer(reader()), windows=windows))
    assert found.frame.empty
    assert "read at different places" in str(found)


@pytest.mark.parametrize("part", [lambda words: words, lambda words: words[:200]])
def test_a_text_whose_call_fails_is_read_row_by_row(part):
    def limited(queries, texts):
        if len(texts) > 10:
            raise RuntimeError("too many")
        return reader(part)(queries, texts)

    found = ld.audit(limited, lengths=[333])
    assert read_parts(found) == {333: [(0, len(part(["word"] * 333)))]}
    assert found.errors["of"].tolist() == ["call"]
    assert "rows: RuntimeError: too many" in str(found)


def test_a_query_that_raises_is_not_called_unread():
    def limited(queries, texts):
        assert max(len(query.split()) for query in queries) < 50
        return reader()(queries, texts)

    found = ld.audit(limited, lengths=[333])
    assert found.frame["of"].unique().tolist() == ["text"]
    assert "for a query with 100 words" in str(found)


def minmax(queries, texts):
    scores = np.array(reader()(queries, texts))
    return (scores - scores.min()) / max(1.0, np.ptp(scores))


def in_order(frame: pd.DataFrame) -> pd.DataFrame:
    """Prefers the first rows a little."""
    return scorer()(frame).assign(score=lambda rows: rows["score"] - 0.5 * frame["rank"])


def of_the_first_query(queries, texts):
    return reader()([queries[0]] * len(queries), texts)


BIRCH = ld.Birch(ld.PairScorer(reader()), windows=ld.SlidingWords(50, 50))


@pytest.mark.parametrize(
    ("system", "expected"),
    [
        (reader(), set()),
        (scorer(), set()),
        (scorer() >> ld.ZScore(), {"rows"}),
        (ranks(lambda words: words, "first"), {"rows", "order"}),
        (minmax, {"batch"}),
        (of_the_first_query, {"batch"}),
        (pt.apply.generic(in_order), {"rank"}),
        (BIRCH, {"score"}),
    ],
    ids=["function", "transformer", "ZScore", "ranks", "scaled by batch", "first query", "biased", "Birch"],
)
def test_what_else_a_score_depends_on_is_told(system, expected):
    found = ld.audit(system, lengths=[200])
    assert set(found.dependence[found.dependence > 0.01].index) == expected
    assert read_parts(found) == {200: [(0, 200)]}
    assert ("only" in found.sentences()[-1]) is not bool(expected)


def test_a_score_that_depends_on_the_docno_hides_what_is_read():
    found = ld.audit(pt.apply.doc_score(lambda row: float(int(row["docno"], 16) % 7)), lengths=[200])
    assert found.dependence["docno"] > 0.1
    assert found.frame.empty
    assert "its docno" in found.sentences()[-1]


def test_a_maximum_that_hides_the_answer_is_told():
    found = ld.audit(lambda queries, texts: [-score for score in reader(best_window)(queries, texts)], lengths=[333])
    assert not found.prefers_answer
    assert "maximum" in str(found)


def test_a_listwise_language_model_is_audited_by_its_ranks():
    def reply(messages):
        texts = [(int(number), text) for number, text in llm.shown(messages)]
        order = sorted(texts, key=lambda passage: "bees" not in passage[1] and "honey" not in passage[1])
        return " > ".join(f"[{number}]" for number, _ in order)

    system = ld.RankGPT(reply, max_doc_len=40, tokenizer=lambda text: len(text.split()))
    found = ld.audit(system, lengths=[333])
    assert found.dependence["rows"] > 0.01
    assert read_parts(found) == {333: [(0, 40)]}


@pytest.mark.parametrize(
    ("rows", "sentence"),
    [
        (3, "Reads all words of a text (up to 1,000 tried), in queries of 3 rows."),
        (20, "Reads the first 180 words of a text of 1,000, in queries of 20 rows."),
    ],
)
def test_what_rows_of_a_query_share_is_told_with_their_number(rows, sentence):
    def shared(frame):
        budget = 3600 // frame.groupby("qid")["qid"].transform("size")
        texts = [text.split()[:size] for text, size in zip(frame["text"], budget, strict=True)]
        return frame.assign(text=[" ".join(words) for words in texts])

    found = ld.audit(pt.apply.generic(shared) >> ranks(lambda words: words, "first"), lengths=[1000], rows=rows)
    assert found.sentences()[0] == sentence
    assert f"in queries of up to {rows} rows" in found.sentences()[-1]


def test_more_rows_are_tried_even_if_a_score_seems_independent():
    sizes = set()
    system = pt.apply.generic(lambda frame: (sizes.update(frame.groupby("qid").size()), scorer()(frame))[1])
    assert read_parts(ld.audit(system, lengths=[50], rows=7)) == {50: [(0, 50)]}
    assert 7 in sizes
    with pytest.raises(ValueError, match="rows"):
        ld.audit(scorer(), rows=2)


def test_a_system_that_takes_few_rows_is_asked_row_by_row():
    def few(queries, texts):
        if len(texts) > 3:
            raise MemoryError("too many rows")
        return reader()(queries, texts)

    found = ld.audit(few, lengths=[200])
    assert read_parts(found) == {200: [(0, 200)]}
    assert found.errors["of"].tolist() == ["call"]


def test_an_audit_leaves_no_trace(capfd):
    model = ld.FirstP(ld.PairScorer(reader()), windows=ld.Truncate(50), verbose=True)
    run = pd.DataFrame({"qid": "1", "query": "bees", "docno": ["a", "b"], "text": ["bees " * 40, "honey " * 40]})
    model(run)
    before = model.coverage
    capfd.readouterr()
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        ld.audit(pt.Transformer.identity() >> model, lengths=[200])
    assert capfd.readouterr().err == ""
    assert model.verbose
    assert model.coverage is before
    with pytest.warns(ld.TruncationWarning):
        model(run.assign(text="bees " * 100))
    assert "FirstP" in capfd.readouterr().err


def test_an_audit_leaves_no_trace_on_models_within_a_model():
    inner = ld.FirstP(ld.PairScorer(reader()), windows=ld.Truncate(5))
    selecting = ld.MaxP(
        ld.PairScorer(reader()), windows=ld.SlidingWords(20, 20), preselect=ld.CrossEncoderWindows(2, inner)
    )
    for system in (selecting, ld.MaxP(ld.PairScorer(inner), windows=ld.SlidingWords(20, 20))):
        ld.audit(system, lengths=[200])
        assert (inner.coverage, inner.warned) == (None, set())


def test_scores_are_read_as_by_pair_scorer():
    def function(queries, texts):
        return torch.tensor(reader()(queries, texts), requires_grad=True).to(torch.bfloat16)

    assert read_parts(ld.audit(function, lengths=[20])) == {20: [(0, 20)]}
    as_text = scorer() >> pt.apply.generic(lambda frame: frame.assign(score=frame["score"].map(str))[::-1])
    assert read_parts(ld.audit(as_text, lengths=[200])) == {200: [(0, 200)]}


def test_docnos_leave_room_for_the_number_of_a_passage():
    docnos = set()
    seen = pt.apply.generic(lambda frame: (docnos.update(frame["docno"]), frame)[1])
    sliding_texts = pt.text.sliding("text", length=50, stride=25, prepend_attr=None)
    ld.audit(sliding_texts >> seen >> scorer() >> pt.text.max_passage(), lengths=[3000])
    assert any("%p" in docno for docno in docnos)
    assert max(map(len, docnos)) <= 20  # Terrier's default


RESULTS = pd.DataFrame([["1", "bees", "d1", 1.0, 0]], columns=["qid", "query", "docno", "score", "rank"])
LOADER = pt.apply.text(lambda row: {"d1": "a text"}[row["docno"]])


class Retriever(pt.Transformer):
    def transform(self, inp):
        rows = [
            {"qid": qid, "query": query, "docno": "d1"} for qid, query in zip(inp["qid"], inp["query"], strict=True)
        ]
        return pt.model.add_ranks(pd.DataFrame(rows).assign(score=1.0))


@pytest.mark.parametrize(
    "stages",
    [pt.Transformer.from_df(RESULTS) % 5 >> LOADER, LOADER, pt.Transformer.from_df(RESULTS), Retriever() >> LOADER],
    ids=["first stage and loader", "loader", "first stage", "first stage of another package"],
)
def test_a_pipeline_is_told_to_leave_out_its_first_stage(stages):
    with pytest.raises(ValueError, match="leave out the first stage"):
        ld.audit(stages >> scorer())


@pytest.mark.parametrize("words", [60, 97])
def test_a_reranker_that_merges_equal_texts_of_a_query_is_audited_to_the_token(tmp_path, words):
    backbone = tiny_long.list_encoder(tmp_path, max_position_embeddings=8192)
    tokenizer = tiny_long.byte_tokenizer()
    tokens = len(tokenizer(cycled(FILLER, words))["input_ids"])  # so many end with a word
    query_tokens = len(tokenizer(cycled(FILLER, 16))["input_ids"])
    model = ld.ListReranker(backbone, max_doc_len=tokens, max_query_len=query_tokens, device="cpu")
    found = ld.audit(model, lengths=[200], tokenizer=tokenizer)
    assert found.dependence["rows"] > 0.01
    assert list(read_parts(found).values()) == [[(0, tokens)]]
    assert list(read_parts(found, "query").values()) == [[(0, query_tokens)]]


@pytest.fixture(scope="module")
def known_run():
    """Twelve texts of prose, of which a reader of 200 words reads these first words, and passages in them."""
    writer, rows, gold = Writer(3), [], []
    for number in range(12):
        text = writer.prose(100 + 50 * number)
        words = [match.span() for match in re.finditer(r"\S+", text)]
        rows.append(("q", f"d{number}", "elephants", text))
        gold.append(("q", f"d{number}", words[90 + 30 * number // 2][0], words[99 + 30 * number // 2][1]))
    run = pd.DataFrame(rows, columns=["qid", "docno", "query", "text"])
    return run, pd.DataFrame(gold, columns=["qid", "docno", "start", "end"])


def test_shares_of_a_run_are_those_of_its_own_texts(known_run):
    run, gold = known_run
    found = ld.audit(reader(lambda words: words[:200]), run, gold, lengths=[333])
    sizes = run["text"].str.split().str.len()
    assert found.run["text"] == pytest.approx((sizes - 200).clip(lower=0).sum() / sizes.sum())
    starts = [len(text[:start].split()) for text, start in zip(run["text"], gold["start"], strict=True)]
    assert found.run["gold"] == pytest.approx(np.mean([start >= 200 for start in starts]))
    assert 0 < found.run["gold"] < 1
    assert found.run["passages"] == 12
    assert "gold passages" in str(found)


def test_a_sample_of_a_run_has_short_and_long_texts(known_run):
    run, _ = known_run
    sizes = run["text"].str.split().str.len()
    found = ld.audit(reader(), run, sample=3, lengths=[333])
    parts = found.frame[found.frame["of"] == "run"]
    assert sorted(parts["length"]) == [sizes[i] for i in (2, 6, 10)]
    assert found.run["texts"] == 3
    assert "(3 texts)" in str(found)


def test_texts_of_a_run_that_raise_are_never_read(known_run):
    run, gold = known_run

    def limited(queries, texts):
        if max(len(text.split()) for text in texts) > 400:
            raise RuntimeError("too long")
        return reader()(queries, texts)

    found = ld.audit(limited, run, gold, lengths=[333])
    sizes = run["text"].str.split().str.len()
    assert found.run["text"] == pytest.approx(sizes[sizes > 400].sum() / sizes.sum())
    assert found.run["gold"] == pytest.approx((sizes > 400).mean())
    assert "too long" in str(found)


def test_each_text_of_a_document_counts():
    rows = [("1", "d", "bees", "w " * 300), ("2", "d", "bees", "v " * 100), ("3", "d", "bees", "v " * 100)]
    run = pd.DataFrame(rows, columns=["qid", "docno", "query", "text"])
    found = ld.audit(reader(lambda words: words[:200]), run, lengths=[333])
    assert found.run.to_dict() == {"text": 0.25, "texts": 2}
    assert "(2 texts)" in str(found)


@pytest.mark.parametrize("empty", ["lengths", "answer", "run"])
def test_empty_arguments_are_refused(known_run, empty):
    values = {"lengths": [], "answer": " ", "run": known_run[0].head(0)}
    with pytest.raises(ValueError, match=f"{empty} must not be empty"):
        ld.audit(reader(), **{empty: values[empty]})


def test_models_with_a_column_of_instructions_are_audited(tmp_path):
    backbone = tiny_long.list_encoder(tmp_path)
    model = ld.ListReranker(backbone, instruction_field="told", max_doc_len=60, max_query_len=64, device="cpu")
    assert not ld.audit(model, lengths=[50]).frame.empty


def test_gold_without_its_run_is_refused(known_run):
    run, gold = known_run
    with pytest.raises(ValueError, match="gold"):
        ld.audit(reader(), gold=gold)
    with pytest.raises(ValueError, match="gold"):
        ld.audit(reader(), run, gold.assign(docno="other"))
    with pytest.raises(ValueError, match="without words"):
        ld.audit(reader(), run.assign(text="short"), gold)


def test_the_plot_has_a_bar_for_each_part(known_run):
    run, _ = known_run
    found = ld.audit(reader(lambda words: words[:200]), run, lengths=[333])
    ax = found.plot()
    drawn = [(bar.get_y() + bar.get_height() / 2, bar.get_x(), bar.get_x() + bar.get_width()) for bar in ax.patches]
    rows = found.frame["start"].eq(0).cumsum() - 1
    expected = sorted(zip(rows, found.frame["start"], found.frame["end"], strict=True))
    np.testing.assert_allclose(sorted(drawn), expected)
    assert {text.get_text() for text in ax.get_legend().get_texts()} == {"read", "never read"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "expected"),
    [
        (lambda: ld.FirstP.load("longdoc:firstp", window_size=250), [(0, 250)]),
        (lambda: ld.MaxP.load("longdoc:maxp"), [(0, 1000)]),
        (lambda: ld.MaxP.load("longdoc:maxp", max_doc_len=477), [(0, 477)]),
        (lambda: ld.MaxP.load("longdoc:maxp", preselect=ld.BM25Windows(1)), [(0, 1000)]),
        (
            lambda: (
                pt.text.sliding("text", length=150, stride=75, prepend_attr=None)
                >> ld.FirstP.load("longdoc:firstp")
                >> pt.text.max_passage()
            ),
            [(0, 975)],
        ),
    ],
    ids=["FirstP", "MaxP", "truncated MaxP", "MaxP over BM25's best window", "sliding"],
)
def test_the_read_tokens_of_trained_models_are_found(model, expected):
    found = ld.audit(model(), lengths=[1000], tokenizer="longdoc:minilm-l6")
    assert read_parts(found) == {1000: expected}
    assert found.dependence.max() < 1e-4
