"""TKL: local contextualisation, regions with saturated kernels, and the best of them, each once more by hand."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import AutoModel

import pyterrier_longdoc as ld
from pyterrier_longdoc.modelling.heads import build_head
from pyterrier_longdoc.modelling.inputs import Encoded, Matches, QueryStates
from pyterrier_longdoc.modelling.tkl import FIRST_POSITION, sinusoids
from pyterrier_longdoc.modelling.windows import GreedyChunks
from pyterrier_longdoc.modelling.word_vectors import load_word_backbone, read_vectors

from ..support import tiny
from ..support.arithmetic import array
from ..support.systems import QUIET

pytestmark = QUIET

H = 12
MEANS = np.array([1.0, 0.9, 0.7, 0.5, 0.3, 0.1, -0.1, -0.3, -0.5, -0.7, -0.9])
SENTENCE = "the cat and the dog walk to the river in the rain and find a red fish by old tree "


def make(seed=0, **options):
    """A head with random weights."""
    torch.manual_seed(seed)
    head = build_head("tkl", H, **{"region_size": 6, "region_stride": 2, **options}).eval()
    with torch.no_grad():
        for name, parameter in head.named_parameters():
            if name == "saturation.bias":
                parameter.copy_(torch.tensor([3.0, 2.5, 1.0]))
            else:
                parameter.add_(torch.randn_like(parameter) * 0.3)
    return head


def matched(values, states):
    """Documents with these `(Q, D)` cosines, padded, each with the states `(Q, H)` of its query."""
    queries, longest = (max(each.shape[axis] for each in values) for axis in (0, 1))
    dense, query = torch.zeros(len(values), 1, queries, longest), torch.zeros(len(values), queries, H)
    query_mask, mask = (torch.zeros(len(values), size, dtype=torch.bool) for size in (queries, longest))
    for i, (own, state) in enumerate(zip(values, states, strict=True)):
        dense[i, 0, : own.shape[0], : own.shape[1]] = torch.tensor(own)
        query[i, : len(state)] = torch.tensor(state)
        query_mask[i, : own.shape[0]], mask[i, : own.shape[1]] = True, True
    real = torch.ones(len(values), 1, dtype=torch.bool)
    matches = Matches(dense, query_mask, mask, torch.where(mask, 0, -1))
    return Encoded(torch.zeros(len(values), 1, 0), real, matches, QueryStates(query, query_mask))


def region_scores(head, values, states):
    """Regions one by one, from the first token until one ends with the last."""
    scores, start = [], 0
    while True:
        part = values[:, start : start + head.size]
        total = 0.0
        for row, state in zip(part, states, strict=True):
            features = np.array([array(head.salience.weight)[0] @ state, part.shape[1]])
            normed = (features - features.mean()) / np.sqrt(features.var() + 1e-5)
            normed = normed * array(head.norm.weight) + array(head.norm.bias)
            a, b, c = array(head.saturation.weight) @ normed + array(head.saturation.bias)
            count = np.exp(-((row[:, None] - MEANS) ** 2) / (2 * 0.1**2)).sum(0).clip(1e-10)
            total += array(head.final.weight)[0] @ (a * count ** (1 / b) - c)
        scores.append(total)
        if start + head.size >= values.shape[1]:
            return np.array(scores)
        start += head.stride


def by_hand(head, values, states):
    """The best regions beside each other, with their neighbours."""
    scores = region_scores(head, values, states)
    left, total = list(range(len(scores))), 0.0
    for weights in array(head.region_weights):
        if not left:
            break
        best = max(left, key=lambda r: (round(scores[r], 4), -r))
        for weight, offset in zip(weights, (0, -1, 1, -2, 2), strict=True):
            total += weight * scores[min(max(best + offset, 0), len(scores) - 1)]
        left = [r for r in left if abs(r - best) * head.stride >= head.size]
    return total


LENGTHS = (0, 1, 5, 6, 7, 8, 17, 40, 61)


@pytest.fixture(scope="module")
def documents():
    rng = np.random.default_rng(0)
    values = [rng.uniform(-1, 1, (1 + i % 4, length)).astype("float32") for i, length in enumerate(LENGTHS)]
    return values, [rng.normal(size=(len(own), H)).astype("float32") for own in values]


@pytest.mark.parametrize("options", [{}, {"region_stride": 3, "best_regions": 1}, {"best_regions": 5}], ids=str)
def test_scores_equal_those_computed_by_hand_in_any_batch(documents, options):
    head = make(**options)
    expected = [by_hand(head, *each) for each in zip(*documents, strict=True)]
    assert head(matched(*documents)).tolist() == pytest.approx(expected, rel=1e-4, abs=1e-4)
    alone = [head(matched([own], [state])).item() for own, state in zip(*documents, strict=True)]
    assert alone == pytest.approx(expected, rel=1e-4, abs=1e-4)


def tkl(**arguments):
    return ld.TKL(tiny.encoder(), **{"max_query_len": 8, "region_size": 8, "device": "cpu", **arguments})


@pytest.mark.parametrize(("size", "overlap"), [(7, 3), (5, 8), (4, 0), (100, 5)])
def test_tokens_see_their_window_and_its_neighbours(size, overlap):
    scorer = tkl(window_size=size, overlap=overlap).model.eval()
    encoder = scorer.encoder
    torch.nn.init.constant_(encoder.mixture, 0.3)

    def contextualised(words, position):
        context = encoder.transformer((words + sinusoids(position, 32)).unsqueeze(0))[0]
        return 0.3 * words + 0.7 * context

    with torch.inference_mode():
        [read] = scorer.read(["red fish"], [SENTENCE * 2])
        encoded = scorer.encode([read])
        ids = torch.tensor(read.text.ids.astype("int64"))
        states = []
        for start in range(0, len(ids), size):
            first, end = max(0, start - overlap), min(len(ids), start + size)
            seen = encoder.backbone.words(ids[first : end + overlap])
            # Positions count from where a whole overlap would begin.
            position = torch.arange(len(seen)) + FIRST_POSITION + overlap - (start - first)
            states.append(contextualised(seen, position)[start - first : end - first])
        query = contextualised(encoder.backbone.words(torch.tensor(read.query.ids.astype("int64"))), torch.arange(2))
    normalize = torch.nn.functional.normalize
    cosines = normalize(query, dim=-1) @ normalize(torch.cat(states), dim=-1).T
    torch.testing.assert_close(encoded.matches.values[0, 0], cosines, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(encoded.query.states[0], query, rtol=1e-4, atol=1e-5)
    assert encoded.matches.window[0].tolist() == [i // size for i in range(len(ids))]


def test_documents_of_several_queries_are_contextualised_once():
    frame = tiny.frame(["old dog", "red fish", "snow"], [SENTENCE * 3, SENTENCE])
    model = tkl(window_size=10, overlap=2)
    model(frame)
    assert model.coverage.tokens == 3 * 80  # of both texts, which begin alike, for each query
    seams = 5 + 1  # between the windows of ten, where two tokens on either side are read twice
    assert model.coverage.tokens_encoded == 80 + seams * 2 * 2 + (2 + 2 + 1)


@pytest.mark.parametrize("text", ["", "rain"])
@pytest.mark.parametrize("query", ["", "rain"])
def test_empty_and_unknown_queries_and_texts_have_the_same_score_in_any_batch(query, text):
    with_others = tkl()(tiny.frame([query, "old dog"], [text, SENTENCE * 5]))
    alone = tkl()(tiny.frame([query], [text]))
    assert np.isfinite(with_others["score"]).all()
    assert with_others["score"][0] == pytest.approx(alone["score"][0], rel=1e-5)


def test_windows_are_explained_and_their_best_is_shown():
    text = SENTENCE + "snow " * 10 + SENTENCE
    model = tkl(window_size=10, explain=True)
    row = model(tiny.frame(["snow"], [text])).iloc[0]
    spans = GreedyChunks(10)(range(50))
    assert len(row["window_scores"]) == len(row["window_spans"]) == len(spans)
    assert [text[a:b].split() for a, b in row["window_spans"]] == [text.split()[a:b] for a, b in spans]
    assert row["score"] == pytest.approx(sum(value for _, value in row["term_scores"]), rel=1e-5)
    assert [token for token, _ in row["term_scores"]] == ["snow"]


def test_a_model_over_a_file_of_vectors_is_saved_without_it(tmp_path):
    rng, glove = np.random.default_rng(0), tmp_path / "glove.txt"
    glove.write_text("".join(f"{w} {' '.join(f'{x:.4f}' for x in rng.normal(size=20))}\n" for w in tiny.WORDS))
    model = ld.TKL(glove, device="cpu", overlap=3, layers=1, best_regions=2)
    frame = tiny.longer_results()
    expected = model(frame)["score"]
    model.save(tmp_path / "saved")
    glove.unlink()
    again = ld.TKL.load(tmp_path / "saved", device="cpu")
    np.testing.assert_allclose(again(frame)["score"], expected, rtol=1e-5)
    assert again.coverage == model.coverage
    assert (again.overlap, again.layers, again.best_regions) == (3, 1, 2)


# Word embeddings from text files and checkpoints.

OPTIONS = {"overlap": 5, "layers": 1, "attention_heads": None, "feed_forward": 8}


def vectors(folder, text, name="vectors.txt"):
    path = folder / name
    path.write_bytes(text.encode())
    return path


def test_word_vectors_are_read_from_text_files(tmp_path):
    words, table = read_vectors(vectors(tmp_path, "the 1 2 3\nred 0.5 -1e-1 0\n. . 7 8 9\nthe 4 4 4\n\x85 1 1 1\n"))
    assert words == ["[PAD]", "[UNK]", "the", "red", ". .", "\x85"]
    expected = [[0, 0, 0], [0, 0, 0], [1, 2, 3], [0.5, -0.1, 0], [7, 8, 9], [1, 1, 1]]
    torch.testing.assert_close(table, torch.tensor(expected))


def test_the_first_line_of_word2vec_has_sizes_and_no_vector(tmp_path):
    words, table = read_vectors(vectors(tmp_path, "2 2\nthe 1 2 \r\nred 3 4 \r\n"))
    assert (words[2:], table[2:].tolist()) == (["the", "red"], [[1, 2], [3, 4]])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("the 1 2\nred 1\n", "line 2 "),
        ("the 1 2\nred 1 x\n", "line 2 "),
        ("the 1 nan\n", "line 1 "),
        ("the\n", "line 1 "),
        ("", "no words"),
    ],
)
def test_malformed_files_of_vectors_are_refused_by_line(text, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        read_vectors(vectors(tmp_path, text))


@pytest.mark.parametrize("name", ["glov.txt", "vectors/glov.txt.gz", "no/such/folder"])
def test_a_missing_file_of_vectors_is_named(name):
    with pytest.raises((OSError, ValueError), match=name):
        load_word_backbone(name, **OPTIONS)


def test_words_and_punctuation_are_tokens_in_the_file_s_case(tmp_path):
    lower = load_word_backbone(str(vectors(tmp_path, "the 1 2\ncafé 3 4\n. 5 6\n")), **OPTIONS)
    encoded = lower.tokenizer("The café. Rain", return_offsets_mapping=True)
    assert lower.tokenizer.convert_ids_to_tokens(encoded["input_ids"]) == ["the", "café", ".", "[UNK]"]
    assert encoded["offset_mapping"] == [(0, 3), (4, 8), (8, 9), (10, 14)]
    words = lower.model(torch.tensor([encoded["input_ids"]]))[0]
    torch.testing.assert_close(words, torch.tensor([[1.0, 2], [3, 4], [5, 6], [0, 0]]))
    cased = load_word_backbone(str(vectors(tmp_path, "the 1 2\nThe 3 4\n", "cased.txt")), **OPTIONS)
    assert cased.tokenizer("The the")["input_ids"] == [3, 2]


@pytest.mark.parametrize(("family", "sizes", "width"), [("bert", {}, 32), ("electra", {"embedding_size": 24}, 24)])
def test_any_checkpoint_has_word_embeddings(family, sizes, width, tmp_path):
    folder = tiny.checkpoint(tmp_path, family, **sizes)
    backbone = load_word_backbone(folder, **OPTIONS)
    words = AutoModel.from_pretrained(folder).get_input_embeddings().weight
    torch.testing.assert_close(backbone.model.get_input_embeddings().weight, words, rtol=1e-5, atol=0)
    assert backbone.hidden_size == width
    assert backbone.model.config.attention_heads == 8  # the most below ten that divide it
    assert [name for name, _ in backbone.model.named_parameters()] == ["words.weight"]
