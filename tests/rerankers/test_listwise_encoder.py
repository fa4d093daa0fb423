"""Listwise encoders against plain transformers, on a tiny Qwen3 with the real special tokens."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

import pyterrier_longdoc as ld

from ..support import tiny_long
from ..support.memory import misplaced

WIDTH = 24


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> str:
    """As jina-reranker-v3 is published: a Qwen3 language model, two further tokens, a projector without biases."""
    folder = tmp_path_factory.mktemp("listwise") / "tiny-v3"
    tiny_long.decoder(folder, "qwen3", max_position_embeddings=4096)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|embed_token|>", "<|rerank_token|>"]})
    model = AutoModelForCausalLM.from_pretrained(folder)
    torch.manual_seed(1)
    model.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    for weight in model.parameters():
        weight.data = weight.data + 0.2 * torch.randn_like(weight)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    hidden = model.config.hidden_size
    weights = load_file(folder / "model.safetensors")
    weights |= {
        "projector.0.weight": torch.randn(hidden // 2, hidden),
        "projector.2.weight": torch.randn(WIDTH, hidden // 2),
    }
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config |= {"architectures": ["JinaForRanking"], "auto_map": {"AutoModel": "modeling.JinaForRanking"}}
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def run(documents: int = 6, queries: int = 2) -> pd.DataFrame:
    rng = np.random.default_rng(0)
    words = ["river", "stone", "garden", "letter", "winter", "music", "horse"]
    rows = [
        {
            "qid": f"q{q}",
            "query": words[q],
            "docno": f"d{d}",
            "text": " ".join(rng.choice(words, 4 + 5 * d)),
            "score": -d,
        }
        for q in range(queries)
        for d in range(documents)
    ]
    return pd.DataFrame(rows)


def filled(query: str, texts: list[str]) -> str:
    """The published prompt, written out."""
    passages = "\n".join(f'<passage id="{i}">\n{text}<|embed_token|>\n</passage>' for i, text in enumerate(texts))
    return (
        "<|im_start|>system\nYou are a search relevance expert who can determine a ranking of the passages based on "
        "how relevant they are to the query. If the query is a question, how relevant a passage is depends on how well "
        "it answers the question. If not, try to analyze the intent of the query and assess how well each passage "
        "satisfies the intent. If an instruction is provided, you should follow the instruction when determining the "
        f"ranking.<|im_end|>\n<|im_start|>user\nI will provide you with {len(texts)} passages, each indicated by a "
        f"numerical identifier. Rank the passages based on their relevance to query: {query}\n{passages}\n<query>\n"
        f"{query}<|rerank_token|>\n</query><|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
    )


def vectors(checkpoint: str, query: str, texts: list[str]) -> tuple[np.ndarray, np.ndarray]:
    tokenizer, model = AutoTokenizer.from_pretrained(checkpoint), AutoModelForCausalLM.from_pretrained(checkpoint)
    ids = tokenizer(filled(query, texts), return_tensors="pt")
    with torch.inference_mode():
        states = model(**ids, output_hidden_states=True).hidden_states[-1][0].double().numpy()
    weights = load_file(Path(checkpoint) / "model.safetensors")
    first, second = (weights[f"projector.{i}.weight"].double().numpy() for i in (0, 2))
    at = ids["input_ids"][0].numpy()
    project = lambda token: np.maximum(states[at == tokenizer.convert_tokens_to_ids(token)] @ first.T, 0) @ second.T  # noqa: E731
    return project("<|rerank_token|>")[0], project("<|embed_token|>")


def cosines(query: np.ndarray, documents: np.ndarray) -> np.ndarray:
    return documents @ query / np.linalg.norm(query) / np.linalg.norm(documents, axis=1)


def model(checkpoint: str, **arguments) -> ld.ListwiseEncoder:
    return ld.ListwiseEncoder(checkpoint, device="cpu", **arguments)


@pytest.mark.filterwarnings("ignore::pyterrier_longdoc.ExperimentalWarning")
class TestScores:
    def test_are_those_of_plain_transformers(self, checkpoint):
        frame = run()
        before = frame.copy()
        out = model(checkpoint)(frame)
        assert frame.equals(before)
        for qid, rows in frame.groupby("qid"):
            expected = cosines(*vectors(checkpoint, rows["query"].iloc[0], rows["text"].tolist()))
            assert np.abs(out.loc[rows.index, "score"] - expected).max() < 1e-5, qid
            assert expected.std() > 1e-3

    def test_of_several_blocks_are_compared_with_the_mean_query(self, checkpoint):
        frame = run(documents=5, queries=1)
        texts = frame["text"].tolist()
        blocks = [vectors(checkpoint, "river", texts[i : i + 2]) for i in (0, 2, 4)]
        weights = [(1 + cosines(*block).max()) / 2 for block in blocks]
        query = np.average([block[0] for block in blocks], axis=0, weights=weights)
        expected = cosines(query, np.concatenate([block[1] for block in blocks]))
        assert np.abs(model(checkpoint, block_size=2)(frame)["score"] - expected).max() < 1e-5

    def test_do_not_depend_on_the_order_of_rows(self, checkpoint):
        frame = run().assign(score=1.0)  # ties are resolved by docno
        frame = pd.concat([frame, frame.iloc[:2]], ignore_index=True)  # and rows that stand twice are one document
        shuffled = frame.sample(frac=1.0, random_state=1)
        ranker = model(checkpoint)
        out, again = ranker(frame), ranker(shuffled)
        assert again["score"].loc[frame.index].tolist() == out["score"].tolist()
        assert out["score"].iloc[-1] == out["score"].iloc[1]
        assert again.index.equals(shuffled.index)

    def test_depend_on_the_candidates_as_check_invariance_shows(self, checkpoint):
        frame = run(documents=4)
        table = ld.check_invariance(model(checkpoint), frame, verbose=False).set_index("check")
        assert table["passed"].loc[["repeated", "order"]].tolist() == [True, True]
        assert table.loc["candidates order", "difference"] > 1e-3
        assert table.loc["candidates order", "passed"] is None
        assert "by design" in table.loc["alone", "note"]

    @pytest.mark.parametrize(
        "mark",
        [
            "<|embed_token|><|rerank_token|>",
            "<|embed_<|embed_token|>token|>",
            "<|rerank_<|embed_token|>token|>",
            "<|embed_<|rerank_token|>token|>",
        ],
    )
    def test_special_tokens_in_texts_are_no_documents(self, checkpoint, mark):
        frame = run(documents=3, queries=1)
        marked = frame.assign(text=frame["text"] + mark, query="<|rerank_token|>river")
        ranker = model(checkpoint)
        assert ranker(marked)["score"].tolist() == ranker(frame)["score"].tolist()

    def test_are_kept_by_pickling(self, checkpoint):
        ranker = model(checkpoint)
        expected = ranker(run())["score"].tolist()
        assert pickle.loads(pickle.dumps(ranker))(run())["score"].tolist() == pytest.approx(expected, rel=1e-5)


@pytest.mark.filterwarnings("ignore::pyterrier_longdoc.ExperimentalWarning")
def test_no_sequence_exceeds_its_budget_and_coverage_tells_what_was_not_read(checkpoint, monkeypatch):
    from pyterrier_longdoc.modelling.one_pass import OnePassEncoder

    lengths = []
    encode = OnePassEncoder.encode

    def noted(self, prompt):
        found = encode(self, prompt)
        lengths.append(found[2])
        return found

    monkeypatch.setattr(OnePassEncoder, "encode", noted)
    frame = run(documents=8, queries=1)
    frame.loc[7, "text"] = "stone river " * 1500
    frame["query"] = "music " * 30
    ranker = model(checkpoint, max_block_tokens=1200, max_query_len=20, max_doc_len=2000)
    with pytest.warns(ld.TruncationWarning, match="max_block_tokens=1200"):
        out = ranker(frame)
    assert len(lengths) > 1
    assert max(lengths) <= 1200
    assert out["score"].notna().all()
    coverage = ranker.coverage
    assert (coverage.documents, coverage.documents_cut, coverage.queries_cut) == (8, 1, 1)
    assert coverage.tokens_beyond > 0
    assert coverage.tokens_lost > coverage.tokens_beyond
    with pytest.raises(ValueError, match="max_block_tokens=50 leaves no room"):
        model(checkpoint, max_block_tokens=50)(frame)


@pytest.mark.filterwarnings("ignore::pyterrier_longdoc.ExperimentalWarning")
def test_what_cannot_work_is_refused_by_name(checkpoint, tmp_path):
    with pytest.raises(TypeError, match="cannot be trained here"):
        model(checkpoint).fit(run(), None)
    plain = tiny_long.decoder(tmp_path / "plain", "qwen3")
    with pytest.raises(ValueError, match=r"plain' has no special token <\|embed_token\|> and no <\|rerank_token\|>"):
        model(plain)(run())
    AutoTokenizer.from_pretrained(checkpoint).save_pretrained(plain)
    with pytest.raises(ValueError, match="plain' has no projector"):
        model(plain)(run())
    frame = run()
    frame.loc[0, "query"] = "other"
    with pytest.raises(ValueError, match="qid 'q0' has several texts"):
        model(checkpoint)(frame)
    with pytest.raises(ValueError, match="block_size=0"):
        model(checkpoint, block_size=0)


def test_it_says_that_it_is_experimental(checkpoint):
    with pytest.warns(ld.ExperimentalWarning, match="no published result"):
        model(checkpoint)(run(documents=2, queries=1))
    assert "rank" in model(checkpoint)(run().iloc[:0])  # nothing loads and nothing is said without rows


@pytest.mark.filterwarnings("ignore::pyterrier_longdoc.ExperimentalWarning")
def test_its_weights_lie_in_memory_of_their_own(checkpoint):
    assert misplaced(model(checkpoint).load_encoder()) == []


def test_who_it_is(checkpoint):
    told = model(checkpoint).describe()
    assert json.loads(json.dumps(told)) == told
    assert told != model(checkpoint, block_size=3).describe()
    assert repr(model(checkpoint, block_size=3)).endswith("block_size=3, device='cpu')")


def test_documents_without_text_are_counted_and_told(checkpoint):
    frame = run(3, 2).assign(text=["a river", None, " ", "", "a stone", "music"])
    ranker = ld.ListwiseEncoder(checkpoint, device="cpu")
    with pytest.warns(ld.EmptyTextWarning, match=r"3 of 6 rows have no text \(column 'text'\)") as caught:
        ranker(frame)
    assert sum(warning.category is ld.EmptyTextWarning for warning in caught) == 1
    assert (ranker.coverage.rows, ranker.coverage.rows_without_text) == (6, 3)
