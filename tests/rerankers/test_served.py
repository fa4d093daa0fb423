"""Served models score as local ones, whatever a server does to the replies; what it cannot do is a clear error."""

from __future__ import annotations

import json
import logging
import pickle
import signal
import threading
import time
import traceback
import warnings
from collections import Counter

import numpy as np
import pytest

import pyterrier_longdoc as ld
from pyterrier_longdoc.common.servers import BackendError, ContextOverflowError

from ..support import tiny
from ..support.llm import SECRET, SECRET_PARAMETERS, Answer, serving
from ..support.served import FORMS, LONGEST, LlamaForm, TeiForm, VllmForm, answers, logits, reranker, sent
from ..support.systems import QUIET, make, scores

tenacity = pytest.importorskip("tenacity")

pytestmark = QUIET

SLIDING = {"window_size": 20, "stride": 10, "max_query_len": 8}
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


@pytest.mark.parametrize("name", ["FirstP", "MaxP", "LongP"])
def test_scores_are_those_of_the_local_model(name, form, results):
    arguments = {"max_doc_len": 60} if name == "LongP" else {}
    local = make(name, device="cpu", **arguments)
    expected = scores(local, results)
    with reranker(form) as server:
        model = make(name, backend(server, form), **arguments)
        np.testing.assert_allclose(scores(model, results), expected, rtol=1e-5, atol=1e-5)
    assert model.coverage == local.coverage
    assert model.coverage.dtype is None
    assert {path for path, _, _ in server.requests} == {form.path}


def test_evidence_and_probabilities_are_those_of_the_local_model(form, results):
    calibration = {"of": ["score", "window_scores"], "weights": [2.0, -0.5], "bias": 0.1, "steps": None}

    def handed_on(model):
        model.explain = True
        return (ld.Calibrated(model, calibration=calibration) >> ld.Evidence(60, tokenizer=tiny.encoder()))(results)

    expected = handed_on(make("MaxP", device="cpu"))
    with reranker(form) as server:
        found = handed_on(make("MaxP", backend(server, form)))
    assert len(set(expected["evidence_tokens"])) == 3
    assert found["text"].tolist() == expected["text"].tolist()
    np.testing.assert_allclose(found["probability"], expected["probability"], atol=1e-5)


def test_each_window_is_sent_once_in_batches_of_one_query(form, results):
    for asked_size, size in ((3, 3), (64, 4 if form is TeiForm else 14)):  # a server's largest batch is kept
        with reranker(form) as server:
            model = maxp(server, form)
            model.batch_size = asked_size
            model(results)
        assert max(Counter(sent(server, form)).values()) == 1
        asked = [form.asked(dict(body)) for _, _, body in server.requests]
        assert max(len(texts) for _, texts, _ in asked) == size
        assert {query for query, _, _ in asked} == set(results["query"])


def test_four_requests_are_sent_at_the_same_time(form):
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


def broken(form) -> dict[str, tuple[Answer, str]]:
    """Replies that are none, by kind, with a word of the error."""
    good = [(0, 0.5), (1, 0.4), (2, 0.3)]

    def reply(scores):
        return Answer(form.reply(scores))

    return {
        "partial": (reply(good[:2]), "for each of 3 windows"),
        "double": (reply([*good, good[0]]), "for each of 3 windows"),
        "one twice, one never": (reply([*good[:2], good[1]]), "for each of 3 windows"),
        "negative": (reply([*good[:2], (-1, 0.1)]), "for each of 3 windows"),
        "NaN": (reply([*good[:2], (2, float("nan"))]), "finite"),
        "null": (reply([*good[:2], (2, None)]), "finite"),
        "huge": (reply([*good[:2], (2, 10**400)]), "finite"),
        "deep": (Answer(b"[" * 10**5 + b"]" * 10**5), "recursion"),
        "cut off": (Answer(json.dumps(form.reply(good)).encode()[:-9], cut=9), "ChunkedEncodingError|ConnectionError"),
        "no JSON": (Answer(b"<html>welcome</html>"), f"no reply of the form '{form.api}'"),
        "another form": (Answer({"hello": "world"}), "hello"),
        "nothing": (Answer(None), "null"),
    }


@pytest.mark.parametrize("kind", broken(TeiForm))
def test_broken_replies_are_requested_again_and_repeated_ones_raise_an_error(kind, form):
    frame, fault = tiny.frame(["old dog"], ["a cat", "a bird", "snow"]), broken(form)[kind]
    with reranker(form, fault[0]) as server:
        found = scores(maxp(server, form), frame)
    np.testing.assert_allclose(found, logits(["old dog"] * 3, frame["text"]), atol=1e-5)
    assert len(server.requests) == 2
    with serving(fault[0], about=form.about) as server, pytest.raises(BackendError, match=fault[1]) as caught:
        maxp(server, form, max_retries=1)(frame)
    assert f"{server.url}{form.path}" in str(caught.value)
    assert len(server.requests) == 2


@pytest.mark.parametrize("status", [429, 500, 503])
def test_only_requests_with_temporary_errors_are_repeated(status, form):
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


def test_a_deeply_nested_error_reply_is_requested_again(form):
    deep = Answer(b"[" * 10**5 + b"]" * 10**5, 503)
    with reranker(form, deep) as server:
        found = scores(maxp(server, form), tiny.frame(["old dog"], ["a cat"]))
    assert found == pytest.approx(logits(["old dog"], ["a cat"]), abs=1e-5)
    assert len(server.requests) == 2


@pytest.mark.parametrize("told", [{"max_client_batch_size": -1}, {"max_input_length": 10**400}, {"data": "none"}])
def test_invalid_limits_in_the_description_of_a_server_are_refused(told):
    with serving(answers(TeiForm), about=lambda path: Answer(told)) as server:
        with pytest.raises(BackendError, match=f"{server.url}/info"):
            ld.MaxP(ld.ScoreServer(server.url, max_retries=1))(ONE_QUERY)
        assert not server.requests


@pytest.mark.parametrize("status", [400, 401, 404, 424])
def test_requests_with_permanent_errors_are_not_repeated(status, form):
    refusal = Answer({"error": "no such thing"}, status)
    with serving(refusal, about=form.about) as server, pytest.raises(BackendError, match=f"{status}, no such thing"):
        maxp(server, form, concurrency=1)(tiny.frame(["a", "b", "c"], ["x y z"]))
    assert len(server.requests) == 1


def test_slow_servers_are_asked_again_and_unreachable_ones_raise_an_error(form):
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
    with pytest.raises(BackendError, match=r"ConnectionError.*refused"):  # nobody is at that address any more
        ld.MaxP(ld.ScoreServer(server.url, api=form.api, max_retries=0))(frame)


def test_nothing_is_loaded_or_asked_before_the_first_transform():
    model = ld.MaxP(ld.ScoreServer("http://127.0.0.1:9", max_retries=0))
    assert repr(model) == "MaxP(ScoreServer('http://127.0.0.1:9', max_retries=0))"
    assert len(model(ONE_QUERY.iloc[:0])) == 0


LONG_WORDS = tiny.frame(["old dog"], ["snow", " ".join(["f15h" * 8] * 10 + ["cat"] * 5)])
"""Of the second text's words ten are 32 tokens each."""


TELLING = pytest.mark.parametrize("form", [TeiForm, VllmForm], ids=lambda form: form.api)


@TELLING
def test_the_error_of_a_window_that_is_too_long_recommends_a_smaller_window_size(form):
    with reranker(form) as server, pytest.raises(ContextOverflowError, match=r"begins 'f15h.*smaller window_size"):
        ld.MaxP(backend(server, form, tokenizer=None), window_size=15, stride=15)(LONG_WORDS)
    assert len(server.requests) == 1


def test_the_error_of_a_server_that_cannot_truncate_does_not_recommend_it():
    with reranker(LlamaForm) as server, pytest.raises(ContextOverflowError, match="too large to process") as caught:
        ld.MaxP(backend(server, LlamaForm, tokenizer=None), window_size=15, stride=15)(LONG_WORDS)
    assert len(server.requests) == 1
    assert "truncate" not in str(caught.value)


QWEN = "<Instruct>: Find it\n<Query>: {query}\n<Document>: {text}<end>\n"


def test_a_template_goes_around_query_and_window(form):
    with reranker(form) as server:
        maxp(server, form, template=QWEN)(ONE_QUERY.iloc[1:2])
    ((query, text),) = sent(server, form)
    assert query == "<Instruct>: Find it\n<Query>: old dog\n"
    assert text == "<Document>: snow in the city<end>\n"
    assert query + text == ld.Template.of(QWEN).fill("old dog", "snow in the city")


def test_a_template_takes_its_tokens_from_windows_and_is_part_of_the_identity(form):
    exact = {"api": form.api, "model": "m", "tokenizer": tiny.encoder(), "longest_input": 90}
    with reranker(form) as server:
        plain, with_template = (ld.ScoreServer(server.url, template=template, **exact) for template in (None, QWEN))
        words = len(tiny.tokenizer()(QWEN.format(query="", text=""), add_special_tokens=False)["input_ids"])
        assert plain.limits().longest_input - with_template.limits().longest_input == words
    assert plain.describe() != with_template.describe()


@pytest.mark.parametrize("template", ["yes-no", "no slots"])
def test_templates_for_chats_or_without_slots_are_refused(template):
    with pytest.raises(ValueError, match="template"):
        ld.ScoreServer("http://localhost", template=template)


@TELLING
def test_windows_that_the_server_cuts_are_counted(form):
    with reranker(form) as server:
        model = ld.MaxP(backend(server, form, tokenizer=None, truncate=True), window_size=15, stride=15)
        with pytest.warns(UserWarning, match="by the server"):
            found = scores(model, LONG_WORDS)
    np.testing.assert_allclose(found, logits(["old dog"] * 2, LONG_WORDS["text"]), atol=1e-5)
    assert model.coverage.windows_cut == 1
    cuts = [form.asked(dict(body))[2] for _, _, body in server.requests]
    assert cuts == [False, False, True, False]  # both, the long one alone and then cut, the short one


@TELLING
def test_with_the_tokenizer_of_a_server_windows_fit_its_longest_input(form):
    with reranker(form) as server:
        model = ld.FirstP(backend(server, form, longest_input=None), max_query_len=8)
        model(tiny.frame(["old dog"], [tiny.LONG * 5]))
        assert model.model.reader.windows.largest == LONGEST - 8 - 3 - 8  # query, special ones, to spare


def test_a_server_that_may_truncate_silently_causes_a_warning(form):
    with reranker(form) as server, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        unknown, exact = maxp(server, form, tokenizer=None), maxp(server, form)
        for model in (unknown, unknown, exact):
            model(ONE_QUERY.iloc[:2])
    said = [str(warning.message) for warning in caught if "may truncate windows" in str(warning.message)]
    assert len(said) == (form not in (TeiForm, VllmForm, LlamaForm))


def test_a_cache_knows_address_model_and_parameters(form, tmp_path):
    frame, path = tiny.frame(["old dog"], ["a cat", "snow"]), tmp_path / "scores"
    with reranker(form) as server:
        first, again = (maxp(server, form, score_cache=path) for _ in range(2))
        expected, number = scores(first, frame), len(server.requests)
        assert (scores(again, frame) == expected).all()
        assert again.coverage == first.coverage
        assert len(server.requests) == number
        maxp(server, form, score_cache=path, parameters={"user": "me"})(frame)
        assert len(server.requests) > number
    with pytest.raises(ValueError, match="model="):
        ld.MaxP(ld.ScoreServer("http://127.0.0.1:9", api="cohere"), score_cache=path)(ONE_QUERY)


def test_keys_are_in_no_repr_error_log_or_file(form, tmp_path, caplog, monkeypatch):
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
    trace = "".join(traceback.format_exception(caught.value))
    assert not any(SECRET in text for text in (repr(model), str(vars(model.backbone)), trace, told, caplog.text))
    assert not any(SECRET.encode() in held for held in (pickle.dumps(model), (tmp_path / "scores").read_bytes()))
    monkeypatch.delenv("LONGDOC_TEST_KEY")
    with pytest.raises(BackendError, match="LONGDOC_TEST_KEY"):
        ld.MaxP(ld.ScoreServer("http://127.0.0.1:9", key_variable="LONGDOC_TEST_KEY"))(ONE_QUERY)


SECRET_ADDRESSES = (
    *("http://me:{}@host", "http://host/?key={}", "http://host#{}", "http://host/#x?key={}", "http://host/rerank#{}"),
    *("me:{}@host", "http:/me:{}@host"),
)


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        *(({"url": url}, "url") for url in ("host:80", "http://", "http:/host")),
        *(({"url": url.format(SECRET)}, "url") for url in SECRET_ADDRESSES),
        *(({"parameters": given}, "key_variable") for given in SECRET_PARAMETERS),
        ({"api": "other"}, "api"),
        *(({"api": api, "truncate": True}, "truncate") for api in ("cohere", "llama.cpp")),
    ],
)
def test_wrong_arguments_are_refused_without_showing_secrets(arguments, name):
    with pytest.raises(ValueError, match=name) as caught:
        ld.ScoreServer(**{"url": "http://host", **arguments})
    assert SECRET not in str(caught.value)


def test_at_signs_in_paths_and_token_parameters_are_not_taken_for_secrets():
    ld.ScoreServer("https://host/ai/run/@cf/rerank", parameters={"max_tokens": 1, "stop_token_ids": [2], "user": "me"})


def test_one_of_several_models_must_be_chosen():
    models = Answer({"data": [{"id": "one"}, {"id": "two"}]})
    with serving(about=lambda path: models) as server, pytest.raises(BackendError, match=r"one, two: .*model="):
        ld.MaxP(ld.ScoreServer(server.url, api="vllm"))(ONE_QUERY)


def test_the_address_of_an_endpoint_is_used_unchanged():
    form = FORMS[2]
    with serving(answers(form)) as server:
        ld.MaxP(ld.ScoreServer(f"{server.url}/v1/rerank", api="cohere"), **SLIDING)(ONE_QUERY)
    assert {path for path, _, _ in server.requests} == {"/v1/rerank"}


def test_the_first_error_is_raised_instead_of_those_of_cancelled_requests(monkeypatch):
    class Slow(threading.Event):
        def set(self):
            pause = 0 if self.is_set() else 0.3
            super().set()
            time.sleep(pause)

    monkeypatch.setattr("pyterrier_longdoc.rerankers.served.Event", Slow)
    busy = Answer({}, 503, headers={"Retry-After": "100"})
    with serving(Answer({}, 401), busy) as server, pytest.raises(BackendError, match="401"):
        backend(server, TeiForm, concurrency=2).score(list("ab"), list("xy"), 1)


@pytest.fixture
def interruptible():
    """Ctrl-C raises, as at a keyboard: a job in the background of a shell ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_an_interruption_cancels_waiting_and_unsent_requests(form, interruptible):
    def interrupt(body):
        time.sleep(0.2)  # a signal is noticed late if it comes just before the main thread waits
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
        return Answer({}, 503, headers={"Retry-After": "100"})

    busy = Answer({}, 503, headers={"Retry-After": "100"})
    with serving(busy, interrupt, about=form.about) as server, pytest.raises(KeyboardInterrupt):
        backend(server, form, concurrency=2).score(list("abcdef"), list("uvwxyz"), 1)
    assert len(server.requests) == 2
