"""First tokens instead of rankings: log-probabilities through real clients, caches, failures, and who has none."""

from __future__ import annotations

import math

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

import pyterrier_longdoc as ld
from pyterrier_longdoc.listwise import (
    BackToFront,
    CallableBackend,
    FirstToken,
    HuggingFaceBackend,
    IncompleteReplyWarning,
    ListwisePrompt,
    LLMClient,
    NoLogprobsError,
    OpenAIBackend,
    Pointwise,
    Prices,
    RankGPT,
    Reply,
    UnreadableReplyError,
)
from pyterrier_longdoc.listwise.answer_forms import logprob
from pyterrier_longdoc.modelling.windows import SentenceWindows

from ..support import tiny_answers, tiny_long
from ..support.llm import GRADE, Answer, candidates, completion, order, serving, shown, worth

pytest.importorskip("openai")
pytest.importorskip("tenacity")

LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
CHAT = "{% for message in messages %}{{ message.content }}\n{% endfor %}"


def worths(messages):
    """What the lettered documents of a prompt are worth, in their order."""
    contents = [message["content"] for message in messages if message["role"] == "user"]
    return [int(GRADE.search(text)[1]) for text in contents if text[:1] == "[" and text[2] == "]"]


def likely(messages, *, most=20):
    """Letters as likely as their documents are worth; further tokens are the likeliest of all, as servers give them."""
    told = {letter: worth / 10 - 20 for letter, worth in zip(LETTERS, worths(messages), strict=False)}
    told |= {"The": -0.5, " ": -1.0}
    best = sorted(told, key=told.__getitem__, reverse=True)[:most]
    return Reply("The", 50, 1, logprobs={token: told[token] for token in best})


def with_logprobs(logprobs, text="A"):
    body = completion(text)
    top = [{"token": token, "logprob": value, "bytes": None} for token, value in logprobs.items()]
    body["choices"][0]["logprobs"] = {"content": [{"token": text, "logprob": -0.1, "bytes": None, "top_logprobs": top}]}
    return Answer(body)


def server(body):
    reply = likely(body["messages"], most=body["top_logprobs"])
    return with_logprobs(reply.logprobs, reply.text)


def test_documents_are_in_the_order_of_their_letters_probabilities():
    run = candidates(queries=2, documents=30)
    out = RankGPT(likely, schedule=BackToFront(10, 5), answer=FirstToken())(run)
    best = worth(run).groupby(run["qid"]).nlargest(5).droplevel(0).index
    assert set(out.loc[best].groupby("qid")["rank"].apply(sorted).map(tuple)) == {(0, 1, 2, 3, 4)}
    assert list(out["docno"]) == list(run["docno"])


def test_the_least_likely_tokens_are_told_too():
    """Servers give -9999 for what is all but impossible, of which no exponential is left."""
    assert logprob({"A": -9999.0, "B": -0.1}, "A") == -9999.0
    assert logprob({"A": -800.0, " A": -800.0}, "A") == pytest.approx(math.log(2) - 800.0)
    for none in ({"A": -math.inf}, {"A": math.nan}, {"B": -0.1}):
        assert logprob(none, "A") == -math.inf
    values = iter((-750.0, -9999.0, -800.0))
    sure = Pointwise(lambda messages: Reply("Yes", logprobs={"Yes": 0.0, "No": next(values)}))
    assert sure(candidates(documents=3))["score"].tolist() == [750.0, 9999.0, 800.0]


def test_numbers_where_the_prompt_has_numbers():
    prompt = ListwisePrompt(closing="{query}? Answer with the number of the best document.")
    model = lambda messages: Reply("", logprobs={str(i): -i / 10 for i, _ in shown(messages)} | {"9": 0.0})  # noqa: E731
    assert order(RankGPT(model, answer=FirstToken(), prompt=prompt)(candidates(documents=3))) == ["d0", "d1", "d2"]
    with pytest.raises(ValueError, match="at most 9"):
        RankGPT(model, answer=FirstToken(), prompt=prompt)(candidates(documents=10))
    with pytest.raises(ValueError, match="at most 5"):
        RankGPT(lambda messages: pytest.fail("asked"), answer=FirstToken(top_logprobs=5))(candidates(documents=8))
    with pytest.raises(ValueError, match="identifiers='letters'"):
        RankGPT(model, prompt=ListwisePrompt(identifiers="letters"))


def test_documents_without_a_log_probability_are_counted_and_warned_of():
    run = candidates(documents=10)
    ranker = RankGPT(lambda messages: likely(messages, most=8), answer=FirstToken(), report=True)
    with pytest.warns(IncompleteReplyWarning, match="left out 4 documents"):
        out = ranker(run)
    assert set(out["llm_missing"]) == {4}
    assert order(out)[:6] == run.loc[worth(run).nlargest(6).index, "docno"].tolist()


def test_a_reply_without_any_letter_is_a_failure_and_not_asked_for_again():
    asked = []
    model = lambda messages: asked.append(1) or Reply("I", logprobs={"I": -0.1, "Sorry": -2.0})  # noqa: E731
    with pytest.raises(UnreadableReplyError, match="no ranking"):
        RankGPT(model, answer=FirstToken(), retries=3)(candidates(documents=4))
    assert len(asked) == 1
    with pytest.warns(IncompleteReplyWarning, match="1 of 1 prompts"):
        RankGPT(model, answer=FirstToken(), on_failure="keep")(candidates(documents=4))


def test_a_server_is_asked_for_one_token_and_its_log_probabilities_are_kept(tmp_path):
    run = candidates(documents=8)
    with serving(server) as served:
        backend = OpenAIBackend("tiny", base_url=f"{served.url}/v1", parameters={"temperature": 0, "max_tokens": 300})
        client = LLMClient(backend, cache=tmp_path / "replies.sqlite", prices=Prices(1, 1), max_cost=1.0)
        ranker = RankGPT(client, answer=FirstToken(top_logprobs=12))
        estimate = ranker.estimate(run)
        first = ranker(run)
        (_, _, body), *more = served.requests
    assert not more
    assert (body["max_tokens"], body["logprobs"], body["top_logprobs"]) == (1, True, 12)
    assert (estimate.calls, estimate.output_tokens) == (1, 1)
    replayed = RankGPT(LLMClient(backend, cache=tmp_path / "replies.sqlite", replay_only=True), answer=ranker.answer)
    assert order(replayed(run)) == order(first) == run.loc[worth(run).sort_values().index[::-1], "docno"].tolist()
    newer = OpenAIBackend("tiny", base_url=backend.base_url, parameters={"max_completion_tokens": 9})
    with serving(server) as served:
        newer.base_url = f"{served.url}/v1"
        RankGPT(newer, answer=FirstToken())(run)
        assert served.requests[0][2]["max_completion_tokens"] == 1
        assert "max_tokens" not in served.requests[0][2]


class TextOnly:
    """A backend without log-probabilities."""

    model, settings = "text", {}

    def __call__(self, messages):
        return Reply("A")


@pytest.mark.parametrize("make", [lambda llm: RankGPT(llm, answer=FirstToken()), Pointwise])
def test_who_gives_no_log_probabilities_is_refused(make):
    with pytest.raises(ValueError, match="gives no log-probabilities"):
        make(TextOnly())
    with serving(Answer(completion("A"))) as served:
        ranker = make(OpenAIBackend("tiny", base_url=f"{served.url}/v1"))
        with pytest.raises(NoLogprobsError, match="tiny"):
            ranker(candidates(documents=3))
        assert len(served.requests) == 1
    with pytest.raises(NoLogprobsError, match="silent"):
        make(CallableBackend(lambda messages: "A", name="silent"))(candidates(documents=3))


def judged(messages):
    value = int(GRADE.search(messages[-1]["content"])[1])
    return Reply("Yes", 30, 1, logprobs={"Yes": -1.0, " yes": -1.0, "No": -value / 10, "The": -9.0})


def test_pointwise_scores_are_the_log_odds_of_yes():
    run = candidates(queries=2, documents=6)
    before = run.copy()
    out = Pointwise(judged, concurrency=3)(run)
    # p(yes) is that of both tokens
    assert out["score"].tolist() == pytest.approx((math.log(2) - 1.0 + worth(run) / 10).tolist())
    assert before.equals(run)
    assert out.index.equals(run.index)
    twice = run.loc[[0, 0, 3]].reset_index(drop=True)
    client = LLMClient(judged)
    assert Pointwise(client)(twice)["score"].nunique() == 2
    assert len(client.ledger.calls) == 2
    assert Pointwise(judged).estimate(run).calls == 12


def test_pointwise_grades_are_expected_values():
    run, asked = candidates(documents=6), []

    def graded(messages):
        asked.append(messages[-1]["content"])
        value = int(GRADE.search(messages[-1]["content"])[1])
        return Reply("2", 30, 1, logprobs={"0": -value / 10, " 2": -1.0, "2": -1.0, "The": -0.1, "7": -0.1})

    out = Pointwise(graded, grades=4)(run)
    two = 2 * math.exp(-1)
    assert out["score"].tolist() == pytest.approx((2 * two / (two + (-worth(run) / 10).map(math.exp))).tolist())
    assert "from 0 (not at all) to 3 (fully)" in asked[0]
    Pointwise(graded, grades=3, request="{query} {text} Grade to {best}:")(run)
    assert asked[-1].endswith("Grade to 2:")
    with pytest.raises(UnreadableReplyError, match="no grade is among the 2 first tokens"):
        Pointwise(judged_by_words, grades=4)(run)
    with pytest.warns(IncompleteReplyWarning):
        assert Pointwise(judged_by_words, grades=4, on_failure="nan-free-bottom")(run)["score"].tolist() == [0.0] * 6
    for wrong in ({"grades": 1}, {"grades": 11}, {"request": "{query} {text} {best}"}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            Pointwise(graded, **wrong)
    sure = Pointwise(lambda messages: Reply("3", logprobs={"3": -9999.0, "0": -9999.0}), grades=4)
    assert sure(run)["score"].tolist() == pytest.approx([1.5] * 6)


def judged_by_words(messages):
    return Reply("Good", 30, 1, logprobs={"Good": -1.0, "Bad": -2.0})


def test_pointwise_failures_are_at_the_bottom_or_raised():
    run = candidates(documents=4)
    model = lambda m: Reply("", logprobs={"Yes": -1.0}) if "document 2" in m[-1]["content"] else judged(m)  # noqa: E731
    with pytest.raises(UnreadableReplyError, match=r"'q0': .*likeliest: 'Yes'"):
        Pointwise(model)(run)
    with pytest.warns(IncompleteReplyWarning, match="1 of 4 documents had no log-probability"):
        out = Pointwise(model, on_failure="nan-free-bottom")(run)
    assert order(out)[-1] == "d2"
    assert out["score"].notna().all()


def test_pointwise_shows_the_best_passages_and_says_what_was_passed_over():
    run = candidates(documents=3)
    grades = run["text"]
    run = run.assign(text="Filler goes first. " * 60 + grades + ". " + "Filler goes last. " * 60)
    asked = []
    arguments = {"preselect": ld.BM25Windows(1), "windows": SentenceWindows(max_tokens=20), "max_prompt_tokens": 120}
    ranker = Pointwise(lambda messages: asked.append(messages) or judged(messages), **arguments)
    run["query"] = "document about topic"
    assert ranker(run)["score"].tolist() == pytest.approx((math.log(2) - 1.0 + worth(run) / 10).tolist())
    tokens = [ranker.client.tokens.count_messages(messages) for messages in asked]
    assert max(tokens) <= 120
    assert ranker.estimate(run).input_tokens == sum(tokens)
    assert list(ranker.coverage.cut) == [f"preselect={ranker.preselect!r}"]
    with pytest.raises(ValueError, match="preselect="):
        Pointwise(judged, preselect="bm25")


def metaspace_tokenizer():
    """As Llama 2's and other SentencePiece tokenizers: a text begins with the space before its first word."""
    pieces = [*tiny_long.SPECIALS, "<unk>", "\u2581", "\u2581Yes", "Yes", "\u2581No", "No", "\u2581yes", "Yesterday"]
    pieces += [*LETTERS, *(f"\u2581{letter}" for letter in LETTERS if letter != "C"), "\u2581\u2581A"]
    core = Tokenizer(models.Unigram([(piece, -3.0) for piece in pieces], pieces.index("<unk>")))
    core.pre_tokenizer = pre_tokenizers.Metaspace(split=False)
    core.decoder = decoders.Metaspace()
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token=tiny_long.SPECIALS[0], unk_token="<unk>")


@pytest.mark.parametrize(
    ("make", "forms"),
    [
        (
            metaspace_tokenizer,
            {"Yes": ["Yes", "\u2581Yes"], "A": ["A", "\u2581A", "\u2581\u2581A"], "C": ["C"], "yes": ["\u2581yes"]},
        ),
        (tiny_long.byte_tokenizer, {"yes": ["yes", "\u0120yes"], "no": ["no", "\u0120no"], "A": ["A"]}),
    ],
)
def test_a_word_is_all_tokens_that_are_it_but_for_white_space_each_once(make, forms, tmp_path):
    tokenizer = make()
    tokenizer.chat_template = CHAT
    _, folder = tiny_answers.checkpoint(tmp_path, "llama", tokenizer)
    backend = HuggingFaceBackend(folder, device="cpu")
    question = [{"role": "user", "content": "A B?"}]
    reply = backend.first_token(question, [*forms, "absent"], 20)
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)
    ids = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    with torch.inference_mode():
        expected = model(**ids).logits[0, -1].double().log_softmax(-1)
    vocabulary = tokenizer.get_vocab()
    for word, tokens in forms.items():
        told = expected[[vocabulary[token] for token in tokens]].logsumexp(0).item()
        assert logprob(reply.logprobs, word) == pytest.approx(told, abs=1e-4), word
    assert logprob(reply.logprobs, "absent") == -math.inf
