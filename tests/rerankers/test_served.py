"""Served models score as local ones, whatever a server does to the replies; what it cannot do is a clear error."""

from __future__ import annotations

import json
import logging
import pickle
import socket
import threading
import traceback
import warnings
from collections import Counter

import numpy as np
import pytest

import pyterrier_longdoc as ld
from pyterrier_longdoc.common.servers import BackendError, ContextOverflowError, MalformedReplyError
from pyterrier_longdoc.experiment.identity import Identities

from ..support import tiny
from ..support.llm import Answer, serving
from ..support.served import FORMS, LONGEST, TeiForm, VllmForm, answers, logits, reranker, sent
from ..support.systems import QUIET, scores

tenacity = pytest.importorskip("tenacity")

pytestmark = QUIET

SECRET = "sk-very-secret-0123456789"
SLIDING = {"window_size": 20, "stride": 10, "max_query_len": 8}
CHUNKS = {"window_size": 20, "max_query_len": 8}
MODELS = {
    "FirstP": (ld.FirstP, CHUNKS),
    "MaxP": (ld.MaxP, SLIDING),
    "SumP": (ld.SumP, SLIDING),
    "AvgP": (ld.AvgP, CHUNKS),
    "KMaxP": (ld.KMaxP, {"k": 2, "weights": [1.0, 0.5], **SLIDING}),
    "Birch": (ld.Birch, {"max_query_len": 8}),
    "LongP": (ld.LongP, {"max_doc_len": 60, "max_query_len": 8}),
}
ONE_QUERY = tiny.frame(["old dog"], [tiny.LONG, "snow in the city", "", "the red fish " * 15])


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch):
    monkeypatch.setattr(tenacity, "wait_random_exponential", lambda **_: lambda state: 0.0)


@pytest.fixture(params=FORMS, ids=lambda form: form.api)
def form(request):
    return request.param


def backend(server, form, **arguments) -> ld.ScoreServer:
    """A served model whose windows are counted in its tokens."""
    exact = {"tokenizer": tiny.encoder(), "longest_input": LONGEST}
    return ld.ScoreServer(server.url, api=form.api, model="tiny", **{**exact, **arguments})


def maxp(server, form, *, score_cache=None, **arguments) -> ld.MaxP:
    return ld.MaxP(backend(server, form, **arguments), score_cache=score_cache, **SLIDING)


# Scores.


@pytest.mark.parametrize("name", MODELS)
def test_scores_are_those_of_the_local_model(name, form, results):
    cls, arguments = MODELS[name]
    local = cls(tiny.encoder(), device="cpu", **arguments)
    expected = scores(local, results)
    with reranker(form) as server:
        model = cls(backend(server, form), **arguments)
        np.testing.assert_allclose(scores(model, results), expected, rtol=1e-5, atol=1e-5)
    assert model.coverage == local.coverage
    assert model.coverage.dtype is None
    assert {path for path, _, _ in server.requests} == {form.path}


def test_explanations_selection_and_lower_case(form, results):
    arguments = {"preselect": ld.BM25Windows(2), "layout": "padded-lowercase", "explain": True, **SLIDING}
    with reranker(form) as server:
        served = ld.MaxP(backend(server, form), **{**arguments, "layout": ld.InputLayout(lowercase=True)})(results)
        plain = ld.MaxP(tiny.encoder(), device="cpu", **{**arguments, "layout": ld.InputLayout(lowercase=True)})(
            results
        )
    for found, expected in zip(served["window_scores"], plain["window_scores"], strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)
    columns = ["window_spans", "best_start", "best_end"]
    assert served[columns].equals(plain[columns])
    assert max(map(len, served["window_spans"])) == 2


def test_each_window_is_sent_once_in_batches_of_one_query(form, results):
    with reranker(form) as server:
        model = maxp(server, form)
        model.batch_size = 3
        model(results)
    pairs = sent(server, form)
    assert max(Counter(pairs).values()) == 1
    asked = [form.asked(dict(body)) for _, _, body in server.requests]
    assert max(len(texts) for _, texts, _ in asked) == 3
    assert {query for query, _, _ in asked} == set(results["query"])


def test_a_servers_largest_batch_is_kept(results):
    with reranker(TeiForm) as server:
        maxp(server, TeiForm)(results)
    assert max(len(body["texts"]) for _, _, body in server.requests) == 4


def test_four_requests_are_under_way_at_the_same_time(form):
    together = threading.Barrier(4, timeout=30)
    reply = answers(form)

    def answer(body):
        together.wait()  # nobody is answered before four have asked
        return reply(body)

    with serving(answer, about=form.about) as server:
        model = maxp(server, form)
        model.batch_size = 1
        found = scores(model, tiny.frame(["old dog"], ["a cat", "a bird", "the sun", "snow"]))
    np.testing.assert_allclose(found, logits(["old dog"] * 4, ["a cat", "a bird", "the sun", "snow"]), atol=1e-5)


def test_connections_are_kept_from_one_run_to_the_next(form, results):
    with reranker(form) as server:
        model = maxp(server, form, concurrency=2)
        model.batch_size = 2
        for _ in range(3):
            model(results)
        assert len(server.requests) > 9
        assert len(server.connections) <= 2
        pickle.loads(pickle.dumps(model))(results)
        assert 2 < len(server.connections) + 1 <= 5  # a copy has its own


# What servers do to replies.


def broken(form) -> dict[str, tuple[Answer, str]]:
    """Replies that are none, by kind, with the words of the error."""
    good = [(0, 0.5), (1, 0.4), (2, 0.3)]

    def reply(scores):
        return Answer(form.reply(scores))

    return {
        "partial": (reply(good[:2]), "no score for 1 of 3 windows, the first of them 2"),
        "empty": (reply([]), "no score for 3 of 3 windows"),
        "double": (reply([*good, good[0]]), "two scores for window 0 of 3"),
        "one twice, one never": (reply([*good[:2], good[1]]), "two scores for window 1 of 3"),
        "unknown": (reply([*good, (3, 0.1)]), "index 3, where 3 windows were sent"),
        "negative": (reply([*good[:2], (-1, 0.1)]), "index -1, where"),
        "NaN": (reply([*good[:2], (2, float("nan"))]), "nan for window 2 of 3"),
        "infinite": (reply([*good[:2], (2, float("inf"))]), "inf for window 2 of 3"),
        "null": (reply([*good[:2], (2, None)]), "None for window 2 of 3"),
        "text": (reply([*good[:2], (2, "0.5")]), "'0.5' for window 2 of 3"),
        "cut off": (Answer(json.dumps(form.reply(good)).encode()[:-9], cut=9), "ChunkedEncodingError|ConnectionError"),
        "malformed": (Answer(b'{"data": ['), "no JSON"),
        "no JSON": (Answer(b"<html>welcome</html>"), "no JSON: <html>welcome</html>"),
        "another form": (Answer({"hello": "world"}), "no list with index and .*score"),
        "nothing": (Answer(None), "no list with index and .*score"),
    }


@pytest.mark.parametrize("kind", broken(TeiForm))
def test_broken_replies_are_asked_for_again_and_never_a_score(kind, form):
    frame, fault = tiny.frame(["old dog"], ["a cat", "a bird", "snow"]), broken(form)[kind]
    with reranker(form, fault[0]) as server:
        found = scores(maxp(server, form), frame)
    np.testing.assert_allclose(found, logits(["old dog"] * 3, frame["text"]), atol=1e-5)
    assert len(server.requests) == 2
    with serving(fault[0], about=form.about) as server, pytest.raises(BackendError, match=fault[1]) as caught:
        maxp(server, form, max_retries=1)(frame)
    assert f"asked at {server.url}{form.path}: " in str(caught.value)
    assert len(server.requests) == 2


@pytest.mark.parametrize("status", [429, 500, 503])
def test_what_may_pass_is_asked_again_and_nothing_that_was_answered(status, form):
    soon = Answer({"error": "busy"}, status, headers={"Retry-After": "0.01"})
    with reranker(form, soon, soon) as server:
        model = maxp(server, form)
        model.batch_size = 2
        found = scores(model, ONE_QUERY)
    np.testing.assert_allclose(found, scores(ld.MaxP(tiny.encoder(), device="cpu", **SLIDING), ONE_QUERY), atol=1e-5)
    refused = {json.dumps(body, sort_keys=True) for _, _, body in server.requests[:2]}
    times = Counter(json.dumps(body, sort_keys=True) for _, _, body in server.requests)
    assert sum(times.values()) == len(times) + 2
    assert {body for body, number in times.items() if number > 1} <= refused
    with serving(soon, about=form.about) as server, pytest.raises(BackendError, match=f"{status}, busy"):
        maxp(server, form, max_retries=2, concurrency=1)(ONE_QUERY)
    assert len(server.requests) == 3


def test_the_order_of_a_reply_says_nothing(form):
    expected = scores(ld.MaxP(tiny.encoder(), device="cpu", **SLIDING), ONE_QUERY)
    for change in (lambda ranked: ranked[::-1], sorted, lambda ranked: ranked[2:] + ranked[:2]):
        with serving(answers(form, change), about=form.about) as server:
            np.testing.assert_allclose(scores(maxp(server, form), ONE_QUERY), expected, atol=1e-5)


@pytest.mark.parametrize("status", [400, 401, 404, 424])
def test_what_cannot_get_better_is_asked_once(status, form):
    with (
        serving(Answer({"error": "no such thing"}, status), about=form.about) as server,
        pytest.raises(BackendError, match=rf"ScoreServer\('http.*\): {status}, no such thing|{status}, no such thing"),
    ):
        maxp(server, form, concurrency=1)(tiny.frame(["a", "b", "c"], ["x y z"]))
    assert len(server.requests) == 1


BLANK = "invalid request: list of documents must not contain only empty strings or only whitespace"
"""What Cohere says; among others a text that is blank has a score there."""


def test_documents_without_text_that_a_server_refuses_are_named(form):
    reply = answers(form)

    def answer(body):
        _, texts, _ = form.asked(dict(body))
        return reply(body) if any(text.strip() for text in texts) else Answer({"message": BLANK}, 400)

    rows = tiny.frame(["old dog"], ["a cat", "", "snow"])
    with serving(answer, about=form.about) as server:
        found = scores(maxp(server, form), rows)
        np.testing.assert_allclose(found, logits(["old dog"] * 3, rows["text"]), atol=1e-5)
        with pytest.raises(BackendError, match=rf"400, {BLANK}.*1 of the 1 windows have no text.*results\['text'\]"):
            maxp(server, form)(rows.iloc[[1]])
    with (
        serving(Answer({"message": "no"}, 400), about=form.about) as server,
        pytest.raises(BackendError, match=r"400, no; is it a server with api='\w+'\?$"),
    ):
        maxp(server, form)(rows.iloc[[0]])


def test_slow_and_absent_servers(form):
    frame, reply = tiny.frame(["old dog"], ["a cat"]), answers(form)

    def late(body):
        answer = reply(body)
        answer.wait = 0.6
        return answer

    with serving(late, reply, about=form.about) as server:
        assert scores(maxp(server, form, timeout=0.3), frame) == pytest.approx(logits(["old dog"], ["a cat"]), abs=1e-5)
        assert len(server.requests) == 2
    with serving(late, about=form.about) as server, pytest.raises(BackendError, match="ReadTimeout"):
        maxp(server, form, timeout=0.3, max_retries=0)(frame)
    with socket.create_server(("127.0.0.1", 0)) as closed:
        place = f"127.0.0.1:{closed.getsockname()[1]}"
    dead = ld.ScoreServer(f"http://{place}", api=form.api, max_retries=0)
    with pytest.raises(BackendError, match=r"ConnectionError.*refused"):
        ld.MaxP(dead)(frame)


def test_nothing_is_loaded_or_asked_before_the_first_transform():
    model = ld.MaxP(ld.ScoreServer("http://127.0.0.1:9", max_retries=0))
    assert repr(model) == "MaxP(ScoreServer('http://127.0.0.1:9', max_retries=0))"
    assert len(model(ONE_QUERY.iloc[:0])) == 0


# Windows that are too long.

LONG_WORDS = tiny.frame(["old dog"], ["snow", " ".join(["f15h" * 8] * 10 + ["cat"] * 5)])
"""Of the second text's words ten are 32 tokens each."""


@pytest.mark.parametrize("form", [TeiForm, VllmForm], ids=lambda form: form.api)
def test_a_window_that_is_too_long_is_refused_with_what_to_do(form):
    with (
        reranker(form) as server,
        pytest.raises(ContextOverflowError, match=r"has 349 characters and begins 'f15h.*smaller window_size"),
    ):
        ld.MaxP(backend(server, form, tokenizer=None), window_size=15, stride=15)(LONG_WORDS)
    assert len(server.requests) == 1


@pytest.mark.parametrize("form", [TeiForm, VllmForm], ids=lambda form: form.api)
def test_windows_that_the_server_cuts_are_counted(form):
    with reranker(form) as server:
        model = ld.MaxP(backend(server, form, tokenizer=None, truncate=True), window_size=15, stride=15)
        with pytest.warns(UserWarning, match="did not read 1 windows to their end, cut by the server"):
            found = scores(model, LONG_WORDS)
    np.testing.assert_allclose(found, logits(["old dog"] * 2, LONG_WORDS["text"]), atol=1e-5)
    assert model.coverage.windows_cut == 1
    assert model.coverage.is_cut
    assert "1 windows cut by the server" in str(model.coverage)
    cuts = [form.asked(dict(body))[2] for _, _, body in server.requests]
    assert cuts == [False, False, True, False]  # both, the long one alone and then cut, the short one


@pytest.mark.parametrize("form", [TeiForm, VllmForm], ids=lambda form: form.api)
def test_with_its_tokenizer_windows_fit_as_the_server_says(form):
    with reranker(form) as server:
        model = ld.FirstP(backend(server, form, longest_input=None), max_query_len=8)
        model(tiny.frame(["old dog"], [tiny.LONG * 5]))
        assert model.load_scorer().settings.windows.largest == LONGEST - 8 - 3 - 8  # query, special ones, to spare
        too_large = ld.FirstP(backend(server, form, longest_input=None), max_query_len=8, window_size=120)
        with pytest.raises(ValueError, match=r"windows? size"):
            too_large(ONE_QUERY)


def test_who_may_cut_without_a_word_is_named(form):
    tells = form in (TeiForm, VllmForm)
    with reranker(form) as server, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        unknown, exact = maxp(server, form, tokenizer=None), maxp(server, form)
        for model in (unknown, unknown, exact):
            model(ONE_QUERY.iloc[:2])
    said = [str(warning.message) for warning in caught if "may cut windows without a word" in str(warning.message)]
    assert len(said) == (0 if tells else 1)


# Who it is.


def test_a_cache_knows_the_served_model(form, tmp_path):
    frame = tiny.frame(["old dog"], ["a cat", "snow"])
    with reranker(form) as server:
        first = maxp(server, form, score_cache=tmp_path / "scores")
        expected = scores(first, frame)
        number = len(server.requests)
        again = maxp(server, form, score_cache=tmp_path / "scores")
        assert (scores(again, frame) == expected).all()
        assert again.coverage == first.coverage
        assert len(server.requests) == number
        other = ld.MaxP(backend(server, form, parameters={"user": "me"}), score_cache=tmp_path / "scores", **SLIDING)
        other(frame)
        assert len(server.requests) > number


def test_another_model_behind_the_same_address_is_asked(tmp_path):
    frame, served = tiny.frame(["old dog"], ["a cat"]), ["abc"]

    def about(path):
        return Answer({**json.loads(TeiForm.about(path).body), "model_sha": served[-1]})

    with serving(answers(TeiForm), about=about) as server:
        model = maxp(server, TeiForm, score_cache=tmp_path / "scores")
        for sha, requests in (("abc", 1), ("abc", 1), ("def", 2)):
            served.append(sha)
            model(frame)
            assert len(server.requests) == requests
        told = Identities().of(model)
        assert told.unchecked == []
        assert told.told["weights"]["model"] == "tiny@def"


def test_a_model_without_a_name_is_not_cached(tmp_path):
    form = FORMS[2]
    with reranker(form) as server:
        model = maxp(server, form, score_cache=tmp_path / "scores")
        unnamed = ld.ScoreServer(server.url, api="cohere", tokenizer=tiny.encoder(), longest_input=LONGEST)
        model.backbone = unnamed
        with pytest.raises(ValueError, match=r"does not tell which model it serves.*model="):
            model(ONE_QUERY)
        assert Identities().of(ld.MaxP(unnamed)).unchecked


def test_one_of_several_models_has_to_be_named():
    listed = Answer({"data": [{"id": "one"}, {"id": "two"}]})
    with (
        serving(Answer({}), about=lambda path: listed) as server,
        pytest.raises(ValueError, match="one, two: name one"),
    ):
        ld.MaxP(ld.ScoreServer(server.url, api="vllm"))(ONE_QUERY)


def test_keys_appear_nowhere(form, tmp_path, caplog, monkeypatch):
    caplog.set_level(logging.DEBUG)
    monkeypatch.setenv("LONGDOC_TEST_KEY", SECRET)
    leaking = Answer({"error": f"your key {SECRET} is bad"}, 401)
    with serving(answers(form), leaking, about=form.about) as server:
        model = maxp(server, form, key_variable="LONGDOC_TEST_KEY", score_cache=tmp_path / "scores")
        model(tiny.frame(["old dog"], ["a cat"]))
        with pytest.raises(BackendError, match=r"your key \*\*\* is bad") as caught:
            model(ONE_QUERY)
        assert server.requests[0][1]["Authorization"] == f"Bearer {SECRET}"
        assert caught.value.__context__ is None
        told = json.dumps(model.describe())
    shown = [repr(model), str(vars(model.backbone)), "".join(traceback.format_exception(caught.value)), told]
    assert not any(SECRET in text for text in [*shown, caplog.text])
    assert SECRET.encode() not in pickle.dumps(model)
    assert SECRET.encode() not in (tmp_path / "scores").read_bytes()
    monkeypatch.delenv("LONGDOC_TEST_KEY")
    with pytest.raises(BackendError, match="set the environment variable LONGDOC_TEST_KEY"):
        ld.MaxP(ld.ScoreServer("http://127.0.0.1:9", key_variable="LONGDOC_TEST_KEY"))(ONE_QUERY)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"url": "localhost:8000"}, "url='localhost:8000' must begin with http:// or https://"),
        ({"url": f"http://me:{SECRET}@host"}, "url must hold neither user nor query"),
        ({"url": f"http://host/rerank?key={SECRET}"}, "url must hold neither user nor query"),
        ({"api": "other"}, "api='other'.*tei, vllm, cohere, infinity"),
        ({"concurrency": 0}, "concurrency=0 must be at least 1"),
        ({"timeout": 0}, "timeout=0"),
        ({"max_retries": -1}, "max_retries=-1"),
        ({"api": "cohere", "truncate": True}, "truncate=True would have no effect"),
        ({"parameters": {"truncate": True}}, "parameters must not have truncate"),
        ({"api": "vllm", "parameters": {"text_1": "x"}}, "parameters must not have text_1"),
        ({"longest_input": 0}, "longest_input=0 must be at least 1"),
    ],
)
def test_arguments_that_can_never_work(arguments, message):
    with pytest.raises(ValueError, match=message) as caught:
        ld.ScoreServer(**{"url": "http://host", **arguments})
    assert SECRET not in str(caught.value)


def test_equal_ones_have_equal_hashes():
    first, second = (ld.ScoreServer("http://host", parameters={"user": "me"}) for _ in range(2))
    assert {first} == {second}


def test_an_endpoint_is_taken_as_it_is():
    form = FORMS[2]
    with serving(answers(form)) as server:
        model = ld.MaxP(ld.ScoreServer(f"{server.url}/v1/rerank", api="cohere"), **SLIDING)
        model(ONE_QUERY)
    assert {path for path, _, _ in server.requests} == {"/v1/rerank"}


def test_a_reply_that_names_no_model_is_refused():
    with serving(Answer({}), about=lambda path: Answer(["hello"])) as server:
        for api in ("tei", "vllm"):
            with pytest.raises(MalformedReplyError, match="names no model"):
                ld.MaxP(ld.ScoreServer(server.url, api=api))(ONE_QUERY)
