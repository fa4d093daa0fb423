"""RankGPT ranks documents by the log-probabilities of the first token of a reply."""

from __future__ import annotations

import math

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from pyterrier_longdoc.listwise import (
    BackendError,
    BackToFront,
    FirstToken,
    HuggingFaceBackend,
    IncompleteReplyWarning,
    ListwisePrompt,
    OpenAIBackend,
    Pointwise,
    RankGPT,
    Reply,
    UnreadableReplyError,
)
from pyterrier_longdoc.listwise.answer_forms import logprob

from ..support import tiny_answers, tiny_long
from ..support.llm import GRADE, Answer, candidates, completion, order, serving, shown, worth

pytest.importorskip("openai")

LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
CHAT = "{% for message in messages %}{{ message.content }}\n{% endfor %}"
IN_NUMBERS = ListwisePrompt(closing="{query}? Answer with the number of the best document.")


def likely(messages, *, most=20):
    """Letters as likely as their documents are worth; other tokens are the likeliest of all, as servers give them."""
    contents = [message["content"] for message in messages if message["role"] == "user"]
    worths = [int(GRADE.search(text)[1]) for text in contents if text[:1] == "[" and text[2] == "]"]
    logprobs = {letter: worth / 10 - 20 for letter, worth in zip(LETTERS, worths, strict=False)}
    logprobs |= {"The": -0.5, " ": -1.0}
    best = sorted(logprobs, key=logprobs.__getitem__, reverse=True)[:most]
    return Reply("The", 50, 1, logprobs={token: logprobs[token] for token in best})


def server(body):
    reply = likely(body["messages"], most=body["top_logprobs"])
    top = [{"token": token, "logprob": value, "bytes": None} for token, value in reply.logprobs.items()]
    answer = completion(reply.text)
    first = {"token": reply.text, "logprob": -0.1, "bytes": None, "top_logprobs": top}
    answer["choices"][0]["logprobs"] = {"content": [first]}
    return Answer(answer)


def by_number(messages):
    return Reply("", logprobs={str(number): -number / 10 for number, _ in shown(messages)} | {"9": 0.0})


def test_documents_are_ranked_by_the_log_probabilities_of_their_letters():
    run = candidates(queries=2, documents=30)
    out = RankGPT(likely, schedule=BackToFront(10, 5), answer=FirstToken())(run)
    best = worth(run).groupby(run["qid"]).nlargest(5).droplevel(0).index
    assert set(out.loc[best].groupby("qid")["rank"].apply(sorted).map(tuple)) == {(0, 1, 2, 3, 4)}
    assert list(out["docno"]) == list(run["docno"])


def test_a_prompt_with_numbers_is_answered_by_numbers():
    ranker = RankGPT(by_number, answer=FirstToken(), prompt=IN_NUMBERS)
    assert order(ranker(candidates(documents=3))) == ["d0", "d1", "d2"]


@pytest.mark.parametrize(
    ("arguments", "documents", "rule"),
    [
        ({"answer": FirstToken(), "prompt": IN_NUMBERS}, 10, "at most 9"),
        ({"answer": FirstToken(top_logprobs=5)}, 8, "at most 5"),
        ({"prompt": ListwisePrompt(identifiers="letters")}, 2, "identifiers="),
    ],
)
def test_prompts_that_the_answer_form_cannot_order_are_refused(arguments, documents, rule):
    with pytest.raises(ValueError, match=rule):
        RankGPT(by_number, **arguments)(candidates(documents=documents))


@pytest.mark.parametrize(
    ("logprobs", "expected"),
    [
        ({"A": -9999.0, "B": -0.1}, -9999.0),  # what servers give for all but impossible tokens
        ({"A": -800.0, " A": -800.0}, math.log(2) - 800.0),
        ({"A": -math.inf}, -math.inf),
        ({"A": math.nan}, -math.inf),
        ({"B": -0.1}, -math.inf),
    ],
)
def test_the_log_probability_of_a_word_is_summed_over_its_tokens(logprobs, expected):
    assert logprob(logprobs, "A") == pytest.approx(expected)


def test_documents_without_a_log_probability_are_counted_and_last():
    run = candidates(documents=10)
    ranker = RankGPT(lambda messages: likely(messages, most=8), answer=FirstToken())
    with pytest.warns(IncompleteReplyWarning, match="4 documents"):
        out = ranker(run)
    assert ranker.counts["llm_missing"].tolist() == [4]
    assert order(out)[:6] == run.loc[worth(run).nlargest(6).index, "docno"].tolist()


def test_a_reply_without_any_letter_fails_without_a_retry():
    asked = []
    model = lambda messages: asked.append(1) or Reply("I", logprobs={"I": -0.1, "Sorry": -2.0})  # noqa: E731
    with pytest.raises(UnreadableReplyError):
        RankGPT(model, answer=FirstToken(), retries=3)(candidates(documents=4))
    assert len(asked) == 1


@pytest.mark.parametrize("limit", ["max_tokens", "max_completion_tokens"])
def test_one_token_is_requested_from_a_server(limit):
    with serving(server) as served:
        backend = OpenAIBackend("tiny", base_url=f"{served.url}/v1", parameters={limit: 300})
        RankGPT(backend, answer=FirstToken(top_logprobs=12))(candidates(documents=8))
    ((_, _, body),) = served.requests
    assert {name: body[name] for name in body if "tokens" in name} == {limit: 1}
    assert (body["logprobs"], body["top_logprobs"]) == (True, 12)


class TextOnly:
    """A backend without log-probabilities."""

    model, settings = "text", {}

    def __call__(self, messages):
        return Reply("A")


need_logprobs = pytest.mark.parametrize("make", [lambda llm: RankGPT(llm, answer=FirstToken()), Pointwise])


@need_logprobs
def test_backends_without_log_probabilities_are_refused(make):
    with pytest.raises(ValueError, match="log-probabilities"):
        make(TextOnly())


@need_logprobs
def test_missing_log_probabilities_are_not_requested_again(make):
    with serving(Answer(completion("A"))) as served:
        ranker = make(OpenAIBackend("tiny", base_url=f"{served.url}/v1"))
        with pytest.raises(BackendError, match=r"tiny.*log-probabilities"):
            ranker(candidates(documents=3))
    assert len(served.requests) == 1


def metaspace_tokenizer():
    """As Llama 2's and other SentencePiece tokenizers: a text begins with the space before its first word."""
    pieces = [*tiny_long.SPECIALS, "<unk>", "\u2581", "\u2581Yes", "Yes", "\u2581No", "No", "\u2581yes", "Yesterday"]
    pieces += [*LETTERS, *(f"\u2581{letter}" for letter in LETTERS if letter != "C"), "\u2581\u2581A"]
    core = Tokenizer(models.Unigram([(piece, -3.0) for piece in pieces], pieces.index("<unk>")))
    core.pre_tokenizer = pre_tokenizers.Metaspace(split=False)
    core.decoder = decoders.Metaspace()
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token=tiny_long.SPECIALS[0], unk_token="<unk>")


@pytest.mark.parametrize(
    ("make", "tokens_of"),
    [
        (
            metaspace_tokenizer,
            {"Yes": ["Yes", "\u2581Yes"], "A": ["A", "\u2581A", "\u2581\u2581A"], "C": ["C"], "yes": ["\u2581yes"]},
        ),
        (tiny_long.byte_tokenizer, {"yes": ["yes", "\u0120yes"], "no": ["no", "\u0120no"], "A": ["A"]}),
    ],
)
def test_a_local_model_sums_all_tokens_of_a_word_with_or_without_spaces(make, tokens_of, tmp_path):
    tokenizer = make()
    tokenizer.chat_template = CHAT
    _, folder = tiny_answers.checkpoint(tmp_path, "llama", tokenizer)
    question = [{"role": "user", "content": "A B?"}]
    reply = HuggingFaceBackend(folder, device="cpu").first_token(question, [*tokens_of, "absent"], 20)
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)
    ids = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    with torch.inference_mode():
        expected = model(**ids).logits[0, -1].double().log_softmax(-1)
    vocabulary = tokenizer.get_vocab()
    for word, tokens in tokens_of.items():
        of_tokens = expected[[vocabulary[token] for token in tokens]].logsumexp(0).item()
        assert logprob(reply.logprobs, word) == pytest.approx(of_tokens, abs=1e-4), word
    assert logprob(reply.logprobs, "absent") == -math.inf
