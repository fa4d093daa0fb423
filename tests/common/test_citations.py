"""The file of references, and who names its entries."""

import ast
import re
from pathlib import Path

import pyterrier as pt

import pyterrier_longdoc as ld
from pyterrier_longdoc.common.citations import Cited, bibtex, entries
from pyterrier_longdoc.listwise import TopDown
from pyterrier_longdoc.training import BestResult, TrainingArgs
from pyterrier_longdoc.training.recipe import papers_of_recipe

from ..support import tiny, tiny_long

PACKAGE = Path(ld.__file__).parent
KEY = re.compile(r"[a-z]+-(19|20)\d\d-[a-z0-9]+")

TRANSFORMERS = [
    value
    for name in ld.__all__
    if isinstance(value := getattr(ld, name), type)
    and issubclass(value, pt.Transformer)
    and value not in (ld.Reranker, ld.CrossEncoder)
]


UNPUBLISHED = {"Evidence", "Passages"}
"""Transformers that are this package's own."""


def test_every_public_transformer_has_papers():
    for transformer in TRANSFORMERS:
        assert issubclass(transformer, Cited)
        assert bool(transformer.papers) == (transformer.__name__ not in UNPUBLISHED)
        assert set(transformer.papers) <= entries().keys()


def test_every_bibtex_entry_is_used_and_every_used_key_exists():
    named = set()
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and KEY.fullmatch(node.value):
                named.add(node.value)
    assert named == entries().keys()


def test_bibtex_has_each_entry_once_and_accepts_custom_entries():
    own = "@misc{me, title = {Mine}}"
    assert bibtex(["li-2024-parade", own, "li-2024-parade"]) == f"{entries()['li-2024-parade']}\n\n{own}"
    assert bibtex([]) == ""


def test_arguments_of_a_model_are_cited():
    keys = ld.PARADE(preselect=ld.EmbeddingWindows(3, ld.BiEncoder())).cited()
    assert keys[0] == "li-2024-parade"
    assert {"li-2024-keyb2", "reimers-2019-sentence"} <= set(keys)
    assert {ld.CEDR(aggregation=kind).cited()[-1][:4] for kind in ("knrm", "pacrr", "drmm")} == {"xion", "hui-", "guo-"}
    assert "jiang-2020-long" in ld.LongP(global_attention="sentences").cited()
    assert "jiang-2020-long" not in ld.LongP().cited()
    assert ld.Birch().citation() == entries()["yilmaz-2019-birch"]


def test_a_language_model_cites_its_schedule_passages_and_shuffles():
    def llm(messages):
        raise AssertionError

    assert set(ld.RankGPT(llm).cited()) == {"sun-2023-is"}
    best = ld.RankGPT(llm, schedule=TopDown(), preselect=ld.BM25Windows(3), shuffles=2)
    assert set(best.cited()) == {"sun-2023-is", "parry-2024-top", "li-2023-power", "tang-2024-found"}


def test_the_architecture_of_a_loaded_backbone_is_cited(tmp_path):
    model = ld.LongP(tiny_long.encoder(tmp_path, "modernbert"), max_query_len=8, device="cpu")
    assert model.cited() == ["boytsov-2025-positional"]
    model.model.eval()
    assert model.cited() == ["boytsov-2025-positional", "warner-2025-smarter"]
    assert "gunther-2023-jina" in ld.LongP("jinaai/jina-embeddings-v2-base-en").cited()
    assert "portes-2023-mosaicbert" in ld.LongP("mosaicml/mosaic-bert-base-seqlen-2048").cited()


def test_a_trained_or_loaded_model_cites_its_loss_and_adapters(tmp_path):
    model = ld.MaxP(tiny.encoder(), window_size=20, stride=20, max_query_len=8, device="cpu")
    assert "hofstatter-2020-improving" not in model.cited()
    model.model.mark_trained(TrainingArgs(loss="margin_mse", lora=ld.Lora(rank=2)).as_dict())
    model.save(tmp_path)
    model = ld.MaxP.load(tmp_path)
    assert model.is_trained
    assert {"dai-2019-deeper", "hofstatter-2020-improving", "hu-2022-lora"} <= set(model.cited())
    assert "kim-2021-query" in BestResult(model, None, []).citation()
    assert papers_of_recipe(TrainingArgs(loss="lambda_loss").as_dict()) == ["wang-2018-lambdaloss"]
    assert papers_of_recipe(None) == papers_of_recipe({"loss": "of a newer version"}) == []
