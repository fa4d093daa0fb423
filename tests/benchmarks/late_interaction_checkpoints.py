"""Tiny late-interaction checkpoints, written by the libraries that define their formats, with these libraries' scores.

    python tests/benchmarks/late_interaction_checkpoints.py sentence-transformers   # with sentence-transformers 6.2
    python tests/benchmarks/late_interaction_checkpoints.py pylate                  # with pylate 1.6, which pins 5.3
    python tests/benchmarks/late_interaction_checkpoints.py colbert                 # with colbert-ai 0.2.22

A second argument is another folder to write to.

Each needs an environment of its own, with that library and without this package. `tests/support/late_interaction/` has
what they wrote: folders of random weights, each with `scores.json`: queries, texts of one window, the library's scores,
and its version. `tests/modelling/test_maxsim.py` compares. `colbert` needs a C++ compiler and ninja, and on a CPU it
builds an extension that these scores do not use: it is left out.
"""

from __future__ import annotations

import json
import shutil
import string
import sys
import tempfile
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import AutoModel, BertConfig, ModernBertConfig, PreTrainedTokenizerFast

FOLDER = Path(__file__).parents[1] / "support" / "late_interaction"
WORDS = ["the", "cat", "dog", "river", "city", "old", "new", "snow", "rain", "walk", "find", "red", "tree"]
WORDS += ["in", "of", "and", "a"]
SPECIALS = ["[PAD]", "[unused0]", "[unused1]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
QUERIES = [
    "Old dog",
    "snow, in the city?",
    "",
    "who walks to the river? find a red tree, and a new one and another one",
]
TEXTS = [
    "the cat and the dog walk to the river in the rain.",
    "A Red fish: it's old!",
    "",
    "...",
    "naïve café — 中文 \U0001f40d",
    "the old tree, and the new tree; and the river",
]
SIZES = {
    **{"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64},
    **{"max_position_embeddings": 96, "initializer_range": 0.3},
}


def bert(folder: str) -> str:
    """Saves a random BERT with word pieces and returns its folder."""
    letters = string.ascii_lowercase + string.digits
    pieces = [*SPECIALS, *WORDS, *letters, *(f"##{c}" for c in letters), *string.punctuation]
    vocabulary = {piece: i for i, piece in enumerate(dict.fromkeys(pieces))}
    core = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    core.normalizer = normalizers.BertNormalizer()
    core.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    core.decoder = decoders.WordPiece()
    return _save(folder, core, BertConfig(vocab_size=len(vocabulary), pad_token_id=0, **SIZES))


def modernbert(folder: str) -> str:
    """Saves a random ModernBERT with byte-level tokens and returns its folder."""
    vocabulary = {piece: i for i, piece in enumerate([*SPECIALS, *sorted(pre_tokenizers.ByteLevel.alphabet())])}
    core = Tokenizer(models.BPE(vocabulary, [], unk_token="[UNK]"))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    ids = {"pad_token_id": 0, "cls_token_id": 4, "sep_token_id": 5, "bos_token_id": 4, "eos_token_id": 5}
    layers = {"global_attn_every_n_layers": 2, "local_attention": 16, "reference_compile": False}
    return _save(folder, core, ModernBertConfig(vocab_size=len(vocabulary), **ids, **layers, **SIZES))


def _save(folder: str, core: Tokenizer, config: Any) -> str:
    special = [(token, core.token_to_id(token)) for token in ("[CLS]", "[SEP]")]
    core.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=special
    )
    names = {f"{name}_token": f"[{name.upper()}]" for name in ("unk", "pad", "cls", "sep", "mask")}
    PreTrainedTokenizerFast(tokenizer_object=core, model_max_length=96, **names).save_pretrained(folder)
    torch.manual_seed(0)
    AutoModel.from_config(config).eval().save_pretrained(folder)
    return folder


def keep(name: str, library: str, save: Callable[[str], Any], scores: torch.Tensor) -> None:
    """Writes a checkpoint and its `(queries, texts)` scores."""
    folder = FOLDER / name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    save(str(folder))
    (folder / "README.md").unlink(missing_ok=True)  # a model card
    for path in folder.glob("*.metadata"):
        metadata = json.loads(path.read_text(encoding="utf-8"))
        of_machine = ("meta", "root", "checkpoint", "name")
        kept = {key: value for key, value in metadata.items() if key not in of_machine}
        path.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
    for path in folder.rglob("*"):
        path.chmod(0o755 if path.is_dir() else 0o644)
    content = {
        "library": f"{library} {version(library)}",
        "queries": QUERIES,
        "texts": TEXTS,
        "scores": scores.tolist(),
    }
    (folder / "scores.json").write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    print(f"{name}: {size / 1000:.0f} kB, scores from {scores.min():.3f} to {scores.max():.3f}")
    assert size <= 200_000


def sentence_transformers() -> None:
    """Plain, with prompts and two dense layers; expanded to a length; expanded and attended, with pooled tokens."""
    from sentence_transformers import MultiVectorEncoder
    from sentence_transformers.base.modules import Dense, Normalize, Transformer
    from sentence_transformers.multi_vector_encoder.modules import HierarchicalTokenPooling, MultiVectorMask

    tokens = {"module_input_name": "token_embeddings"}
    linear = {**tokens, "bias": False, "activation_function": None}
    punctuation = list(string.punctuation)
    prompts = {"query": "find: ", "document": "the text: "}
    with tempfile.TemporaryDirectory() as scratch:
        backbones = {"bert": bert(f"{scratch}/bert"), "modernbert": modernbert(f"{scratch}/modernbert")}
        configurations = {
            "st-plain": ("bert", {"document_length": 60}, prompts, [Dense(32, 32, use_residual=True, **tokens)]),
            "st-fixed": ("bert", {"query_expansion": {"strategy": "fixed", "length": 16}}, None, []),
            "st-min": (
                "modernbert", {"query_expansion": {"strategy": "min", "length": 24, "attend": True}}, prompts, [],
            ),
        }  # fmt: skip
        for name, (backbone, settings, words, layers) in configurations.items():
            torch.manual_seed(1)
            modules = [Transformer(backbones[backbone], **settings), *layers, Dense(32, 16, **linear)]
            tasks = ["query", "document"] if name == "st-plain" else ["document"]
            modules += [
                MultiVectorMask([] if name == "st-min" else punctuation, skiplist_tasks=tasks),
                Normalize(**tokens),
            ]
            modules += [HierarchicalTokenPooling(2.0)] if name == "st-min" else []
            similarity = "meanmaxsim" if name == "st-min" else "maxsim"
            model = MultiVectorEncoder(modules=modules, prompts=words, device="cpu", similarity_fn_name=similarity)
            scores = model.similarity(model.encode_query(QUERIES), model.encode_document(TEXTS))
            keep(name, "sentence-transformers", model.save, scores)


def pylate() -> None:
    """BERT with PyLate's defaults; ModernBERT with marker tokens that end in a space, attended; without expansion."""
    from pylate import models as pylate_models
    from pylate.scores import colbert_scores

    with tempfile.TemporaryDirectory() as scratch:
        backbones = {"bert": bert(f"{scratch}/bert"), "modernbert": modernbert(f"{scratch}/modernbert")}
        configurations = {
            "pylate-bert": ("bert", {}),
            "pylate-modernbert": ("modernbert", {"attend_to_expansion_tokens": True, "query_length": 24}),
            "pylate-unexpanded": ("bert", {"do_query_expansion": False, "skiplist_words": [], "query_length": 90}),
        }
        for name, (backbone, settings) in configurations.items():
            torch.manual_seed(1)
            model = pylate_models.ColBERT(
                backbones[backbone], embedding_size=16, document_length=80, device="cpu", **settings
            )
            model.eval()
            queries, texts = (model.encode(part, is_query=part is QUERIES) for part in (QUERIES, TEXTS))
            vectors = [[torch.as_tensor(each) for each in part] for part in (queries, texts)]
            rows = [[float(colbert_scores(q[None], d[None])) for d in vectors[1]] for q in vectors[0]]
            keep(name, "pylate", model.save, torch.tensor(rows))


def colbert() -> None:
    """BERT with the markers [unused0] and [unused1]; queries are filled up to 16 tokens, without attention to these."""
    from colbert.infra import ColBERTConfig
    from colbert.modeling.checkpoint import Checkpoint
    from colbert.modeling.colbert import ColBERT, colbert_score

    ColBERT.try_load_torch_extensions = classmethod(lambda *_: None)  # of the search, not of these scores
    with tempfile.TemporaryDirectory() as scratch:
        folder = bert(f"{scratch}/bert")
        torch.manual_seed(1)
        lengths = {"dim": 16, "query_maxlen": 16, "doc_maxlen": 80}
        config = ColBERTConfig(checkpoint=folder, **lengths)
        model = Checkpoint(folder, colbert_config=config)
        vectors = model.queryFromText(QUERIES)
        documents, mask = model.doc(*model.doc_tokenizer.tensorize(TEXTS), keep_dims="return_mask")
        rows = [
            [float(colbert_score(q[None], d[None], m[None], config)) for d, m in zip(documents, mask, strict=True)]
            for q in vectors
        ]
        keep("colbert", "colbert-ai", model.save, torch.tensor(rows))


if __name__ == "__main__":
    FOLDER = Path(sys.argv[2]) if sys.argv[2:] else FOLDER
    {"sentence-transformers": sentence_transformers, "pylate": pylate, "colbert": colbert}[sys.argv[1]]()
