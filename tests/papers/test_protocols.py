"""The papers' protocols, on stand-ins of the same form as the collections: ids, fields, graded labels, variants."""

from __future__ import annotations

from copy import copy
from dataclasses import replace
from weakref import WeakSet

import numpy as np
import pandas as pd
import pyterrier as pt
import pytest

import pyterrier_longdoc as ld
from pyterrier_longdoc.common.files import write_jsonl, write_lines
from pyterrier_longdoc.papers.protocols import Protocol, TopicSet, models_folder, preset_factory
from pyterrier_longdoc.training import TrainingArgs, add_judged, k_fold_fit, recipes

from ..support import tiny
from ..support.systems import make

pytestmark = [
    pytest.mark.filterwarnings("ignore::pyterrier_longdoc.experiment.ExperimentWarning"),
    pytest.mark.filterwarnings("ignore::pyterrier_longdoc.common.frames.TruncationWarning"),
]

MSMARCO_FIELDS = ("url", "title", "body")
NAMES, FILLER = tiny.WORDS[19:31], tiny.WORDS[:19]
FAST = TrainingArgs(queries_per_step=2, learning_rates={"": 1e-3})


class StandIn:
    """A dataset like PyTerrier's of ir_datasets: topics `first, ...` are about one word each, found in the body."""

    def __init__(self, first: int, words: list[str], *, fields=MSMARCO_FIELDS, variants=(), grades=(1,), prefix="D"):
        self.fields, self.variants, self.words = fields, variants, words
        self.qids = [str(first + i) for i in range(len(words))]
        rng = np.random.default_rng(first)
        self.docs = {}
        for i, word in enumerate(words):
            for number in range(2):
                body = " ".join([*rng.choice(FILLER, 6), word])
                values = {"url": "http", "title": f"{word} title", "body": body, "headings": "no", "text": body}
                self.docs[f"{prefix}{i}.{number}"] = {name: values[name] for name in fields}
        self.judged = [
            (qid, f"{prefix}{i}.{number}", grade, "0")
            for i, qid in enumerate(self.qids)
            for number, grade in enumerate([*grades, 0][:2])
        ]

    def get_topics(self, variant=None):
        assert variant in (self.variants or (None,))
        queries = [f"find a {word}" if variant == "description" else word for word in self.words]
        return pd.DataFrame({"qid": self.qids, "query": queries})

    def get_qrels(self, variant=None):
        assert variant is None
        return pd.DataFrame(self.judged, columns=["qid", "docno", "label", "iteration"])

    def text_loader(self, fields):
        assert set(fields) <= set(self.fields)
        texts = lambda inp, name: [self.docs[docno][name] for docno in inp["docno"]]  # noqa: E731
        return pt.apply.generic(lambda inp: inp.assign(**{name: texts(inp, name) for name in fields}))

    def part(self, qids):
        """The same with some of the topics, as a fold is."""
        part = copy(self)
        chosen = [i for i, qid in enumerate(self.qids) if qid in qids]
        part.qids, part.words = [self.qids[i] for i in chosen], [self.words[i] for i in chosen]
        part.judged = [row for row in self.judged if row[0] in qids]
        return part


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


class Fitted(pt.Transformer):
    """Something with `fit` that is not of this package."""

    def fit(self, *frames):
        return self

    def transform(self, inp):
        return inp


TRAIN, DEV = StandIn(100, NAMES[:6]), StandIn(200, NAMES[6:9], prefix="E")
DL19, DL20 = (StandIn(first, NAMES[9:11], grades=(3, 1), prefix=p) for first, p in ((300, "F"), (400, "G")))
V1 = (TRAIN, DEV, DL19, DL20)
for _dataset in V1:
    _dataset.docs = {docno: text for dataset in V1 for docno, text in dataset.docs.items()}
DL21 = StandIn(500, NAMES[:2], fields=("url", "title", "headings", "body"), grades=(2, 1), prefix="msmarco_doc_")
TRAIN_ID = "irds:msmarco-document/train"
DEV_ID = "irds:msmarco-document/dev"
MSMARCO = {TRAIN_ID: TRAIN, DEV_ID: DEV}
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


def run_msmarco(models, retriever, folder, **changes):
    protocol = replace(ld.protocols["msmarco-document"], **changes)
    return protocol.run(models, retriever, folder, seeds=SEEDS, datasets=MSMARCO)


@pytest.fixture(scope="module")
def msmarco(models, tmp_path_factory):
    """MS MARCO's protocol, done: folder, retriever and results."""
    folder, retriever = tmp_path_factory.mktemp("msmarco"), Retriever(*V1)
    return folder, retriever, run_msmarco(models, retriever, folder)


def trained(msmarco, seed):
    """A model of that run."""
    return ld.CrossEncoder.load(models_folder(msmarco[0], "MaxP", seed) / "model")


def candidates(dataset, variant=None, fields=MSMARCO_FIELDS):
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
        name: (p.depth, p.metrics[0], p.alpha, p.recipe, p.start, p.max_query_len, p.max_doc_len, p.training(0).judged)
        for name, p in ld.protocols.items()
    }
    dl = (100, "nDCG@10", 0.05, "boytsov2025", None, 32, 1431, "all")
    robust = (1000, "nDCG@20", 0.05, "robust04", "msmarco-document", 32, 1431, "all")
    assert shown == {
        "msmarco-document": (100, "RR@100", 0.01, "boytsov2025", None, 32, 1431, "all"),
        **dict.fromkeys(("trec-dl", "trec-dl-2019", "trec-dl-2020", "trec-dl-2021"), dl),
        **dict.fromkeys(("robust04-title", "robust04-description"), robust),
        "far-relevant": (100, "RR@100", 0.01, "boytsov2025", "msmarco-document", 32, 1431, "all"),
    }
    assert ld.protocols["far-relevant"].max_train_queries == 50_000
    assert list(ld.protocols.table()["name"]) == list(shown)
    # Nothing is ever trained on v2.
    assert {p.train.corpus for p in ld.protocols.values() if p.train} == {"msmarco-document", "far-relevant"}
    assert {p.published for p in ld.protocols.values() if p.published} <= set(ld.presets["maxp"].published)


def test_presets_get_the_recipe_of_the_protocol():
    def training(protocol, preset):
        return preset_factory(ld.protocols[protocol], preset, {})(7).training

    (ms_marco,), (robust,) = recipes("boytsov2025", seed=7), recipes("robust04", seed=7)
    assert training("msmarco-document", "maxp") == training("far-relevant", "parade-rand-l2") == ms_marco
    assert training("trec-dl", "parade-rand-l2") == replace(ms_marco, epochs=2)
    assert training("robust04-title", "parade-rand-l2") == training("robust04-title", "maxp") == robust
    # A pre-trained aggregator learns as slowly as the backbone.
    own = {"encoder.": 1e-5, "encoder.interaction.": 1e-4, "head.aggregator.": 1e-5, "": 1e-4}
    assert training("msmarco-document", "parade-lateir-l6") == replace(ms_marco, epochs=3, learning_rates=own)
    assert (
        preset_factory(ld.protocols["robust04-title"], "maxp", {"training": FAST, "batch_size": 3})(7).batch_size == 3
    )
    assert not hasattr(preset_factory(ld.protocols["robust04-title"], "firstp-e5-4k", {})(7), "fit")


# MS MARCO.


@pytest.mark.bytes
def test_msmarco(msmarco, models):
    _, retriever, results = msmarco
    assert set(retriever.asked) == {*TRAIN.qids, *DEV.qids}
    assert results.names == ["first stage", "MaxP"]
    assert results.seeds["MaxP"] == SEEDS
    assert results.statistics.alpha == 0.01
    assert results.table["RR@100 p-value"].notna().tolist() == [False, True]
    # By hand.
    model = models["MaxP"](1)
    model.max_doc_len, model.training = 1431, replace(FAST, seed=1)
    model.fit(candidates(TRAIN), TRAIN.get_qrels())
    assert scores(results.run("MaxP", 1)) == scores(model(candidates(DEV)))
    assert scores(results.run("MaxP", 0)) != scores(results.run("MaxP", 1))
    assert scores(results.run("first stage")) == scores(candidates(DEV))
    assert scores(trained(msmarco, 1)(candidates(DEV))) == scores(results.run("MaxP", 1))


def test_again_is_read_from_the_folder(msmarco, models, monkeypatch):
    folder, _, results = msmarco
    monkeypatch.setattr(ld.MaxP, "fit", lambda *_: pytest.fail("trained again"))
    monkeypatch.setattr(ld.MaxP, "transform", lambda *_: pytest.fail("scored again"))
    retriever, made, in_memory = Retriever(*V1), WeakSet(), []

    def model(seed):
        in_memory.append(len(made))
        new = models["MaxP"](seed)
        made.add(new)
        return new

    again = run_msmarco({"MaxP": model}, retriever, folder)
    pd.testing.assert_frame_equal(again.table, results.table)
    assert set(retriever.asked) == set(DEV.qids)
    assert set(in_memory) == {0}


def test_folder_of_models_that_were_trained_otherwise(msmarco, models, cross_encoder, monkeypatch):
    monkeypatch.setattr(ld.MaxP, "fit", lambda *_: pytest.fail("trained before the folder was looked at"))
    other = {"MaxP": lambda seed: maxp(cross_encoder, seed=seed, training=replace(FAST, epochs=2))}
    other = {"New": models["MaxP"], **other}
    with pytest.raises(ValueError, match="epochs"):
        run_msmarco(other, Retriever(*V1), msmarco[0])
    with pytest.raises(ValueError, match="protocol"):
        run_msmarco(models, Retriever(*V1), msmarco[0], depth=3)


def pairs(frame):
    return set(zip(frame["qid"], frame["docno"], strict=True))


# TREC DL.


@pytest.mark.bytes
def test_years_are_pooled(msmarco, tmp_path):
    v1, v2 = Retriever(*V1), Retriever(DL21)
    first = {"msmarco-document": v1, "msmarco-document-v2": v2}
    results = ld.protocols["trec-dl"].run(["MaxP"], first, tmp_path, seeds=SEEDS, trained=msmarco[0], datasets=DL)
    assert v2.asked == DL21.qids
    assert v1.asked == DL19.qids + DL20.qids
    years = dict(zip((2019, 2020, 2021), DL.values(), strict=True))
    assert results.qids == [f"trec-dl-{year}:{qid}" for year, dataset in years.items() for qid in dataset.qids]
    assert not (tmp_path / "models").exists()  # nothing is trained
    run, model = results.run("MaxP", 1), trained(msmarco, 1)
    for year, dataset in years.items():
        own = run[run["qid"].str.startswith(f"trec-dl-{year}:")]
        expected = {(f"trec-dl-{year}:{qid}", d): s for (qid, d), s in scores(model(candidates(dataset))).items()}
        assert scores(own) == expected
    given = {"seeds": SEEDS, "trained": msmarco[0], "datasets": {list(DL)[2]: DL21}}
    of_2021 = ld.protocols["trec-dl-2021"].run(["MaxP"], v2, tmp_path / "2021", **given)
    pooled = results.subset(qid for qid in results.qids if "2021" in qid)
    assert of_2021.means.loc["MaxP"].tolist() == pytest.approx(pooled.means.loc["MaxP"].tolist())


def test_trained_on_v1_for_v2(models, tmp_path):
    first = {"msmarco-document": Retriever(*V1), "msmarco-document-v2": Retriever(DL21)}
    datasets = {TRAIN_ID: TRAIN, list(DL)[2]: DL21}
    ld.protocols["trec-dl-2021"].run(models, first, tmp_path, seeds=[0], datasets=datasets)
    assert [retriever.asked for retriever in first.values()] == [TRAIN.qids, DL21.qids]


# Robust04.


@pytest.mark.slow
def test_robust04(msmarco, cross_encoder, tmp_path, monkeypatch):
    """Trained on judged documents of the other folds, and tested on retrieved ones."""
    fitted_on, fit = [], ld.MaxP.fit
    monkeypatch.setattr(ld.MaxP, "fit", lambda self, *data: fitted_on.append(data[0]) or fit(self, *data))
    protocol, recipe = ld.protocols["robust04-title"], replace(FAST, judged="all", negative_pool=2)
    models = {"MaxP": lambda seed: maxp(cross_encoder, training=recipe)}
    # Of the topic 302 nothing is retrieved: its text comes from the topics. Of the others five documents are.
    spoken = pt.apply.generic(lambda inp: inp[inp["qid"] != "302"])
    retriever = spoken >> Retriever(ROBUST) % 5
    given = {"start_from": msmarco[0], "datasets": ROBUST04, "seeds": [1]}
    results = protocol.run(models, retriever, tmp_path, **given)
    kept = ROBUST.get_topics("title").query("qid != '305'")
    run = retriever(kept)
    assert set(scores(results.run("MaxP", 1))) == pairs(run)
    run = run.drop(columns="query").merge(kept, on="qid")[["qid", "query", "docno", "score"]]
    loader = pt.apply.text(lambda row: " ".join(ROBUST.docs[row.docno].values()))
    qrels = ROBUST.get_qrels()[ROBUST.get_qrels()["qid"] != "305"]
    start, folds = trained(msmarco, 1), [ROBUST.qids[i::5] for i in range(5)]
    start.training = replace(recipe, seed=1)
    own = add_judged(loader(run), qrels, topics=kept, text_loader=loader)
    by_hand = k_fold_fit(start, loader(run), qrels, folds, training_run=own)
    assert scores(results.run("MaxP", 1)) == scores(by_hand.run)
    assert {("302", "D1.0"), ("302", "D1.1")} <= pairs(pd.concat(fitted_on))


def test_a_dataset_that_replaces_none_is_refused(msmarco, models, tmp_path):
    datasets = {TRAIN_ID: TRAIN, "msmarco": DEV}
    with pytest.raises(ValueError, match=f"datasets='msmarco' must be one of .*'{TRAIN_ID}'"):
        ld.protocols["msmarco-document"].run(models, msmarco[1], tmp_path, datasets=datasets)
    assert not list(tmp_path.iterdir())


def test_nothing_is_trained_on_test_topics(models, tmp_path):
    with pytest.raises(ValueError, match="neither train= nor folds="):
        replace(ld.protocols["msmarco-document"], train=None).run(
            models, Retriever(*V1), tmp_path, seeds=[0], datasets={DEV_ID: DEV}
        )
    assert not list(tmp_path.iterdir())


def test_where_models_start(msmarco, models, tmp_path):
    protocol, retriever = ld.protocols["robust04-title"], Retriever(ROBUST)
    given = {"datasets": ROBUST04, "seeds": [0]}
    with pytest.raises(ValueError, match=r"protocols\['msmarco-document'\]"):
        protocol.run(models, retriever, tmp_path, **given)
    folds = [ROBUST.qids[i::5] for i in range(5)]
    assert protocol.fold_qids(ROBUST04) == folds
    assert replace(protocol, test=(*protocol.test, TopicSet(DEV_ID))).fold_qids({**ROBUST04, DEV_ID: DEV}) == folds
    asked = []

    def zero_shot(name, seed):
        asked.append((name, seed))
        return trained(msmarco, seed)

    results = protocol.run(["MaxP"], retriever, tmp_path / "function", **given, trained=zero_shot)
    assert asked == [("MaxP", 0)]
    run = candidates(ROBUST, "title", ("title", "body"))
    expected = scores(trained(msmarco, 0)(run[run["qid"] != "305"]))
    assert scores(results.run("MaxP", 0)) == expected
    arguments = {"batch_size": 5}
    other = protocol.run(["MaxP"], retriever, tmp_path / "b", **given, trained=msmarco[0], arguments=arguments)
    assert scores(other.run("MaxP", 0)) == pytest.approx(expected, abs=1e-4)  # other batches, other rounding


# FarRelevant.


def far_folder(folder):
    """The released files in small."""
    docs = [{"DOCNO": docno, "text_raw": fields["body"]} for docno, fields in TRAIN.docs.items()]
    write_jsonl(folder / "docs" / "AnswerFields.jsonl", docs)
    for part, dataset in (("bitext", TRAIN), ("dev_official_sample1K", DEV)):
        topics = [{"DOCNO": q, "text_raw": word} for q, word in zip(dataset.qids, dataset.words, strict=True)]
        write_jsonl(folder / part / "QuestionFields.jsonl", topics)
        write_lines(folder / part / "qrels.txt", (f"{q} 0 {d} {label}" for q, d, label, _ in dataset.judged))
    return folder


def test_far_relevant(msmarco, models, tmp_path, monkeypatch):
    collection = ld.read_far_relevant(far_folder(tmp_path / "data"))
    retriever, protocol = Retriever(*V1), replace(ld.protocols["far-relevant"], max_train_queries=4)
    given = {"seeds": [0], "start_from": msmarco[0]}
    results = protocol.run(models, retriever, tmp_path / "run", **given, datasets={"far-relevant": collection})
    trained_on = [qid for qid in retriever.asked if qid in TRAIN.qids]
    assert trained_on == TRAIN.qids[:4]  # the first of the file
    assert sorted(results.qids) == sorted(DEV.qids)
    start = trained(msmarco, 0)
    start.training = replace(FAST, seed=0)
    run, qrels = candidates(TRAIN, fields=("body",)), TRAIN.get_qrels()
    start.fit(run[run["qid"].isin(trained_on)], qrels[qrels["qid"].isin(trained_on)])
    assert scores(results.run("MaxP", 0)) == scores(start(candidates(DEV, fields=("body",))))
    monkeypatch.chdir(msmarco[0].parent)
    given = {"seeds": [0], "start_from": msmarco[0].name, "datasets": {"far-relevant": collection}}
    again = protocol.run(models, retriever, tmp_path / "run", **given)
    pd.testing.assert_frame_equal(again.table, results.table)


# The rest.


def test_a_protocol_of_ones_own_on_a_folder(cross_encoder, tmp_path):
    parts = {"train": TRAIN, "test": DEV}
    write_jsonl(tmp_path / "docs.jsonl", [{"docno": d, "text": row["body"]} for d, row in TRAIN.docs.items()])
    judged = [f"{qid} 0 {docno} {label}" for part in parts.values() for qid, docno, label, _ in part.judged]
    write_lines(tmp_path / "qrels.txt", judged)
    topics = [(qid, word) for part in parts.values() for qid, word in zip(part.qids, part.words, strict=True)]
    write_lines(tmp_path / "topics.tsv", ["\t".join(topic) for topic in topics])
    write_lines(tmp_path / "splits.tsv", [f"{qid}\t{name}" for name, part in parts.items() for qid in part.qids])
    train, test = (TopicSet(f"longdoc:folder:{tmp_path}", split, split) for split in parts)
    own = Protocol(test=(test,), train=train, fields=("text",), metrics=("nDCG@10",))
    made = []

    def model(seed):
        made.append(maxp(cross_encoder, seed=seed))
        return made[-1]

    results = own.run({"MaxP": model}, Retriever(*V1), tmp_path / "run", seeds=[0])
    assert results.qids == DEV.qids
    assert made[-1].trained_on.used == len(TRAIN.qids)
    run = candidates(DEV, fields=("body",))
    assert scores(results.run("MaxP", 0)) == pytest.approx(scores(made[-1](run)), rel=1e-5)


def test_models_without_fit_and_figures_of_the_paper(tmp_path):
    class Reversed(pt.Transformer):
        def transform(self, inp):
            assert inp["text"].str.startswith("http ").all()
            return inp.assign(score=-inp["score"])

    protocol = replace(ld.protocols["msmarco-document"], depth=5)
    datasets = {DEV_ID: DEV}
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


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"models": ["max-p"]}, "max-p"),
        ({"trained": "nowhere"}, "nowhere"),
        ({"trained": lambda name, seed: Fitted(), "arguments": {"batch_size": 3}}, "arguments="),
        ({"models": "one model for all seeds", "seeds": [0, 1]}, "new model"),
        ({"models": {"own": lambda seed: Fitted()}}, "'own' must be a reranker"),
        ({"arguments": {"device": "cpu"}}, "arguments="),
        ({"seeds": []}, "seeds"),
        ({"models": {"own": Fitted()}}, r"models\['own'\] must be a function of a seed: lambda seed: Fitted"),
        ({"datasets": {**MSMARCO, DEV_ID: TRAIN.part(TRAIN.qids[:1])}}, r"1 queries are both in training .*/train\)"),
    ],
)
def test_bad_input(changes, message, tmp_path, cross_encoder):
    one = maxp(cross_encoder)
    changes = {
        name: {"MaxP": lambda seed: one} if name == "models" and "seeds" in changes else value
        for name, value in changes.items()
    }
    arguments = {"models": {"MaxP": lambda seed: maxp(cross_encoder)}, "datasets": MSMARCO, "seeds": [0], **changes}
    with pytest.raises((ValueError, KeyError, FileNotFoundError), match=message):
        ld.protocols["msmarco-document"].run(first_stage=Retriever(*V1), folder=tmp_path, **arguments)
