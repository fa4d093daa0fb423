"""ReasonedPointwise reads the verdict after the reasoning of a model, and scores it by its log-probabilities."""

from __future__ import annotations

import math

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from pyterrier_longdoc.listwise import (
    HuggingFaceBackend,
    IncompleteReplyWarning,
    LLMClient,
    OpenAIBackend,
    RankGPT,
    ReasonedPointwise,
    Reply,
    SetwiseHeapsort,
    UnreadableReplyError,
)
from pyterrier_longdoc.listwise.parsing import find_verdict

from ..support import tiny_long
from ..support.llm import GRADE, Answer, candidates, completion, order, serving, worth

WORDS = ("true", "false")


def grade_in(messages) -> int:
    return int(GRADE.search(messages[-1]["content"])[1])


@pytest.mark.parametrize(
    ("reply", "verdict"),
    [
        ("<think>It may be false, or true.</think> true", "true"),
        ("It may be false.</think>\n\nFalse.", "false"),
        ("<think>a</think>It is<think>false?</think> <answer>TRUE</answer> as I said", "true"),
        ("true", "true"),
        ("</think>\n**Answer:** True.", "true"),
        ("</think> It is not true.", None),
        ("<think>It is true", None),
        ("</think> true or false", None),
        ("</think> untrue", None),
        ("", None),
    ],
)
def test_the_verdict_is_the_only_word_after_the_reasoning(reply, verdict):
    found = find_verdict(reply, WORDS)
    assert (found and found[0]) == verdict
    assert found is None or reply[found[1] :].casefold().startswith(verdict)


def test_without_log_probabilities_the_verdict_is_the_score():
    def model(messages):
        return f"Perhaps false.</think> {str(grade_in(messages) > 3).lower()}"

    run = candidates(documents=6)
    assert ReasonedPointwise(model)(run)["score"].tolist() == [1.0 if value > 3 else -1.0 for value in worth(run)]


def test_grades_are_read_after_the_reasoning_and_averaged_by_probability():
    run = candidates(documents=3)
    assert ReasonedPointwise(lambda _: "From 1 to 3...</think> 2", grades=4)(run)["score"].tolist() == [2.0] * 3
    likely = {"2": math.log(0.75), " 1": math.log(0.125), "x": math.log(0.125)}
    scores = ReasonedPointwise(lambda _: Reply("</think>2", logprobs=likely), grades=3)(run)["score"]
    assert scores.tolist() == pytest.approx([1.625] * 3)  # 0 counts as the least likely token, like 1


def test_a_reply_without_a_verdict_is_reported_and_can_be_put_last():
    def model(messages):
        return "<think>I cannot" if "document 2" in messages[-1]["content"] else "</think> true"

    with pytest.raises(UnreadableReplyError, match="no verdict in the reply"):
        ReasonedPointwise(model)(candidates(documents=4))
    with pytest.warns(IncompleteReplyWarning, match="1 of 4 documents have no verdict"):
        out = ReasonedPointwise(model, on_failure="last")(candidates(documents=4))
    assert order(out)[-1] == "d2"


@pytest.mark.parametrize("reply", ["</think> 2.5", "</think> -1", "</think> 1/3", "</think> 7"])
def test_other_numbers_are_no_grades(reply):
    assert find_verdict(reply, [str(grade) for grade in range(4)]) is None


@pytest.mark.parametrize(
    ("logprobs", "score"),
    [
        ({"ir": -0.01, "relevant": -4.0, "x": -20.0}, -1.0),  # the verdict has several tokens
        ({"irrelevant": -1.0, "relevant": -math.inf, "x": -3.0}, -2.0),
    ],
)
def test_log_probabilities_count_if_the_verdict_is_among_them(logprobs, score):
    model = ReasonedPointwise(
        lambda _: Reply("</think> irrelevant", logprobs=logprobs), words=("relevant", "irrelevant")
    )
    assert model(candidates(documents=1))["score"].tolist() == [score]


@pytest.mark.parametrize("words", [("true",), "ab", ("true", "not relevant"), ("true", "True")])
def test_words_are_two(words):
    with pytest.raises(ValueError, match="words="):
        ReasonedPointwise(len, words=words)
    with pytest.raises(ValueError, match="words="):
        ReasonedPointwise(len, words=("a", "b"), grades=3)


# Servers.


def reasoned(tokens, likely, finish_reason="stop"):
    """A response whose last token has these log-probabilities; those of others are of no use."""
    reply = completion("".join(tokens))
    reply["choices"][0]["finish_reason"] = finish_reason
    content = []
    for token in tokens:
        top = likely if token == tokens[-1] else {" false": -0.1, " true": -9.0}
        content.append(
            {
                "token": token,
                "logprob": -0.1,
                "bytes": None,
                "top_logprobs": [{"token": word, "logprob": value, "bytes": None} for word, value in top.items()],
            }
        )
    reply["choices"][0]["logprobs"] = {"content": content}
    return reply


def test_a_server_is_asked_for_the_log_probabilities_of_the_verdict():
    tokens = ["<think>", "It", " is", " false", ".", "</think>", "\n\n", "true"]
    with serving(Answer(reasoned(tokens, {"true": -0.5, " true": -2.5, "false": -1.5}))) as server:
        backend = OpenAIBackend("r", base_url=f"{server.url}/v1", parameters={"max_tokens": 99, "stop": ["\n\n\n"]})
        scores = ReasonedPointwise(backend, top_logprobs=5)(candidates(documents=1))["score"]
    assert scores.tolist() == pytest.approx([math.log(math.exp(-0.5) + math.exp(-2.5)) + 1.5])
    ((_, _, body),) = server.requests
    assert (body["max_tokens"], body["stop"], body["logprobs"], body["top_logprobs"]) == (99, ["\n\n\n"], True, 5)


def test_a_reply_cut_within_its_reasoning_has_no_verdict():
    cut = reasoned(["It", " seems", " true"], {" true": -0.5}, "length")
    with serving(Answer(cut)) as server, pytest.raises(UnreadableReplyError, match="max_tokens"):
        ReasonedPointwise(OpenAIBackend("r", base_url=f"{server.url}/v1"))(candidates(documents=1))


# Models in this process.


def test_a_local_model_gives_the_log_probabilities_at_its_verdict(tmp_path, monkeypatch):
    folder = tiny_long.decoder(tmp_path, "llama", max_position_embeddings=512)
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder).eval()
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }} {% endfor %}"
    tokenizer.save_pretrained(folder)
    words = ("dog", "cat")
    written = tokenizer("the cat </think> dog", add_special_tokens=False, return_tensors="pt")["input_ids"]
    assert "</think>" in tokenizer.decode(written[0])

    backend = HuggingFaceBackend(folder, parameters={"max_new_tokens": 50, "stop_strings": ["snow"]}, device="cpu")
    loaded, _ = backend._load()
    asked = {}

    def generate(input_ids, **options):
        asked.update(options)
        return torch.cat([input_ids, written], 1)

    monkeypatch.setattr(loaded, "generate", generate)
    client = LLMClient(backend, cache=tmp_path / "replies.sqlite")
    scorer = ReasonedPointwise(client, request="{query} {text}", words=words)
    score = scorer(candidates(documents=1))["score"].item()
    row = candidates(documents=1).iloc[0]
    prompt = tokenizer(f"{row['query']} {row['text']} ", add_special_tokens=False, return_tensors="pt")["input_ids"]
    with torch.inference_mode():
        logits = model(torch.cat([prompt, written[:, :-1]], 1)).logits[0, -1]
    texts = [tokenizer.decode([i]).strip() for i in range(len(logits))]
    dog, cat = (logits[[i for i, text in enumerate(texts) if text == word]].logsumexp(0) for word in words)
    assert score == pytest.approx((dog - cat).item(), abs=1e-4)
    assert (asked["max_new_tokens"], asked["stop_strings"]) == (50, ["snow"])
    assert asked["tokenizer"] is not None
    assert scorer(candidates(documents=1))["score"].item() == score
    assert (client.calls, client.cached) == (1, 1)


def test_a_pick_is_a_whole_answer_for_a_setwise_schedule(recwarn):
    def pick(messages):
        found = GRADE.findall(" ".join(m["content"] for m in messages))
        best = max(range(len(found)), key=lambda i: int(found[i]))
        return f"<think>[1] or [2]?</think> <answer>[{best + 1}]</answer>"

    run = candidates(documents=9)
    ranker = RankGPT(pick, schedule=SetwiseHeapsort(k=4))
    out = ranker(run)
    assert order(out)[:4] == run["docno"][worth(run).sort_values(ascending=False).index].tolist()[:4]
    assert ranker.counts["llm_missing"].tolist() == [0]
    assert not [w for w in recwarn if issubclass(w.category, IncompleteReplyWarning)]
