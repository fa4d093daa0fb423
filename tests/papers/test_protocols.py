"""The papers' protocols, on stand-ins of the same form as the collections: ids, fields, graded labels, variants."""

from __future__ import annotations

import json
from dataclasses import replace

import ir_datasets
import numpy as np
import pandas as pd
import pyterrier as pt
import pytest

import pyterrier_longdoc as ld
from pyterrier_longdoc.papers.protocols import drawable, models_folder
from pyterrier_longdoc.training import TrainingArgs, make_groups, recipes

from ..support import tiny
from ..support.systems import make

pytestmark = [
    pytest.mark.filterwarnings("ignore::pyterrier_longdoc.experiment.ExperimentWarning"),
    pytest.mark.filterwarnings("ignore::pyterrier_longdoc.common.frames.TruncationWarning"),
]

NAMES, FILLER = tiny.WORDS[19:31], tiny.WORDS[:19]
FAST = TrainingArgs(queries_per_step=2, learning_rates={"": 1e-3})


class StandIn:
    """A dataset like PyTerrier's of ir_datasets: topics `first, ...` are about one word each, found in the body."""

    def __init__(
        self, first: int, words: list[str], *, fields=("url", "title", "body"), variants=(), grades=(1,), prefix="D"
    ):
        self.fields, self.variants = fields, variants
        self.qids = [str(first + i) for i in range(len(words))]
        self.words = words
        rng = np.random.default_rng(first)
        self.docs = {}
        for i, word in enumerate(words):
            for copy in range(2):
                body = " ".join([*rng.choice(FILLER, 6), word])
                values = {"url": "http", "title": f"{word} title", "body": body, "headings": "no", "text": body}
                self.docs[f"{prefix}{i}.{copy}"] = {name: values[name] for name in fields}
        self.judged = [
            (qid, f"{prefix}{i}.{copy}", grade, "0")
            for i, qid in enumerate(self.qids)
            for copy, grade in enumerate([*grades, 0][:2])
        ]

    def get_topics(self, variant=None):
        if not self.variants:
            assert variant is None
            return pd.DataFrame({"qid": self.qids, "query": self.words})
        queries = {"title": self.words, "description": [f"find a {word}" for word in self.words]}
        return pd.DataFrame({"qid": self.qids, "query": queries[variant]})

    def get_qrels(self, variant=None):
        assert variant is None
        return pd.DataFrame(self.judged, columns=["qid", "docno", "label", "iteration"])

    def text_loader(self, fields="*"):
        return _Loader(self, fields)

    def part(self, qids):
        """The same with some of the topics, as a fold is."""
        part = StandIn.__new__(StandIn)
        part.__dict__.update(self.__dict__)
        kept = [i for i, qid in enumerate(self.qids) if qid in qids]
        part.qids, part.words = [self.qids[i] for i in kept], [self.words[i] for i in kept]
        part.judged = [row for row in self.judged if row[0] in qids]
        return part


class _Loader(pt.Transformer):
    def __init__(self, dataset, fields):
        self.dataset, self.fields = dataset, fields

    def transform(self, inp):
        assert set(self.fields) <= set(self.dataset.fields)
        rows = [self.dataset.docs[docno] for docno in inp["docno"]]
        return inp.assign(**{name: [row[name] for row in rows] for name in self.fields})


class Retriever(pt.Transformer):
    """All documents of a corpus in an order of their own for each query; rewrites the query, as tokenisers do."""

    def __init__(self, *datasets):
        self.docnos = sorted({docno for dataset in datasets for docno in dataset.docs})
        self.asked: list[str] = []

    def transform(self, inp):
        self.asked += inp["qid"].tolist()
        rows = []
        for qid, query in zip(inp["qid"], inp["query"], strict=True):
            scores = np.random.default_rng(int(qid)).permutation(len(self.docnos)).astype(float)
            rows += [(qid, "rewritten", query, d, s) for d, s in zip(self.docnos, scores, strict=True)]
        return pt.model.add_ranks(pd.DataFrame(rows, columns=["qid", "query", "query_0", "docno", "score"]))


TRAIN, DEV = StandIn(100, NAMES[:6]), StandIn(200, NAMES[6:9], prefix="E")
DL19, DL20 = (StandIn(first, NAMES[9:11], grades=(3, 1), prefix=p) for first, p in ((300, "F"), (400, "G")))
V1 = (TRAIN, DEV, DL19, DL20)
for _dataset in V1:
    _dataset.docs = {docno: text for dataset in V1 for docno, text in dataset.docs.items()}
DL21 = StandIn(500, NAMES[:2], fields=("url", "title", "headings", "body"), grades=(2, 1), prefix="msmarco_doc_")
TRAIN_ID = "irds:msmarco-document/train"
MSMARCO = {TRAIN_ID: TRAIN, "irds:msmarco-document/dev": DEV}
DL = {
    "irds:msmarco-document/trec-dl-2019/judged": DL19,
    "irds:msmarco-document/trec-dl-2020/judged": DL20,
    "irds:msmarco-document-v2/trec-dl-2021/judged": DL21,
}
ROBUST_ID = "irds:disks45/nocr/trec-robust-2004"
ROBUST = StandIn(301, NAMES[:10], fields=("title", "body"), variants=("title", "description"), grades=(2, 1))
ROBUST.judged = [row for row in ROBUST.judged if row[0] != "305"] + [("305", "D0.0", 0, "0")]  # as topic 672
ROBUST04 = {ROBUST_ID: ROBUST, **{f"{ROBUST_ID}/fold{i + 1}": ROBUST.part(ROBUST.qids[i::5]) for i in range(5)}}
SEEDS = [0, 1]


def maxp(backbone, **changes):
    return make("MaxP", backbone, **{"max_query_len": 32, "training": FAST, **changes})


@pytest.fixture(scope="module")
def models(cross_encoder):
    return {"MaxP": lambda seed: maxp(cross_encoder, seed=seed)}


@pytest.fixture(scope="module")
def msmarco(models, tmp_path_factory):
    """MS MARCO's protocol, done: folder, retriever and results."""
    folder, retriever = tmp_path_factory.mktemp("msmarco"), Retriever(*V1)
    protocol = ld.protocols["msmarco-document"]
    return folder, retriever, protocol.run(models, retriever, folder, seeds=SEEDS, datasets=MSMARCO)


def candidates(dataset, variant=None, fields=("url", "title", "body")):
    """What a protocol should make of a dataset."""
    topics = dataset.get_topics(variant)
    run = Retriever(dataset)(topics).drop(columns=["query_0", "rank"])
    run["query"] = run["qid"].map(dict(zip(topics["qid"], topics["query"], strict=True)))
    texts = [" ".join(dataset.docs[docno][name] for name in fields) for docno in run["docno"]]
    return run.assign(text=texts)


def scores(run):
    return dict(zip(zip(run["qid"], run["docno"], strict=True), run["score"], strict=True))


# Settings.


def test_settings_are_those_of_the_paper():
    shown = {
        name: (p.depth, p.metrics[0], p.alpha, p.recipe, p.start, p.max_query_len, p.max_doc_len)
        for name, p in ld.protocols.items()
    }
    dl = (100, "nDCG@10", 0.05, "boytsov2025", None, 32, 1431)
    robust = (1000, "nDCG@20", 0.05, "robust04", "msmarco-document", 32, 1431)
    assert shown == {
        "msmarco-document": (100, "RR@100", 0.01, "boytsov2025", None, 32, 1431),
        "trec-dl": dl,
        "trec-dl-2019": dl,
        "trec-dl-2020": dl,
        "trec-dl-2021": dl,
        "robust04-title": robust,
        "robust04-description": robust,
        "far-relevant": (100, "RR@100", 0.01, "boytsov2025", "msmarco-document", 32, 1431),
    }
    assert ld.protocols["far-relevant"].max_train_queries == 50_000
    assert list(ld.protocols.table()["name"]) == list(shown)
    # Nothing is ever trained on v2.
    assert {p.train.corpus for p in ld.protocols.values() if p.train} == {"msmarco-document", "far-relevant"}
    figures = {p.published for p in ld.protocols.values() if p.published}
    assert figures <= set(ld.presets["maxp"].published)
    with pytest.raises(KeyError, match="no protocol is named 'robust04'; known are msmarco-document"):
        ld.protocols["robust04"]


def test_datasets_are_those_of_ir_datasets():
    """Names, topic fields and document fields; nothing is downloaded for it."""
    for protocol in ld.protocols.values():
        parts = [*protocol.test, *([protocol.train] if protocol.train else [])]
        names = [(part.dataset, part.topics) for part in parts] + [(name, parts[0].topics) for name in protocol.folds]
        for name, variant in names:
            if name == "far-relevant":
                continue
            dataset = ir_datasets.load(name.removeprefix("irds:"))
            topic_fields = dataset.queries_cls()._fields[1:]
            assert variant in topic_fields or (variant is None and len(topic_fields) == 1)
            assert set(protocol.fields) <= set(dataset.docs_cls()._fields)
            assert dataset.has_qrels()
    folds = [ir_datasets.load(name.removeprefix("irds:")) for name in ld.protocols["robust04-title"].folds]
    assert [fold.dataset_id()[-5:] for fold in folds] == [f"fold{i}" for i in range(1, 6)]


def test_presets_get_the_recipe_of_the_protocol():
    def training(protocol, preset):
        return ld.protocols[protocol]._preset_factory(preset, {})(7).training

    (ms_marco,), (robust,) = recipes("boytsov2025", seed=7), recipes("robust04", seed=7)
    assert training("msmarco-document", "maxp") == training("far-relevant", "parade-rand-l2") == ms_marco
    assert training("trec-dl", "parade-rand-l2") == recipes("boytsov2025", seed=7, epochs=2)[0]
    assert training("robust04-title", "parade-rand-l2") == training("robust04-title", "maxp") == robust
    assert (robust.epochs, robust.negative_pool, robust.max_negative_rank) == (100, 100, 1000)
    # A pre-trained aggregator learns as slowly as the backbone.
    own = {"encoder.": 1e-5, "head.aggregator.": 1e-5, "": 1e-4}
    late = recipes("boytsov2025", seed=7, epochs=3)[0]
    assert training("msmarco-document", "parade-lateir-l6") == replace(late, learning_rates=own)
    assert ld.presets["parade-lateir-l6"]().training == replace(late, learning_rates=own, seed=42)
    assert training("robust04-title", "parade-lateir-l6") == replace(robust, learning_rates=own)
    model = ld.protocols["robust04-title"]._preset_factory("maxp", {"batch_size": 3})(7)
    assert (model.seed, model.batch_size, model.max_doc_len) == (7, 3, 1431)


@pytest.mark.parametrize(
    "args",
    [
        TrainingArgs(negative_pool=3, seed=1),
        TrainingArgs(max_negative_rank=4),
        TrainingArgs(unjudged="skip", min_label=2),
        TrainingArgs(negative_pool=5, max_negative_rank=7, seed=2),
    ],
)
def test_training_needs_only_what_may_be_drawn(args):
    run, qrels = candidates(ROBUST, "title", ("body",)), ROBUST.get_qrels()
    some = drawable(run, qrels, args)
    assert len(some) < len(run)
    whole = make_groups(run, run["text"].tolist(), qrels, args)
    assert make_groups(some, some["text"].tolist(), qrels, args) == whole


# MS MARCO.


def test_msmarco(msmarco, models, tmp_path):
    _, retriever, results = msmarco
    assert set(retriever.asked) == {*TRAIN.qids, *DEV.qids}
    assert results.names == ["first stage", "MaxP"]
    assert results.seeds["MaxP"] == SEEDS
    assert results.statistics.alpha == 0.01
    assert results.table["RR@100 p-value"].notna().tolist() == [False, True]
    # By hand.
    for seed in SEEDS:
        model = models["MaxP"](seed)
        model.max_doc_len, model.training = 1431, TrainingArgs(
            queries_per_step=2, learning_rates={"": 1e-3}, seed=seed
        )  # fmt: skip
        model.fit(candidates(TRAIN), TRAIN.get_qrels())
        assert scores(results.run("MaxP", seed)) == scores(model(candidates(DEV)))
    assert scores(results.run("MaxP", 0)) != scores(results.run("MaxP", 1))
    assert scores(results.run("first stage")) == scores(candidates(DEV))


def test_again_is_read_from_the_folder(msmarco, models, monkeypatch):
    folder, _, results = msmarco
    monkeypatch.setattr(ld.MaxP, "fit", lambda *_: pytest.fail("trained again"))
    monkeypatch.setattr(ld.MaxP, "transform", lambda *_: pytest.fail("scored again"))
    retriever = Retriever(*V1)
    again = ld.protocols["msmarco-document"].run(models, retriever, folder, seeds=SEEDS, datasets=MSMARCO)
    pd.testing.assert_frame_equal(again.table, results.table)
    assert set(retriever.asked) == set(DEV.qids)
    monkeypatch.undo()
    model = ld.LongDocReranker.load(models_folder(folder, "MaxP", 1) / "model")
    assert scores(model(candidates(DEV))) == scores(results.run("MaxP", 1))


def test_folder_of_models_that_were_trained_otherwise(msmarco, cross_encoder):
    folder, _, _ = msmarco
    other = {"MaxP": lambda seed: maxp(cross_encoder, seed=seed, training=replace(FAST, epochs=2))}
    protocol = ld.protocols["msmarco-document"]
    with pytest.raises(ValueError, match=r"seed-0.*not the same are its recipe \(epochs\)"):
        protocol.run(other, Retriever(*V1), folder, seeds=SEEDS, datasets=MSMARCO)
    models = {"MaxP": lambda seed: maxp(cross_encoder, seed=seed)}
    with pytest.raises(ValueError, match=r"seed-0.*not the same are its protocol"):
        replace(protocol, depth=3).run(models, Retriever(*V1), folder, seeds=SEEDS, datasets=MSMARCO)


def test_queries_for_training_and_for_test(models, tmp_path):
    datasets = {TRAIN_ID: TRAIN, "irds:msmarco-document/dev": TRAIN.part(TRAIN.qids[:1])}
    with pytest.raises(ValueError, match=r"1 queries are both in training .*/train\) and in test, e.g. '100'"):
        ld.protocols["msmarco-document"].run(models, Retriever(*V1), tmp_path, seeds=[0], datasets=datasets)


# TREC DL.


def test_years_are_pooled(msmarco, tmp_path):
    first = {"msmarco-document": Retriever(*V1), "msmarco-document-v2": Retriever(DL21)}
    results = ld.protocols["trec-dl"].run(["MaxP"], first, tmp_path, seeds=SEEDS, trained=msmarco[0], datasets=DL)
    assert first["msmarco-document-v2"].asked == DL21.qids
    assert first["msmarco-document"].asked == DL19.qids + DL20.qids
    assert results.qids == [
        f"trec-dl-{year}:{qid}" for year, d in zip((2019, 2020, 2021), DL.values(), strict=True) for qid in d.qids
    ]
    assert not (tmp_path / "models").exists()  # nothing is trained
    model = ld.LongDocReranker.load(models_folder(msmarco[0], "MaxP", 1) / "model")
    run = results.run("MaxP", 1)
    for year, dataset in zip((2019, 2020, 2021), DL.values(), strict=True):
        own = run[run["qid"].str.startswith(f"trec-dl-{year}:")]
        expected = {(f"trec-dl-{year}:{qid}", d): s for (qid, d), s in scores(model(candidates(dataset))).items()}
        assert scores(own) == expected
    of_2021 = ld.protocols["trec-dl-2021"].run(
        ["MaxP"], first["msmarco-document-v2"], tmp_path / "2021", seeds=SEEDS, trained=msmarco[0],
        datasets={name: d for name, d in DL.items() if "2021" in name},
    )  # fmt: skip
    pooled = results.subset(qid for qid in results.qids if "2021" in qid)
    assert of_2021.means.loc["MaxP"].tolist() == pytest.approx(pooled.means.loc["MaxP"].tolist())


def test_trained_on_v1_for_v2(models, tmp_path):
    protocol, datasets = ld.protocols["trec-dl-2021"], {TRAIN_ID: TRAIN, list(DL)[2]: DL21}
    with pytest.raises(
        ValueError, match="retrieves from msmarco-document and msmarco-document-v2: give first_stage= as"
    ):
        protocol.run(models, Retriever(DL21), tmp_path, seeds=[0], datasets=datasets)
    first = {"msmarco-document": Retriever(*V1), "msmarco-document-v2": Retriever(DL21)}
    protocol.run(models, first, tmp_path, seeds=[0], datasets=datasets)
    assert first["msmarco-document"].asked == TRAIN.qids
    assert first["msmarco-document-v2"].asked == DL21.qids
    with pytest.raises(ValueError, match="no retriever for 'msmarco-document-v2', only for msmarco-document"):
        protocol.run(models, {"msmarco-document": first["msmarco-document"]}, tmp_path, datasets=datasets)


# Robust04.


@pytest.mark.parametrize("variant", ["title", "description"])
def test_robust04(variant, msmarco, models, tmp_path):
    protocol = ld.protocols[f"robust04-{variant}"]
    given = {"start_from": msmarco[0], "datasets": ROBUST04, "seeds": [1]}
    results = protocol.run(models, Retriever(ROBUST), tmp_path, **given)
    assert results.qids == [qid for qid in ROBUST.qids if qid != "305"]  # has no relevant document
    run = candidates(ROBUST, variant, ("title", "body"))
    run = run[run["qid"] != "305"]
    start = ld.LongDocReranker.load(models_folder(msmarco[0], "MaxP", 1) / "model")
    start.training = TrainingArgs(queries_per_step=2, learning_rates={"": 1e-3}, seed=1)
    folds = protocol.fold_qids(ROBUST04)
    assert folds == [ROBUST.qids[i::5] for i in range(5)]
    by_hand = ld.k_fold_fit(start, run, ROBUST.get_qrels(), folds)
    assert scores(results.run("MaxP", 1)) == scores(by_hand.run)
    again = protocol.run(models, Retriever(ROBUST), tmp_path, **given)
    pd.testing.assert_frame_equal(again.table, results.table)


def test_where_models_start(msmarco, models, cross_encoder, tmp_path):
    protocol = ld.protocols["robust04-title"]
    given = {"datasets": ROBUST04, "seeds": [0]}
    with pytest.raises(
        ValueError, match=r"start from those of protocols\['msmarco-document'\]: give the folder of its run"
    ):
        protocol.run(models, Retriever(ROBUST), tmp_path / "a", **given)
    with pytest.raises(FileNotFoundError, match="no finished model 'MaxP' with seed 5"):
        protocol.run(models, Retriever(ROBUST), tmp_path / "a", **{**given, "seeds": [5]}, start_from=msmarco[0])
    with pytest.raises(ValueError, match=r"True must be a folder, a model, or a function"):
        protocol.run(models, Retriever(ROBUST), tmp_path / "a", **given, start_from=True)
    trained = ld.LongDocReranker.load(models_folder(msmarco[0], "MaxP", 0) / "model")
    zero_shot = protocol.run(
        ["MaxP"], Retriever(ROBUST), tmp_path / "b", **given, trained=trained, arguments={"batch_size": 5}
    )
    run = candidates(ROBUST, "title", ("title", "body"))
    expected = scores(trained(run[run["qid"] != "305"]))
    assert scores(zero_shot.run("MaxP", 0)) == pytest.approx(expected, abs=1e-4)  # other batches, other rounding
    asked = []

    def of(name, seed):
        asked.append((name, seed))
        return str(models_folder(msmarco[0], "MaxP", 0) / "model")

    ours = protocol.run(models, Retriever(ROBUST), tmp_path / "c", **given, start_from=of)
    assert asked == [("MaxP", 0)]
    scratch = protocol.run(models, Retriever(ROBUST), tmp_path / "d", **given, start_from=False)
    assert scores(ours.run("MaxP", 0)) != scores(scratch.run("MaxP", 0))


# FarRelevant.


def far_folder(folder):
    """The released files in small."""
    docs = [{"DOCNO": docno, "text_raw": fields["body"]} for docno, fields in TRAIN.docs.items()]
    path = folder / "input_data" / "docs"
    path.mkdir(parents=True)
    (path / "AnswerFields.jsonl").write_text("\n".join(map(json.dumps, docs)))
    for part, dataset in (("bitext", TRAIN), ("dev_official_sample1K", DEV)):
        path = folder / "input_data" / part
        path.mkdir()
        topics = [{"DOCNO": q, "text_raw": word} for q, word in zip(dataset.qids, dataset.words, strict=True)]
        (path / "QuestionFields.jsonl").write_text("\n".join(map(json.dumps, topics)))
        (path / "qrels.txt").write_text("".join(f"{q} 0 {d} {label}\n" for q, d, label, _ in dataset.judged))
    return folder


def test_far_relevant(msmarco, models, tmp_path, monkeypatch):
    collection = ld.read_far_relevant(far_folder(tmp_path / "data"))
    retriever, protocol = Retriever(*V1), replace(ld.protocols["far-relevant"], max_train_queries=4)
    given = {"seeds": [0], "start_from": msmarco[0]}
    with pytest.raises(ValueError, match="no dataset 'far-relevant': say where the data is with datasets="):
        protocol.run(models, retriever, tmp_path / "run", **given)
    results = protocol.run(models, retriever, tmp_path / "run", **given, datasets={"far-relevant": collection})
    trained_on = [qid for qid in retriever.asked if qid in TRAIN.qids]
    assert len(trained_on) == 4
    assert sorted(results.qids) == sorted(DEV.qids)
    start = ld.LongDocReranker.load(models_folder(msmarco[0], "MaxP", 0) / "model")
    start.training = TrainingArgs(queries_per_step=2, learning_rates={"": 1e-3}, seed=0)
    run, qrels = candidates(TRAIN, fields=("body",)), TRAIN.get_qrels()
    start.fit(run[run["qid"].isin(trained_on)], qrels[qrels["qid"].isin(trained_on)])
    assert scores(results.run("MaxP", 0)) == scores(start(candidates(DEV, fields=("body",))))


# The rest.


def test_models_without_fit_and_figures_of_the_paper(tmp_path):
    class Reversed(pt.Transformer):
        def transform(self, inp):
            assert inp["text"].str.startswith("http ").all()
            return inp.assign(score=-inp["score"])

    protocol = replace(ld.protocols["msmarco-document"], depth=5)
    datasets = {"irds:msmarco-document/dev": DEV}
    systems = {"maxp": lambda seed: Reversed(), "firstp": lambda seed: Reversed()}
    results = protocol.run(systems, Retriever(*V1), tmp_path, seeds=[0], datasets=datasets)
    assert results.statistics.partner == {"maxp": "firstp"}
    best = candidates(DEV).sort_values("score", ascending=False).groupby("qid").head(5)
    assert scores(results.run("first stage")) == scores(best)
    assert scores(results.run("maxp", 0)) == {key: -score for key, score in scores(best).items()}
    compared = protocol.compare(results)
    assert compared["published"].tolist() == [0.392, 0.394]
    assert compared["own"].tolist() == results.means.loc[["maxp", "firstp"], "RR@100"].tolist()
    assert compared["own"].nunique() == 1


def test_a_model_that_reads_less_of_the_query(cross_encoder, tmp_path):
    models = {"MaxP": lambda seed: maxp(cross_encoder, max_query_len=8)}
    with pytest.warns(UserWarning, match="'MaxP' reads 8 tokens of a query; in the paper 32"):
        ld.protocols["msmarco-document"].run(models, Retriever(*V1), tmp_path, seeds=[0], datasets=MSMARCO)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"models": {}}, "needs at least one model"),
        ({"models": {"MaxP": "maxp"}}, "needs a function of the seed for each name, but 'MaxP' has none"),
        ({"models": {"MaxP": ld.MaxP()}}, "needs a function of the seed for each name"),
        ({"models": "maxp"}, "must be a dict of functions by name, or a list of presets' names"),
        ({"models": ["max-p"]}, "no preset 'max-p'; known are firstp"),
        ({"models": {"first stage": lambda seed: None}}, "none can be named 'first stage'"),
        ({"arguments": {"device": "cpu"}}, "arguments= are for presets and trained models"),
        ({"seeds": []}, "must be a list of whole numbers"),
        ({"datasets": {"irds:gov2": DEV}}, "datasets= has 'irds:gov2', which this protocol does not use"),
        (
            {"models": {"MaxP": lambda seed: ld.MaxP(text_field="body")}},
            "'MaxP' reads 'body'; here .* are in the column 'text'",
        ),
    ],
)
def test_bad_input(changes, message, tmp_path):
    arguments = {"models": {"MaxP": lambda seed: ld.MaxP()}, "datasets": MSMARCO, "seeds": [0], **changes}
    with pytest.raises(ValueError, match=message):
        ld.protocols["msmarco-document"].run(first_stage=Retriever(*V1), folder=tmp_path, **arguments)


def test_the_same_model_for_all_seeds_is_refused(cross_encoder, tmp_path):
    one = maxp(cross_encoder)
    with pytest.raises(ValueError, match="must make a new model at each call"):
        ld.protocols["msmarco-document"].run(
            {"MaxP": lambda seed: one}, Retriever(*V1), tmp_path, seeds=[0, 1], datasets=MSMARCO
        )
