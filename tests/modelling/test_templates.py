"""The words around query and text: tokens as their owners make them, scores of language models, what is refused."""

from __future__ import annotations

import re
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import pyterrier_longdoc as ld
from pyterrier_longdoc.common.frames import Document, documents, questions
from pyterrier_longdoc.modelling.backbones.architectures import InputRules
from pyterrier_longdoc.modelling.inputs import Settings
from pyterrier_longdoc.modelling.reader import TemplateReader
from pyterrier_longdoc.modelling.templates import TEMPLATES, Template

from ..support import tiny, tiny_answers, tiny_long
from ..support.systems import QRELS, QUIET, reloaded, scores, slow_but
from ..support.tiny_answers import CHAT, PAIR, ROLES

pytestmark = QUIET

READING = {"max_query_len": 12, "device": "cpu"}
QUERIES = ["old dog", "snow in the city?", "what is a tree?"]
TEXTS = ["the cat and the dog walk to the river in the rain.", "a red fish", " ".join(tiny.WORDS), "tree!"]
FRAME = tiny.frame(QUERIES, TEXTS)
PAIRS = list(FRAME[["query", "text"]].itertuples(index=False, name=None))


def tokenizer_for(name):
    return tiny_answers.tokenizer(begin=name == "bge-reranker-v2-gemma", end=name == "monot5", chat=CHAT)


def read(tokenizer, template, query, text, *, longest=None, **settings):
    """What a scorer gets of a query and a text."""
    backbone = SimpleNamespace(
        tokenizer=tokenizer, template=template, longest_input=longest, has_segments=False, rules=InputRules()
    )
    reading = Settings(**{"windows": ld.Truncate(), "max_query_len": None, **settings})
    return TemplateReader(backbone, reading).read(questions([query]), documents([text]))[0]


def ids_of(tokenizer, template, query, text):
    """The input of a text that is one window."""
    [window] = read(tokenizer, template, query, text).windows
    return window.ids.tolist()


def plain_ids(tokenizer, text):
    return tokenizer(text, add_special_tokens=False)["input_ids"]


TOKENS = {
    # The package's own.
    "plain": "query~:~ what~ is~ a~ tree~?\n~document~:~ the~ old~ tree~ is~ a~ plant~.",
    # Model card of Qwen/Qwen3-Reranker-0.6B: prefix, `<Instruct>: ...\n<Query>: ...\n<Document>: ...`, suffix.
    "qwen3-reranker": (
        "<|im_start|>~system~\n~Judge~ whether~ the~ Document~ meets~ the~ requirements~ based~ on~ the~ Query~"
        ' and~ the~ Instruct~ provided~.~ Note~ that~ the~ answer~ can~ only~ be~ "~yes~"~ or~ "~no~".~'
        "<|im_end|>~\n~<|im_start|>~user~\n~<Instruct~>:~ Given~ a~ web~ search~ query~,~ retrieve~ relevant~"
        " passages~ that~ answer~ the~ query~\n~<Query~>:~ what~ is~ a~ tree~?\n~<Document~>:~ the~ old~ tree~"
        " is~ a~ plant~.~<|im_end|>~\n~<|im_start|>~assistant~\n~<think~>\n\n~</~think~>\n\n"
    ),
    # mixedbread-ai/mxbai-rerank, mxbai_rerank/mxbai_rerank_v2.py: `?` and the line break after it are two tokens.
    "mxbai-rerank-v2": (
        "<|im_start|>~system~\n~You~ are~ Qwen~,~ created~ by~ Alibaba~ Cloud~.~ You~ are~ a~ helpful~ assistant~"
        ".~<|im_end|>~\n~<|im_start|>~user~\n~query~:~ what~ is~ a~ tree~?~\n~document~:~ the~ old~ tree~ is~ a~"
        " plant~.~\n~You~ are~ a~ search~ relevance~ expert~ who~ evaluates~ how~ well~ documents~ match~ search~"
        " queries~.~ For~ each~ query~-document~ pair~,~ carefully~ analyze~ the~ semantic~ relationship~"
        " between~ them~,~ then~ provide~ your~ binary~ relevance~ judgment~ (~0~ for~ not~ relevant~,~ ~1~ for~"
        " relevant~).\n~Relevance~:~<|im_end|>~\n~<|im_start|>~assistant~\n"
    ),
    # FlagOpen/FlagEmbedding, FlagEmbedding/inference/reranker/decoder_only/base.py.
    "bge-reranker-v2-gemma": (
        "<|endoftext|>~A~:~ what~ is~ a~ tree~?~\n~B~:~ the~ old~ tree~ is~ a~ plant~.~\n~Given~ a~ query~ A~"
        " and~ a~ passage~ B~,~ determine~ whether~ the~ passage~ contains~ an~ answer~ to~ the~ query~ by~"
        " providing~ a~ prediction~ of~ either~ '~Yes~'~ or~ '~No~'."
    ),
    # Nogueira et al. 2020, section 3; terrierteam/pyterrier_t5.
    "monot5": "Query~:~ what~ is~ a~ tree~?~ Document~:~ the~ old~ tree~ is~ a~ plant~.~ Relevant~:~<|endoftext|>",
    # The package's own question, after Liang et al. 2022, in the chat template of the tokenizer.
    "yes-no": (
        "<|im_start|>~user~\n~Query~:~ what~ is~ a~ tree~?\n~Does~ the~ passage~ answer~ the~ query~?~ Answer~ '~"
        "Yes~'~ or~ '~No~'.\n~Passage~:~ the~ old~ tree~ is~ a~ plant~.~<|im_end|>~\n~<|im_start|>~assistant~\n"
    ),
    # Model cards of ContextualAI: the whole prompt is tokenized as one string.
    "ctxl-rerank-v2": (
        "Check~ whether~ a~ given~ document~ contains~ information~ helpful~ to~ answer~ the~ query~.\n~"
        "<Document~>~ the~ old~ tree~ is~ a~ plant~.\n~<Query~>~ what~ is~ a~ tree~?~ ??"
    ),
    # ZeroEntropy's modeling_zeranker.py, with the chat template of Qwen3.
    "zerank-2": (
        "<|im_start|>~system~\n~what~ is~ a~ tree~?~<|im_end|>~\n~<|im_start|>~user~\n~the~ old~ tree~ is~ a~"
        " plant~.~<|im_end|>~\n~<|im_start|>~assistant~\n"
    ),
    # NVIDIA's model cards: the colons are joined to query and text.
    "nemotron-rerank": ("question~:what~ is~ a~ tree~?~ \n \n~ passage~:the~ old~ tree~ is~ a~ plant~."),
}
"""The tokens of a query and a text in each template."""


def test_built_in_templates_have_the_expected_tokens():
    for name in TEMPLATES:
        tokenizer = tokenizer_for(name)
        ids = ids_of(tokenizer, TEMPLATES[name].in_chat(tokenizer), *PAIR)
        assert "~".join(tokenizer.convert_ids_to_tokens(ids)) == TOKENS[name]


def test_a_template_that_strips_keeps_its_own_space_before_a_window():
    for text, expected in ((" mid word", "Document: mid word"), ("ing", "Document:ing")):
        filled, _ = ld.Template("Document: {text} Query: {query}", strip=True).fill_part(
            "Document: {text}", "", text, "", True
        )
        assert filled == expected


def test_template_words_are_not_merged_with_words_of_query_or_text():
    for string in ["Query:{query}", "a:({query})", "{query} find", "{query}\nfind"]:
        for apart in [False, True]:
            for text_first in [False, True]:
                tokenizer = tiny_long.byte_tokenizer()
                tokenizer.add_tokens([":a", "(a", "a)"])  # as vocabularies of real models have them
                parts = [string, "\n", string.replace("{query}", "{text}")][:: -1 if text_first else 1]
                template = Template(tuple(parts) if apart else "".join(parts), special_tokens=False)
                for query, text in [("a", "a"), *PAIRS]:
                    assert tokenizer.decode(ids_of(tokenizer, template, query, text)) == template.fill(query, text)


def test_no_space_is_added_where_a_tokenizer_lacks_the_piece_of_a_space_and_the_probe_word():
    """Its piece of a space stands alone before the probe word, but not before the words of query and text."""
    for string in [*TEMPLATES["monot5"].parts, "{query} the: {text}", "Document: {text} the {query}"]:
        for spaces in ["always", "first", "never"]:
            words = {word for pair in PAIRS for text in pair for word in text.split()} - {"a"}
            pieces = [
                *"Query:DocmntRlvadh",
                "▁",
                *(f"▁{word}" for word in [*words, "Query", "Document", "Relevant", "the"]),
            ]
            core = Tokenizer(
                models.Unigram([("<unk>", 0.0), *((piece, -9.0) for piece in dict.fromkeys(pieces))], unk_id=0)
            )
            core.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=spaces)
            tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, unk_token="<unk>")
            template = Template(string)
            for query, text in PAIRS:
                assert ids_of(tokenizer, template, query, text) == plain_ids(tokenizer, template.fill(query, text))


def test_wrong_templates_are_refused_by_name():
    for arguments, name in [
        ({"parts": "{text}"}, "{query}"),
        ({"parts": ("{query} {text}", "{text}")}, "{text}"),
        ({"parts": "qwen3"}, "'qwen3' must hold .*qwen3-reranker"),
        ({"answers": "yes"}, "answers='yes'"),
        ({"answers": ("a", "b", "c")}, "answers="),
        ({"answers": (True,)}, "answers="),
        ({"answers": 0}, "token ids"),
        ({"parts": "{query} {text} {instructions}"}, "{instructions}"),
        ({"parts": "{query} {text} {instruction}", "instructed": "{query}: {instruction}"}, "{query}"),
        ({"parts": "{query} {text} {instruction}", "uninstructed": "{instruction}"}, "{instruction}"),
        ({"parts": "{query} {text} {instruction}", "instructed": "Instruct"}, "instructed='Instruct'"),
        ({"instructed": "Instruct: {instruction}"}, "instructed="),
        ({"uninstructed": "find"}, "uninstructed="),
        ({"chat": True, "parts": ("{query}", "{text}")}, "chat=True"),
    ]:
        with pytest.raises(ValueError, match=name):
            Template(**{"parts": "{query} {text}", **arguments})


def test_braces_of_a_prompt_and_ids_from_numpy_are_accepted():
    template = Template('{"query": {query}, "text": {text}, {}, { answer }}', answers=(np.int64(3), "no"))
    assert template.fill("a", "b") == '{"query": a, "text": b, {}, { answer }}'
    assert template == replace(template, answers=(3, "no"))


def answers_of(tokenizer, *words):
    return [word if isinstance(word, int) else plain_ids(tokenizer, word)[0] for word in words]


def filled(model, tokenizer, template, pairs):
    """`(R, words)` logits of what follows the filled-in inputs, padded on the left, as the owners pad."""
    rows = [ids_of(tokenizer, template, query, text) for query, text in pairs]
    width = max(map(len, rows))
    ids = torch.tensor([[1] * (width - len(row)) + row for row in rows])
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
    start = {"decoder_input_ids": torch.ones(len(rows), 1, dtype=torch.long)} if model.config.is_encoder_decoder else {}
    with torch.no_grad():
        return model(input_ids=ids, attention_mask=mask, **start).logits[:, -1]


KINDS = {
    "qwen3": ("qwen3", "qwen3-reranker", {}),
    "gemma": ("gemma", "bge-reranker-v2-gemma", {}),
    "t5": ("t5", "monot5", {"initializer_factor": 1.5}),
    "t5, two tables": ("t5", "monot5", {"tie_word_embeddings": False}),
    "mt5": ("mt5", "monot5", {}),
    "umt5": ("umt5", "monot5", {}),
    "chat": ("llama", "yes-no", {}),
    "ctxl 6b": ("mistral", "ctxl-rerank-v2", {}),
    "granite": ("granite", "qwen3-reranker", {"logits_scaling": 8.0}),
    "cohere": ("cohere", "qwen3-reranker", {"logit_scale": 0.25}),
}


def assert_scores(reranker, expected):
    np.testing.assert_allclose(scores(reranker, FRAME), expected, atol=1e-5, rtol=1e-5)


@pytest.fixture
def t5(tmp_path) -> str:
    return tiny_answers.checkpoint(tmp_path, "t5", tokenizer_for("monot5"))[1]


@pytest.mark.parametrize("kind", slow_but(("qwen3", "gemma", "t5", "granite"), KINDS))
def test_scores_are_the_logits_of_the_filled_in_prompt(kind, tmp_path):
    family, name, changes = KINDS[kind]
    tokenizer = tokenizer_for(name)
    model, folder = tiny_answers.checkpoint(tmp_path / "model", family, tokenizer, **changes)
    template = TEMPLATES[name].in_chat(tokenizer)
    logits = filled(model, tokenizer, template, PAIRS)[:, answers_of(tokenizer, *template.answers)]
    expected = (logits[:, 0] - logits[:, 1] if len(template.answers) == 2 else logits[:, 0]).numpy() * template.scale
    assert expected.std() > 1e-2
    for cls in (ld.FirstP, ld.MaxP):
        reranker = cls(folder, template=name, **READING)
        assert_scores(reranker, expected)
    again = reloaded(reranker, tmp_path / "saved")
    assert again.template == name
    assert_scores(again, expected)
    for aggregation in ("avg", "max", "attn"):  # of one window
        parade = ld.PARADE(folder, template=name, aggregation=aggregation, **READING)
        assert_scores(parade, expected)
        assert parade.model.origin != "random"


@pytest.mark.parametrize("family", ["qwen3", "gemma"])
def test_a_conversion_to_classification_scores_with_its_own_head(family, tmp_path):
    tokenizer = tokenizer_for("qwen3-reranker")
    model, folder = tiny_answers.checkpoint(tmp_path, family, tokenizer, labels=1)
    inputs = [torch.tensor([ids_of(tokenizer, TEMPLATES["qwen3-reranker"], *pair)]) for pair in PAIRS]
    with torch.no_grad():
        expected = [model(ids).logits.item() for ids in inputs]
    for cls in (ld.FirstP, ld.LongP):
        assert_scores(cls(folder, template="qwen3-reranker", **READING), expected)


@pytest.mark.parametrize(("family", "name"), [("qwen3", "qwen3-reranker"), ("t5", "monot5")])
def test_lora_trains_a_model_that_scores_by_answers(family, name, tmp_path):
    _, folder = tiny_answers.checkpoint(tmp_path, family, tokenizer_for(name))
    recipe = ld.TrainingArgs(learning_rates={"": 1e-2}, lora=ld.Lora(rank=2))
    model = ld.MaxP(folder, template=name, training=recipe, **READING)
    before, words = scores(model, FRAME), model.model.encoder.backbone.get_input_embeddings().weight.clone()
    assert np.abs(scores(model.fit(tiny.results(), QRELS), FRAME) - before).max() > 1e-2
    assert torch.equal(model.model.encoder.backbone.get_input_embeddings().weight, words)


MAKERS = {
    "words": lambda: tiny_answers.tokenizer(chat=CHAT),
    "words, ended": lambda: tiny_answers.tokenizer(end=True, chat=CHAT),
    "bytes": tiny_long.byte_tokenizer,
    "bytes, begun": lambda: tiny_long.byte_tokenizer(begin=True),
    "word pieces": lambda: tiny.tokenizer(segments=False),
}


def ids_of_whole(tokenizer, template, query, text):
    """What the template's owner makes of the filled-in template."""
    if len(template.parts) == 1:
        return tokenizer(template.fill(query, text), add_special_tokens=template.special_tokens)["input_ids"]
    values = {"{query}": query, "{text}": text, "{instruction}": template.uninstructed}
    parts = [re.sub(r"\{\w+\}", lambda slot: values[slot[0]], part) for part in template.parts]
    around = tokenizer("a", add_special_tokens=template.special_tokens)["input_ids"]
    at = around.index(plain_ids(tokenizer, "a")[0])
    return [*around[:at], *(token for part in parts for token in plain_ids(tokenizer, part)), *around[at + 1 :]]


# Each template with two of the tokenizers, each tokenizer with several templates.
SOME = [(name, list(MAKERS)[(i + j) % len(MAKERS)]) for i, name in enumerate(TEMPLATES) for j in (0, 2)]

EDGES = ["\nthe cat", "the cat.\n", "\n\n", "(the cat)", "!", ", the cat?\n\n", " the cat ", "the cat:", ""]
"""Texts with line breaks, marks and spaces at their ends."""


@pytest.mark.parametrize(("name", "maker"), SOME)
def test_an_input_is_the_tokenized_prompt(name, maker):
    tokenizer = MAKERS[maker]()
    tokenizer.chat_template = CHAT
    template = TEMPLATES[name].in_chat(tokenizer)
    for text in EDGES:
        for query in ("old dog", *EDGES):
            assert ids_of(tokenizer, template, query, text) == ids_of_whole(tokenizer, template, query, text)
        titled = read(tokenizer, template, "old dog", Document(text, "a red fish."), repeat_tokens=20)
        expected = ids_of_whole(tokenizer, template, "old dog", f"a red fish.\n{text}" if text else "a red fish.")
        assert [window.ids.tolist() for window in titled.windows] == [expected]


INSIDE = [
    (name, maker, title)
    for name in ("qwen3-reranker", "zerank-2", "plain", "ctxl-rerank-v2", "mxbai-rerank-v2")
    for maker, title in (("bytes", ""), ("every byte", ""), ("every byte", "a red fish."))
]


@pytest.mark.parametrize(("name", "maker", "title"), INSIDE)
def test_windows_inside_a_text_are_tokenized_with_the_prompt(name, maker, title):
    """They begin and end at and inside words, at marks and at line breaks; only words have a space before them."""
    tokenizer, template = tiny_long.byte_tokenizer(words=maker == "bytes"), TEMPLATES[name]
    bare = replace(template, parts=tuple(part.replace(" {text}", "{text}") for part in template.parts))
    text = "The cat.\n\nAnd the dog, (a red\nfish) in rain!\n"
    windows = ld.SlidingWindows(5, 3) if maker == "bytes" else ld.SlidingWindows(7, 1)
    pair = read(tokenizer, template, "old dog?", Document(text, title), windows=windows, repeat_tokens=30)
    parts = list(map(pair.text.window_text, pair.spans))
    for number, (window, part) in enumerate(zip(pair.windows, parts, strict=True)):
        words = f"{title}\n{part.removeprefix(' ')}" if title else part
        whole = bare if number and not title else template
        assert window.ids.tolist() == ids_of_whole(tokenizer, whole, "old dog?", words)
        shown = [tokenizer.decode(window.ids[slice(*place)]) for place in (window.query, window.content)]
        assert ("old dog?" in shown[0], words.strip() in shown[1]) == (True, True)
    if maker == "every byte":
        assert {"at.\n\nAn", "\n\nAnd t", "nd the ", " the do", ", (a re"} < set(parts)


def test_tokens_that_a_prompt_has_beyond_those_of_its_parts_are_cut_from_the_window_and_counted(monkeypatch):
    """In the text, `ing` is one token after `x`; at the beginning of a window it is two."""
    monkeypatch.setattr(tiny, "PIECES", [*tiny.PIECES, "##ing"])
    tokenizer, template = tiny.tokenizer(segments=False), Template("{query} fish: {text}", special_tokens=False)
    reading = {"windows": ld.GreedyChunks(), "max_query_len": 1, "windows_argument": "window_size"}
    pair = read(tokenizer, template, "old", "xing " * 8, longest=8, **reading)
    assert pair.spans == [(0, 5), (5, 9), (10, 15), (15, 16)]
    prompts = ["xing xing x", "ing xing x", "xing xing x", "ing"]
    assert [one.ids.tolist() for one in pair.windows] == [plain_ids(tokenizer, f"old fish: {each}") for each in prompts]
    assert [len(one) for one in pair.windows] == [8, 8, 8, 5]
    assert (pair.row.tokens, pair.row.tokens_read) == (16, 15)
    assert pair.row.truncated == {"the maximum input length of the backbone": 1}


def test_words_of_a_template_are_not_merged_with_a_window_that_begins_inside_a_word():
    tokenizer = tiny_long.byte_tokenizer(words=False)
    pair = read(tokenizer, Template("{query} Text {text}"), "old", "the sun, dog", windows=ld.SlidingWindows(4, 4))
    shown = [tokenizer.decode(window.ids) for window in pair.windows]  # the space of the template is a token, too
    assert shown == ["old Text the", "old Text sun", "old Text, do", "old Text g"]


@pytest.mark.parametrize(("name", "maker"), SOME)
def test_empty_queries_and_texts_are_read_as_in_the_whole_string(name, maker, tmp_path):
    tokenizer, template = MAKERS[maker](), replace(TEMPLATES[name], answers=(5, 6), scale=1.0)
    tokenizer.chat_template = CHAT
    model, folder = tiny_answers.checkpoint(tmp_path, "qwen3", tokenizer)
    frame, said, expected = tiny.frame(["old dog", ""], ["the cat", "", " ", "tree!"]), template.in_chat(tokenizer), []
    for query, text in frame[["query", "text"]].itertuples(index=False, name=None):
        with torch.no_grad():
            logits = model(torch.tensor([ids_of_whole(tokenizer, said, query, text)])).logits[0, -1]
        expected.append((logits[5] - logits[6]).item())
    reranker = ld.FirstP(folder, template=template, **READING)
    np.testing.assert_allclose(scores(reranker, frame), expected, atol=1e-5)
    assert len(np.unique(np.round(expected, 3))) >= 4
    assert reranker.coverage.tokens == reranker.coverage.tokens_read


def test_a_custom_template_gives_scores_and_is_saved(tmp_path):
    tokenizer = tiny_answers.tokenizer()
    model, folder = tiny_answers.checkpoint(tmp_path / "model", "qwen3", tokenizer)
    yes, no = answers_of(tokenizer, "yes", "no")
    own = ld.Template("query: {query}\n{text} yes", answers=[yes, "no"])
    assert own == ld.Template(["query: {query}\n{text} yes"], answers=(yes, "no"))
    logits = filled(model, tokenizer, own, PAIRS)
    expected = (logits[:, yes] - logits[:, no]).numpy()
    reranker = ld.MaxP(folder, template=own, **READING)
    assert_scores(reranker, expected)
    assert_scores(ld.MaxP(folder, template=replace(own, answers=("no", yes)), **READING), -expected)
    again = reloaded(reranker, tmp_path / "saved")
    assert again.template == own
    assert_scores(again, expected)


def test_backbones_without_a_longest_input_read_windows_of_the_default_size(t5):
    for cls, tokens in [(ld.FirstP, 477), (ld.AvgP, 800), (ld.LongP, 800)]:
        model = cls(t5, template="monot5", device="cpu", max_query_len=8)
        model(tiny.frame(["old dog"], [" ".join(["cat dog"] * 400)]))
        assert (model.coverage.tokens, model.coverage.tokens_read) == (800, tokens)


def test_heads_that_need_token_states_are_refused_for_encoder_decoders(t5):
    for cls in [ld.CEDR, ld.NeuralModel1]:
        with pytest.raises(ValueError, match="encoder-decoder"):
            _ = cls(t5, template="monot5", **READING).model


def theirs(model):
    """Scores by a CrossEncoder of sentence-transformers."""
    return model.predict(PAIRS, activation_fn=torch.nn.Identity(), show_progress_bar=False)


@pytest.mark.parametrize("labels", [None, 1])
@pytest.mark.parametrize("prompt", [None, "find a plant"])
def test_a_chat_template_gives_the_scores_of_sentence_transformers(labels, prompt, tmp_path):
    """As sentence-transformers reads it, with its files or without them."""
    library = pytest.importorskip("sentence_transformers")
    tokenizer = tiny_answers.tokenizer(chat=ROLES)
    _, folder = tiny_answers.checkpoint(tmp_path / "bare", "qwen3", tokenizer, labels=labels)
    model, stored = library.CrossEncoder(folder, device="cpu"), str(tmp_path / "stored")
    assert_scores(ld.FirstP(folder, **READING), theirs(model))
    if prompt is not None:
        model.prompts["search"], model.default_prompt_name = prompt, "search"
    model.save_pretrained(stored)
    expected, reranker = theirs(library.CrossEncoder(stored, device="cpu")), ld.MaxP(stored, **READING)
    assert_scores(reranker, expected)
    assert_scores(reloaded(reranker, tmp_path / "ours"), expected)
    assert np.abs(scores(ld.MaxP(stored, template="plain", **READING), FRAME) - expected).max() > 1e-3


@pytest.mark.parametrize("one", [True, False])
def test_answers_stored_by_sentence_transformers_are_compared(one, tmp_path):
    library = pytest.importorskip("sentence_transformers")
    modules = pytest.importorskip("sentence_transformers.cross_encoder.modules")
    tokenizer = tiny_answers.tokenizer(chat=ROLES)
    _, folder = tiny_answers.checkpoint(tmp_path / "bare", "gemma", tokenizer)
    yes, no = answers_of(tokenizer, "1", "0")
    first = modules.Transformer(folder, transformer_task="text-generation")
    answers = modules.LogitScore(yes, None if one else no)
    model, stored = library.CrossEncoder(modules=[first, answers], device="cpu"), str(tmp_path / "stored")
    model.save_pretrained(stored)
    reranker = ld.MaxP(stored, **READING)
    assert_scores(reranker, theirs(model))
    assert reranker.model.backbone.template.answers == ((yes,) if one else (yes, no))


@pytest.mark.parametrize(
    ("family", "labels", "chat", "message"),
    [
        ("qwen3", 1, None, "'qwen3-reranker' for Qwen3-Reranker"),
        ("qwen3", 1, CHAT, "Qwen3ForSequenceClassification"),
        ("llama", 1, CHAT, "template="),
        ("llama", 1, None, "LlamaForSequenceClassification"),  # whose tokenizer has a layout of two texts
        ("qwen3", None, CHAT, "'yes-no' to ask a chat model"),
        ("llama", None, CHAT, "LlamaForCausalLM"),
        ("qwen3", None, ROLES.replace("query: ", "").split("document")[0] + "'document'", "must hold"),
        ("t5", None, None, "'monot5' for monoT5.*not for rankers of mT5, which answer yes or no"),
    ],
)
def test_language_models_without_a_known_template_are_refused(family, labels, chat, message, tmp_path):
    tokenizer = tiny_long.byte_tokenizer(begin=True) if family == "llama" else tiny_answers.tokenizer()
    tokenizer.chat_template = chat
    _, folder = tiny_answers.checkpoint(tmp_path, family, tokenizer, labels=labels)
    for cls in (ld.MaxP, ld.LongP):
        with pytest.raises(ValueError, match=message):
            _ = cls(folder, **READING).model


@pytest.mark.parametrize(
    ("family", "template", "message"),
    [
        ("gemma2", "bge-reranker-v2-gemma", "not a linear function of its last state"),
        ("qwen3", Template("{query}{text}", answers=("unheard", "no")), "answer 'unheard'"),
        ("qwen3", Template("{query}{text}", answers=("old dog", "no")), "answer 'old dog'"),
        ("qwen3", Template("{query}{text}", answers=(10**6,)), "answer 1000000"),
        ("qwen3", Template("{query}{text}", answers=("no", "no")), "the same token"),
        ("t5", "plain", "encoder-decoder"),
    ],
)
def test_templates_that_cannot_give_a_score_are_refused(family, template, message, tmp_path):
    _, folder = tiny_answers.checkpoint(tmp_path, family, tokenizer_for(template), initializer_range=2.0)
    with pytest.raises(ValueError, match=message):
        _ = ld.FirstP(folder, template=template, **READING).model
