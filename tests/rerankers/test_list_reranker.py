"""ListReranker: the published scores, what a list is, how much is read, and training."""

from __future__ import annotations

import pickle
import unittest
import warnings
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd
import pyterrier as pt
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModel, AutoTokenizer

import pyterrier_longdoc as ld
from pyterrier_longdoc.modelling.list_encoder import ListReader, without_markers
from pyterrier_longdoc.rerankers.cross_encoder import UntrainedWarning
from pyterrier_longdoc.training import TrainingArgs

from ..support import tiny, tiny_long
from ..support.systems import QUIET, reloaded, scores, told_of
from ..support.toy import toy_task

pytestmark = QUIET

SMALL = {"max_doc_len": 64, "max_query_len": 8, "device": "cpu"}
LONGER = tiny.longer_results()
SYSTEM = (
    "You are a search relevance expert who can determine a ranking of the passages based on how relevant they are to "
    "the query. If the query is a question, how relevant a passage is depends on how well it answers the question. If "
    "not, try to analyze the intent of the query and assess how well each passage satisfies the intent. If an "
    "instruction is provided, you should follow the instruction when determining the ranking."
)


@pytest.fixture(scope="module")
def jina(tmp_path_factory) -> str:
    """Folder of a random checkpoint of jina-reranker-v3's kind."""
    return tiny_long.list_encoder(tmp_path_factory.mktemp("jina"))


@pytest.fixture(scope="module")
def plain_decoder(tmp_path_factory) -> str:
    """Folder of a random language model, which has neither markers nor a projection."""
    return tiny_long.decoder(tmp_path_factory.mktemp("qwen3"), max_position_embeddings=2048)


def published(
    folder: str,
    query: str,
    texts: list[str],
    *,
    instruction: str = "",
    block: int = 125,
    longest: int = 64,
    sizes: Sequence[int] = (),
) -> tuple[np.ndarray, list[int]]:
    """Scores of the computation in the checkpoint's `modeling.py`, and the number of documents of each context.

    With `sizes`, contexts have these numbers of documents instead of those of its rule.
    """
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModel.from_pretrained(folder).eval()
    weights = load_file(Path(folder, "model.safetensors"))
    first, second = (weights[f"projector.{place}.weight"] for place in (0, 2))

    def beginning(text: str, limit: int) -> tuple[str, int]:
        ids = tokenizer(text)["input_ids"][:limit]
        return (tokenizer.decode(ids) if len(ids) >= limit else text), len(ids)

    def vectors(texts: list[str]) -> torch.Tensor:
        documents = [
            f'<passage id="{number}">\n{text}<|embed_token|>\n</passage>\n' for number, text in enumerate(texts)
        ]
        prompt = (
            f"<|im_start|>system\n{SYSTEM}<|im_end|>\n<|im_start|>user\nI will provide you with {len(texts)} passages, "
            f"each indicated by a numerical identifier. Rank the passages based on their relevance to query: {query}\n"
            + (f"<instruct>\n{instruction}\n</instruct>\n" if instruction else "")
            + "".join(documents)
            + f"<query>\n{query}<|rerank_token|>\n</query><|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
        )
        ids = torch.tensor([tokenizer(prompt)["input_ids"]])
        markers = torch.tensor(tokenizer.convert_tokens_to_ids(["<|embed_token|>", "<|rerank_token|>"]))
        with torch.no_grad():
            states = model(input_ids=ids).last_hidden_state[torch.isin(ids, markers)]
        return torch.relu(states @ first.T) @ second.T

    query, query_tokens = beginning(query, 8)
    context = model.config.max_position_embeddings - 2 * query_tokens
    contexts: list[list[str]] = [[]]
    left = context
    for text, tokens in (beginning(text, longest) for text in texts):
        contexts[-1].append(text)
        left -= tokens
        full = len(contexts[-1]) == sizes[len(contexts) - 1] if sizes else len(contexts[-1]) == block or left <= longest
        if full:
            contexts.append([])
            left = context
    contexts = [each for each in contexts if each]
    found = [vectors(each) for each in contexts]
    best = torch.stack([(1 + torch.cosine_similarity(each[:-1], each[-1:], dim=1)).max() / 2 for each in found])
    mean = (best[:, None] * torch.stack([each[-1] for each in found])).sum(0) / best.sum()
    documents = torch.cat([each[:-1] for each in found])
    return torch.cosine_similarity(documents, mean[None], dim=1).numpy(), [len(each) for each in contexts]


def texts_of(number: int, words: int) -> list[str]:
    """Texts with line breaks and spaces, of up to so many words."""
    return [
        " ".join(
            tiny.WORDS[(7 * word + 3 * i) % len(tiny.WORDS)] + ("\n" if word % 9 == 5 else "")
            for word in range(words * (i + 1) // number)
        )
        for i in range(number)
    ]


def ranked(query: str, texts: list[str]) -> pd.DataFrame:
    """Candidates in the order of their texts."""
    frame = pd.DataFrame({"qid": "1", "query": query, "docno": [f"d{i}" for i in range(len(texts))], "text": texts})
    return frame.assign(score=-np.arange(len(texts), dtype=float), rank=range(len(texts)))


# The published scores.


@pytest.mark.parametrize(
    ("query", "instruction"),
    [("old dog", "Prefer long documents."), ("snow in the city and wind by the long river", "")],
)
@pytest.mark.parametrize(
    ("number", "words", "context", "block", "longest", "contexts"),
    [
        (5, 30, 2048, 125, 64, [5]),
        (6, 200, 2048, 125, 64, [6]),  # long documents
        (7, 40, 2048, 3, 64, [3, 3, 1]),
        (17, 160, 2400, 125, 1200, [15, 2]),  # the context is full
    ],
)
def test_scores_are_those_of_the_published_code(
    query, instruction, number, words, context, block, longest, contexts, tmp_path
):
    folder, texts = tiny_long.list_encoder(tmp_path, max_position_embeddings=context), texts_of(number, words)
    expected, sizes = published(folder, query, texts, instruction=instruction, block=block, longest=longest)
    assert sizes == contexts
    model = ld.ListReranker(folder, instruction=instruction, block_size=block, **{**SMALL, "max_doc_len": longest})
    found = scores(model, ranked(query, texts))
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5)
    assert np.ptp(expected) > 0.01
    assert model.model.origin == "checkpoint"


def test_each_query_has_the_instruction_of_its_rows(jina):
    texts = [f"{word} the old dog" for word in ("snow", "cat", "tree")]
    rows = [
        {"qid": qid, "query": "cat snow", "docno": f"d{number}", "text": text, "wish": wish}
        for qid, wish in (("1", "Prefer cats."), ("2", ""), ("3", "Prefer trees."))
        for number, text in enumerate(texts)
    ]
    model = ld.ListReranker(jina, instruction="Prefer dogs.", instruction_field="wish", **SMALL)
    scores = model(pd.DataFrame(rows))["score"].to_numpy().reshape(3, -1)
    for found, wish in zip(scores, ("Prefer cats.", "Prefer dogs.", "Prefer trees."), strict=True):
        expected, _ = published(jina, "cat snow", texts, instruction=wish)
        np.testing.assert_allclose(found, expected, atol=1e-5)


def test_titles_stand_before_documents(jina):
    frame = ranked("old dog", texts_of(4, 40)).assign(title=["a red fish", "", "the old tree", "rain"])
    lines = [f"{title}\n{text}" if title else text for title, text in zip(frame["title"], frame["text"], strict=True)]
    model = ld.ListReranker(jina, text_field=("title", "text"), repeat="title", **SMALL)
    np.testing.assert_allclose(scores(model, frame), published(jina, "old dog", lines)[0], rtol=0, atol=1e-5)


@pytest.mark.parametrize("text", ["a <|embed_token|>cat", "a <|rerank_<|embed_token|>token|>cat"])
def test_markers_in_texts_and_queries_are_not_read(text, jina):
    assert without_markers(text) == "a cat"
    model = ld.ListReranker(jina, **{**SMALL, "max_query_len": 32})
    expected = scores(model, ranked("a cat", ["a cat", "old dog"]))
    np.testing.assert_allclose(scores(model, ranked(text, [text, "old dog"])), expected, atol=1e-6)


@pytest.fixture
def read(monkeypatch) -> list[tuple[int, int]]:
    """The number of documents and of tokens of each context that is read."""
    inputs, read_contexts = list[tuple[int, int]](), ListReader.contexts

    def contexts(reader, pairs):
        for context in read_contexts(reader, pairs):
            inputs.append((int((context.ids == reader.markers[0]).sum()), len(context)))
            yield context

    monkeypatch.setattr(ListReader, "contexts", contexts)
    return inputs


@pytest.mark.parametrize("instruction", ["", "Prefer long documents. " * 20])
def test_contexts_end_earlier_where_the_published_ones_exceed_the_longest_input(instruction, read, tmp_path):
    texts = [f"a dog {number} b" for number in range(60)]
    folder = tiny_long.list_encoder(tmp_path, max_position_embeddings=1500)
    assert published(folder, "old dog", texts, instruction=instruction)[1] == [60]
    model = ld.ListReranker(folder, instruction=instruction, **SMALL)
    found = scores(model, ranked("old dog", texts))
    numbers, tokens = zip(*read, strict=True)
    assert sum(numbers) == len(texts)
    assert max(tokens) <= 1500
    with_one_more = model.model.reader.ids("old dog", texts[: numbers[0] + 1], instruction)
    assert len(with_one_more) > 1500
    expected, _ = published(folder, "old dog", texts, instruction=instruction, sizes=numbers)
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5)


def test_a_document_that_does_not_fit_with_its_instruction_is_an_error(tmp_path):
    folder = tiny_long.list_encoder(tmp_path, max_position_embeddings=1000)
    frame = ranked("old dog", texts_of(4, 40)).assign(wish="Prefer long documents. " * 50)
    message = r"max_doc_len.*max_query_len.*instruction"
    with pytest.raises(ValueError, match=message):
        ld.ListReranker(folder, instruction_field="wish", **SMALL)(frame)
    with pytest.raises(ValueError, match=message):
        ld.ListReranker(folder, instruction=frame["wish"][0], **SMALL)(frame)


# Lists.


def test_scores_depend_on_the_list_but_not_on_the_rows_or_other_queries(jina):
    model = ld.ListReranker(jina, **SMALL)
    expected = model(LONGER)
    assert expected.columns.tolist() == [*LONGER.columns.drop(["score", "rank"]), "score", "rank"]
    order = np.random.default_rng(0).permutation(len(LONGER))
    mixed = model(LONGER.iloc[order])
    pd.testing.assert_frame_equal(mixed.loc[expected.index], expected, atol=1e-6)
    alone = pd.concat([model(rows) for _, rows in LONGER.groupby("qid")]).loc[expected.index]
    pd.testing.assert_frame_equal(alone, expected, atol=1e-6)
    model.batch_size = 1
    np.testing.assert_allclose(scores(model, LONGER), expected["score"], atol=1e-6)
    other_order = scores(model, LONGER.assign(score=-LONGER["score"], rank=0))
    fewer = scores(model, LONGER[LONGER["rank"] < 2])
    assert np.abs(other_order - expected["score"]).max() > 0.01
    assert np.abs(fewer - expected.loc[LONGER["rank"] < 2, "score"]).max() > 0.01


def test_ties_and_missing_scores_are_ordered_by_docno(jina):
    model, frame = ld.ListReranker(jina, **SMALL), LONGER[LONGER["qid"] == "q1"]
    expected = scores(model, frame)  # whose docnos ascend with the ranks
    for other in (frame.drop(columns=["score", "rank"]), frame.assign(score=1.0, rank=0)):
        np.testing.assert_array_equal(scores(model, other.iloc[::-1])[::-1], expected)


def test_queries_with_equal_words_have_their_own_lists(jina):
    model = ld.ListReranker(jina, **SMALL)
    one = LONGER[LONGER["qid"] == "q1"]
    other = one.iloc[:2].assign(qid="other")
    expected = [*scores(model, one), *scores(model, other)]
    np.testing.assert_allclose(scores(model, pd.concat([one, other])), expected, atol=1e-6)


def test_equal_texts_of_a_query_are_one_document(jina):
    model, texts = ld.ListReranker(jina, **SMALL), texts_of(3, 20)
    found = scores(model, ranked("old dog", [*texts, texts[0]]))
    np.testing.assert_array_equal(found, [*(expected := scores(model, ranked("old dog", texts))), expected[0]])


def test_plain_texts_are_ranked_in_their_order(jina):
    texts = texts_of(12, 30)
    found = ld.ListReranker(jina, **SMALL).rank("old dog", texts).sort_values("number")
    expected = scores(ld.ListReranker(jina, **SMALL), ranked("old dog", texts))
    np.testing.assert_array_equal(found["score"], expected)


def test_a_query_that_is_cut_apart_is_warned_of(jina):
    model = ld.ListReranker(jina, **SMALL)
    first, second = LONGER[LONGER["rank"] < 2], LONGER[LONGER["rank"] >= 2]
    assert not any("in one frame" in message for message in told_of(UserWarning, lambda: model(first)))
    assert any("in one frame" in message for message in told_of(UserWarning, lambda: model(second)))


def test_a_qid_has_one_query(jina):
    with pytest.raises(ValueError, match=r"qid 'q\d'.*'query'"):
        ld.ListReranker(jina, **SMALL)(LONGER.assign(query=[f"cat {i}" for i in range(len(LONGER))]).tail(6))


@pytest.mark.parametrize("other", ["Prefer trees.", "", np.nan])
def test_a_qid_has_one_instruction(other, jina):
    frame = ranked("cat", texts_of(3, 9)).assign(wish=["Prefer cats.", other, "Prefer cats."])
    model = ld.ListReranker(jina, instruction_field="wish", **SMALL)
    for use in (model, model.summary):
        with pytest.raises(ValueError, match=r"'1'.*'wish'"):
            use(frame)


# What is read.


def test_long_documents_are_read_from_their_beginning_and_reported(jina):
    model = ld.ListReranker(jina, **SMALL)
    with pytest.warns(ld.TruncationWarning, match="max_doc_len=64"):
        model(LONGER)
    coverage = model.coverage
    assert coverage.tokens - coverage.tokens_read == coverage.truncated["max_doc_len=64"] > 0
    assert model.summary(LONGER) == coverage
    long = LONGER[(LONGER["qid"] == "q0") & (LONGER["docno"] == "d3")]
    tail = long.assign(text=long["text"] + " bird")
    np.testing.assert_array_equal(scores(model, tail), scores(model, long))


def test_selected_windows_are_joined_with_marks(jina):
    filler = "the long river and the old tree in the rain. " * 4
    text = f"{filler}a bird sings. {filler}the bird writes. {filler}".strip()
    selection = {"preselect": ld.BM25Windows(2), "windows": ld.SentenceWindows(max_sentences=1, max_tokens=30)}
    model = ld.ListReranker(jina, **selection, **SMALL)
    with warnings.catch_warnings():
        warnings.simplefilter("error", ld.TruncationWarning)
        found = scores(model, ranked("bird", [text, "a dog"]))
    expected = "[...] a bird sings. [...] the bird writes. [...]"
    np.testing.assert_allclose(found, published(jina, "bird", [expected, "a dog"])[0], rtol=0, atol=1e-5)
    assert list(model.coverage.truncated) == [f"preselect={selection['preselect']!r}"]
    assert model.coverage.windows == 3


def test_wrong_arguments_are_refused():
    for arguments, word in [
        ({"preselect": ld.BM25Windows(3), "max_doc_len": 100}, "max_doc_len=100"),
        ({"windows": ld.Truncate(5)}, "windows"),
        ({"windows": ld.SlidingWords(5, 5)}, "windows"),
        ({"max_windows": 2}, "max_windows"),
        ({"selection": "first_last_random"}, "selection"),
        ({"training": TrainingArgs(sampling="pointwise", loss="pointwise_bce")}, "pointwise"),
    ]:
        with pytest.raises(ValueError, match=word):
            ld.ListReranker("any/model", **arguments)


def test_checkpoints_that_do_not_fit_are_refused(jina, plain_encoder, results, tmp_path):
    without_mask = tiny_long.decoder(tmp_path, "llama", is_causal=False)
    for other in (plain_encoder, without_mask):
        with pytest.raises(ValueError, match="left to right"):
            ld.ListReranker(other, **SMALL)(results)
    with pytest.raises(ValueError, match="max_doc_len=2048"):
        ld.ListReranker(jina)(results)


# Training, and copies.


def test_a_language_model_learns_from_lists(plain_decoder, tmp_path):
    words = ("bird", "dog", "fish", "tree")
    run = pd.concat(
        [ranked(word, [" ".join([each] * 8) for each in words]).assign(qid=word) for word in ("sun", "cat")]
    )
    qrels = pd.DataFrame({"qid": ["sun", "cat"], "docno": "d0", "label": 1})
    recipe = TrainingArgs(
        epochs=20, loss="listwise_cross_entropy", sampling="listwise", negatives=3, queries_per_step=2,
        learning_rates={"": 1e-3},
    )  # fmt: skip
    model = ld.ListReranker(plain_decoder, training=recipe, **SMALL)
    with pytest.warns(UntrainedWarning, match="randomly initialized"):
        model(run)
    before = {name: weight.clone() for name, weight in model.model.named_parameters()}
    model.fit(run, qrels)
    losses = model.history["loss"]
    assert losses.tail(4).mean() < 0.5 * losses.iloc[0]
    assert all(not torch.equal(weight, before[name]) for name, weight in model.model.named_parameters())
    assert told_of(UntrainedWarning, lambda: model(run)) == []
    expected = scores(model, run)
    for copy in (reloaded(model, tmp_path / "saved"), pickle.loads(pickle.dumps(model))):
        np.testing.assert_allclose(scores(copy, run), expected, atol=1e-6)
    started = ld.ListReranker(plain_decoder, seed=1, **SMALL).start_from(model)
    np.testing.assert_allclose(scores(started, run), expected, atol=1e-6)


def test_weights_of_a_checkpoint_are_trained_and_saved(jina, tmp_path):
    run, qrels = toy_task(1)
    model = ld.ListReranker(jina, **SMALL)
    before = scores(model, run)
    key = pt.inspect.transformer_apply_attributes(model).describe()
    assert key == model.describe() != ld.ListReranker(jina, instruction="Short.", **SMALL).describe()
    model.fit(run, qrels)
    assert np.abs(scores(model, run) - before).max() > 1e-4
    copy = reloaded(model, tmp_path / "saved")
    np.testing.assert_allclose(scores(copy, run), scores(model, run), atol=1e-6)
    assert "CC BY-NC" in (ld.ListReranker.__doc__ or "")
    assert "2509.25085" in model.citation()


def test_training_reads_lists_in_random_order(jina):
    model, texts = ld.ListReranker(jina, temperature=0.5, **SMALL), ["a short dog", "the old tree by the river"]
    orders = {
        (tuple(pair[::step]), step): scores(model, ranked("old dog", pair))[::step] / 0.5
        for pair, step in ((texts, 1), (texts[::-1], -1))
    }
    network = model.model.train()
    seen = set()
    for seed in range(10):
        torch.manual_seed(seed)
        found = network(["old dog"] * 2, texts).detach().numpy()
        near = [step for (_, step), expected in orders.items() if np.allclose(found, expected, atol=1e-5)]
        seen |= set(near)
        assert near
    assert seen == {1, -1}


def test_several_lists_are_trained_in_one_pass(jina):
    network = ld.ListReranker(jina, temperature=1.0, **SMALL).model
    texts = texts_of(5, 30)
    both = network(["old dog"] * 3 + ["cat"] * 2, texts)
    parts = torch.cat([network(["old dog"] * 3, texts[:3]), network(["cat"] * 2, texts[3:])])
    torch.testing.assert_close(both, parts, atol=1e-6, rtol=0)
    assert both.requires_grad


@pytest.mark.parametrize(
    ("sampling", "loss", "negatives"), [("listwise", "listwise_cross_entropy", 2), ("pairs", "ranknet", 1)]
)
def test_lists_of_equal_words_are_trained_apart(sampling, loss, negatives, jina, read):
    texts = texts_of(4, 30)
    run = pd.concat([ranked("old dog", texts).assign(qid=qid) for qid in ("1", "2")], ignore_index=True)
    qrels = pd.DataFrame({"qid": ["1", "2"], "docno": ["d0", "d1"], "label": 1})
    recipe = TrainingArgs(
        epochs=1, loss=loss, sampling=sampling, negatives=negatives, queries_per_step=2, queries_per_forward=2
    )
    ld.ListReranker(jina, training=recipe, **SMALL).fit(run, qrels)
    assert [number for number, _ in read] == [negatives + 1] * 2


# PyTerrier.


def test_the_test_case_of_pyterrier_passes(jina):
    case = pt.testing.transformer_test_class(lambda: ld.ListReranker(jina, **SMALL))
    outcome = unittest.TestResult()
    unittest.defaultTestLoader.loadTestsFromTestCase(case).run(outcome)
    assert outcome.testsRun == 2
    assert not outcome.failures + outcome.errors


def test_cutoffs_before_and_after_keep_lists_whole(jina):
    model, topics = ld.ListReranker(jina, **SMALL), LONGER[["qid", "query"]].drop_duplicates()
    first_stage = pt.Transformer.from_df(LONGER)
    whole = model(LONGER)
    after = (first_stage >> model % 2)(topics).set_index(["qid", "docno"])["score"]
    expected = whole[whole["rank"] < 2].set_index(["qid", "docno"])["score"]
    pd.testing.assert_series_equal(after.sort_index(), expected.sort_index(), atol=1e-6)
    before = (first_stage % 2 >> model)(topics)
    np.testing.assert_allclose(
        before.sort_values(["qid", "docno"])["score"],
        model(LONGER[LONGER["rank"] < 2]).sort_values(["qid", "docno"])["score"],
        atol=1e-6,
    )
    assert model(LONGER.iloc[:0]).columns.tolist() == whole.columns.tolist()
