"""`Experiment`: as `pt.Experiment` where that can do it; seeds, shared first stages, checks and bad arguments."""

import functools
import re
import warnings

import pandas as pd
import pyterrier as pt
import pytest
from ir_measures import AP, RR, P, R, nDCG
from scipy import stats
from statsmodels.stats.multitest import multipletests

import pyterrier_longdoc as ld
from pyterrier_longdoc.experiment import Experiment, ExperimentWarning
from pyterrier_longdoc.training import fit_on_best_segments

from ..support import synthetic
from ..support.systems import make
from ..support.toy import toy_task

METRICS = [nDCG @ 10, AP, "recip_rank", P @ 5, R(rel=2) @ 20, "ndcg_cut_20"]
TOPICS, QRELS = synthetic.collection()
FOLDS = [TOPICS["qid"].iloc[i::3].tolist() for i in range(3)]

pytestmark = pytest.mark.filterwarnings("ignore")


def assert_same(systems, topics, qrels, metrics, *, baseline, **options):
    """Compares all columns; PyTerrier leaves their order to chance, and equal systems without a p-value."""
    expected = pt.Experiment(systems, topics, qrels, metrics, baseline=baseline, **options)
    others = expected["name"] != (list(systems)[baseline] if isinstance(baseline, int) else baseline)
    for column in expected.columns[expected.columns.str.endswith(" p-value")]:
        if expected.loc[others, column].isna().any():
            expected.loc[others, column] = expected.loc[others, column].fillna(1.0)
            if "correction" in options:
                p, method = expected.loc[others, column], options["correction"]
                rejected, corrected, _, _ = multipletests(p, alpha=0.05, method=method)
                expected.loc[others, column.replace("p-value", "reject")] = rejected
                expected.loc[others, f"{column} corrected"] = corrected
    results = Experiment(systems, topics, qrels, metrics, baseline=baseline, **options)
    assert sorted(expected) == sorted(results.table)
    pd.testing.assert_frame_equal(results.table, expected[results.table.columns], check_exact=False, rtol=1e-12)
    return results


@pytest.fixture
def doubtful():
    """Runs with everything that evaluation treats in a special way."""
    good, other = synthetic.run(TOPICS, 1.0, 1), synthetic.run(TOPICS, 0.5, 2)
    return {
        "good": good,
        "same": good.copy(),
        "tied": other.assign(score=other["score"].round()),
        "float32 ties": other.assign(score=1 + 1e-9 * other["score"]),
        "missing": other[~other["qid"].isin(["q3", "q7"])],
        "unsorted": other.sample(frac=1.0, random_state=0),
        "repeated": pd.concat([other, other.head(20).assign(score=-5.0)]),
        "float32": other.astype({"score": "float32"}),
    }


@pytest.mark.parametrize(
    "options",
    [
        {},
        *({"correction": correction} for correction in ("holm", "bonferroni", "fdr_bh", "hs", "fdr_tsbky")),
        {"test": "wilcoxon"},
        {"test": lambda x, y: stats.mannwhitneyu(x, y)},
    ],
    ids=lambda options: ", ".join(f"{name}={getattr(value, '__name__', value)}" for name, value in options.items()),
)
def test_ties_missing_queries_and_equal_systems_are_as_in_pyterrier(doubtful, options):
    results = assert_same(
        doubtful, TOPICS, QRELS, METRICS if not options else ["num_rel", "map"], baseline=0, **options
    )
    if not options:
        p = results.table.set_index("name")["AP p-value"]
        assert p["same"] == 1.0
        assert p["unsorted"] == p["float32"]


@pytest.mark.parametrize("left_out", [None, "q3"])
def test_perquery_has_the_rows_of_pyterrier_without_those_of_unjudged_topics(doubtful, left_out):
    judged = QRELS[QRELS["qid"] != left_out]
    expected = pt.Experiment(doubtful, TOPICS, judged, METRICS, perquery=True)
    assert expected["qid"][expected["value"].isna()].unique().tolist() == ([] if left_out is None else [left_out])
    keys = ["name", "qid", "measure"]
    results = Experiment(doubtful, TOPICS, judged, METRICS)
    ours, theirs = (f.sort_values(keys, ignore_index=True) for f in (results.perquery, expected.dropna(subset="value")))
    pd.testing.assert_frame_equal(ours, theirs, check_exact=True)


def test_unjudged_topics_and_judgements_of_other_topics_are_as_in_pyterrier(doubtful):
    for topics, qrels in ((TOPICS, QRELS.head(60)), (TOPICS.head(20), QRELS)):
        for options in ({}, {"filter_by_topics": False}, {"filter_by_qrels": True}):
            assert_same(doubtful, topics, qrels, ["num_ret", "map"], baseline="missing", **options)


def test_names_of_measures_are_understood_like_the_measures():
    run = synthetic.run(TOPICS, 1.0, 1)
    table = Experiment([run], TOPICS, QRELS, ["nDCG@10", nDCG @ 5, "map", AP, "RR@10"], names=["a"]).table
    assert table.columns.tolist() == ["name", "nDCG@10", "nDCG@5", "map", "RR@10"]
    assert table.loc[0, "RR@10"] == pytest.approx(pt.Evaluate(run, QRELS, [RR @ 10])["RR@10"], rel=1e-12)


@pytest.mark.parametrize("metrics", [[AP, "map"], ["map", AP], ["ndcg_cut_10", nDCG @ 10], [nDCG @ 10, "ndcg_cut_10"]])
def test_a_measure_given_under_two_names_is_named_as_in_pyterrier(metrics):
    assert_same({"a": synthetic.run(TOPICS, 1.0, 1)}, TOPICS, QRELS, metrics, baseline=None)


def test_labels_and_qids_may_be_of_any_type():
    run = synthetic.run(TOPICS, 1.0, 1)
    expected = Experiment([run], TOPICS, QRELS, METRICS, names=["a"]).table
    for labels in (QRELS["label"].astype(float), QRELS["label"].astype(str), QRELS["label"].astype("Int64")):
        found = Experiment([run], TOPICS, QRELS.assign(label=labels), METRICS, names=["a"]).table
        pd.testing.assert_frame_equal(found, expected)
    run, topics, qrels = (frame.assign(qid=frame["qid"].str[1:].astype(int)) for frame in (run, TOPICS, QRELS))
    pd.testing.assert_frame_equal(Experiment([run], topics, qrels, METRICS, names=["a"]).table, expected)


@pytest.mark.parametrize("label", [0.5, float("nan")])
def test_labels_that_are_not_whole_numbers_are_refused(label):
    qrels = QRELS.astype({"label": object})
    qrels.loc[3, "label"] = label
    with pytest.raises(ValueError, match=f"label.* {label!r} in row 3"):
        Experiment([synthetic.run(TOPICS, 1.0, 1)], TOPICS, qrels, METRICS, names=["a"])


def test_values_are_averaged_over_seeds_before_the_test():
    a, b = ([synthetic.run(TOPICS, quality, seed) for seed in seeds] for quality, seeds in ((1, (0, 1)), (0.5, (2, 3))))
    results = Experiment({"a": a, "b": b}, TOPICS, QRELS, ["nDCG@5", "AP"], baseline=["b"])
    of_seeds = [pt.Experiment(runs, TOPICS, QRELS, ["map"], names=["0", "1"], perquery=True) for runs in (a, b)]
    [p] = results.table["AP p-value"].dropna()
    per_query = (frame.groupby("qid")["value"].mean() for frame in of_seeds)
    assert p == pytest.approx(stats.ttest_rel(*per_query).pvalue, rel=1e-9)
    spread = of_seeds[0].groupby("name")["value"].mean().std()
    assert results.stds.loc["a", "AP"] == results.table.loc[0, "AP std"] == pytest.approx(spread, rel=1e-9)
    assert results.perseed["seed"].tolist() == 2 * ([0] * 60 + [1] * 60)
    assert len(results.perquery) == 2 * 30 * 2


def test_shared_first_stages_run_once_and_inputs_are_unchanged():
    calls, run, before = [], synthetic.run(TOPICS, 1.0, 0), TOPICS.copy()
    first = pt.apply.generic(lambda topics: calls.append(len(topics)) or run.merge(topics), transform_outputs=list)
    damage = pt.apply.generic(lambda frame: frame.__setitem__("score", 1.0) or frame)
    results = Experiment({"a": first >> damage, "b": first >> pt.Transformer.identity()}, TOPICS, QRELS, ["AP"])
    assert calls == [30]
    assert results.means.loc["b", "AP"] == pytest.approx(pt.Evaluate(run, QRELS, ["map"])["map"], rel=1e-12)
    pd.testing.assert_frame_equal(TOPICS, before)
    batched = Experiment({"a": first, "b": first >> damage}, TOPICS, QRELS, ["AP"], batch_size=8)
    assert calls[1:] == [8, 8, 8, 6] * 2
    assert batched.means["AP"].tolist() == results.means["AP"].tolist()[::-1]


class FirstStage(pt.Transformer):
    """The best documents of a run; how many may be changed."""

    def __init__(self, run, depth):
        self.run, self.depth = run, depth

    def transform(self, inp):
        return pt.model.add_ranks(inp[["qid", "query"]].merge(self.run, on="qid")).query("rank < @self.depth")


def test_a_factory_can_change_a_shared_first_stage():
    first = FirstStage(synthetic.run(TOPICS, 1.0, 0), 3)
    models = {depth: pt.apply.doc_score(lambda row: row["score"]) for depth in (3, 6)}

    def cut_to(depth):
        first.depth = depth
        return first >> models[depth]

    systems = {depth: functools.partial(cut_to, depth) for depth in models}
    found = Experiment({"given": first >> models[3], **systems}, TOPICS, QRELS, ["num_ret", "AP"]).means
    for depth in models:
        expected = pt.Evaluate(FirstStage(first.run, depth)(TOPICS), QRELS, ["num_ret", "map"])
        assert found.loc[str(depth)].tolist() == pytest.approx([expected["num_ret"], expected["map"]])
    assert found.loc["3", "num_ret"] * 2 == found.loc["6", "num_ret"]


def found(*args, **kwargs):
    """What an experiment warns of: messages by the kind of check; and the frame of all."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        checks = Experiment(*args, **kwargs).checks
    own = [warning for warning in caught if issubclass(warning.category, ExperimentWarning)]
    assert {warning.filename for warning in own} <= {__file__}
    messages = [str(warning.message) for warning in own]
    warned = checks.drop_duplicates("check")[["check", "message"]].to_numpy().tolist()
    assert len(own) == len(warned)
    return {check: next(text for text in messages if text.startswith(message)) for check, message in warned}, checks


def test_all_failed_checks_are_listed_and_warned_about():
    good, other = synthetic.run(TOPICS, 1.0, 0), synthetic.run(TOPICS, 0.5, 1)
    warned, checks = found({"a": good, "b": other}, TOPICS, QRELS, METRICS, baseline=["a"])
    assert warned == {}
    assert checks.empty
    first_two = good["qid"].isin(["q0", "q1"])
    tied = good.copy()
    tied.loc[first_two & (good["docno"] == "d5"), "score"] = good["score"][first_two & (good["docno"] == "d6")].tolist()
    systems = {
        "good": good,
        "twin": good.copy(),
        "tied": [good, tied],  # of several seeds the worst counts
        "repeated": [other, good, other],
        "constant": good.assign(score=good["score"].mask(first_two, 3.0)),
        "nan": good.assign(score=good["score"].mask(first_two & (good["docno"] == "d5"))),
        "missing": good[~first_two],
        "shorter": good[~(first_two & (good["docno"] == "d11"))],
        "twice": pd.concat([good, good[first_two].head(1)]),
    }
    warned, checks = found(systems, TOPICS, QRELS, METRICS, baseline=["good"])
    queries = {(row.check, row.name): row.queries for row in checks.itertuples(index=False, name="Row")}
    assert queries == {
        ("tied scores", "tied"): 2,
        ("equal seeds", "repeated"): 30,
        ("constant scores", "constant"): 2,
        ("tied scores", "constant"): 2,
        ("NaN or infinite scores", "nan"): 2,
        ("missing queries", "missing"): 2,
        ("repeated documents", "twice"): 1,
        ("different candidates", "missing"): 2,
        ("different candidates", "shorter"): 2,
        ("equal systems", "twin"): 30,
        ("equal systems", "twice"): 30,
    }
    assert warned.keys() == {check for check, _ in queries}


def test_queries_without_a_relevant_candidate_are_counted():
    run, other = synthetic.run(TOPICS, 1.0, 0), synthetic.run(TOPICS, 0.5, 1)
    labels = run.merge(QRELS, how="left")["label"].to_numpy()  # all runs have the same documents in the same order
    kept = ~(run["qid"].isin(["q0", "q1", "q2"]) & (labels > 0))
    systems = {"a": run[kept], "b": other[kept], "missing": run[kept & (run["qid"] != "q1")], "whole": run}
    warned, checks = found(systems, TOPICS, QRELS, METRICS)
    rows = checks[checks["check"] == "no relevant candidate"]
    # Queries for which nothing was returned are told as missing.
    assert dict(zip(rows["name"], rows["queries"], strict=True)) == {"a": 3, "b": 3, "missing": 2}
    assert (
        warned["no relevant candidate"].count("no relevant candidate in 3 of 30 queries") == 1
    )  # once for both systems
    unjudged = QRELS.assign(label=QRELS["label"].where(QRELS["qid"] != "q5", 0))
    assert found({"whole": run}, TOPICS, unjudged, METRICS)[1][["check", "queries"]].to_numpy().tolist() == [
        ["no relevant candidate", 1]
    ]


def test_repeated_topics_are_named_and_not_taken_for_ties():
    systems = {"a": pt.Transformer.from_df(RUN[["qid", "docno", "score"]])}
    warned, checks = found(systems, pd.concat([TOPICS, TOPICS.head(2)]), QRELS, METRICS)
    assert dict(zip(checks["check"], checks["queries"], strict=True)) == {"repeated topics": 2, "repeated documents": 2}
    assert "'q0'" in warned["repeated topics"]


def test_too_few_queries_cause_a_warning():
    systems, few = {"a": synthetic.run(TOPICS, 1.0, 0), "b": synthetic.run(TOPICS, 0.5, 1)}, TOPICS.head(5)
    warned, _ = found(systems, few, QRELS, METRICS, baseline=["a"], test="wilcoxon")
    assert "0.0625" in warned["too few queries"]  # the smallest p-value of 5 queries, 2 / 2^5
    assert found(systems, few, QRELS, METRICS)[0] == {}


TASK, LABELS = toy_task(0, queries=6)
WORDS = TASK["qid"].unique().tolist()
PAIRS = [WORDS[:2], WORDS[2:4], WORDS[4:]]


def trained(encoder, qids=(), **arguments):
    """A model that was trained on these queries."""
    model = make("MaxP", encoder, training=ld.TrainingArgs(max_steps=1, metric="RR"), **arguments)
    return model.fit(TASK[TASK["qid"].isin(qids)], LABELS) if len(qids) else model


def experiment(system, **options):
    topics = TASK[["qid", "query"]].drop_duplicates()
    return Experiment({"a": system}, topics, LABELS, ["RR"], **options)


FIRST = pt.Transformer.from_df(TASK)


@pytest.mark.parametrize(
    "how", ["fit", "copy", "start_from", "save", "fit again", "BeST", "PairScorer", "preselect", "RankGPT", "artifact"]
)
def test_queries_seen_in_training_are_listed(how, cross_encoder, tmp_path):
    if how == "BeST":
        train = TASK[TASK["qid"].isin(PAIRS[0])]
        best = fit_on_best_segments(
            lambda: trained(cross_encoder), train, LABELS, TASK[TASK["qid"].isin(PAIRS[2])], LABELS, iterations=1
        )
        model = best.model
    else:
        model = trained(cross_encoder, PAIRS[0])
    if how == "copy":
        model = model.apply_attributes(batch_size=2)
    elif how == "start_from":
        model = trained(cross_encoder).start_from(model)
    elif how == "save":
        model.save(tmp_path / "model")
        model = ld.MaxP.load(tmp_path / "model")
    elif how == "fit again":
        model.fit(TASK[TASK["qid"].isin(PAIRS[1])], LABELS)
    elif how == "PairScorer":
        model = ld.MaxP(ld.PairScorer(pt.Transformer.identity() >> model))
    elif how == "preselect":
        model = trained(cross_encoder, preselect=ld.CrossEncoderWindows(2, model))
    elif how == "RankGPT":
        model = ld.RankGPT(lambda messages: "[1]", preselect=ld.CrossEncoderWindows(2, model))
    elif how == "artifact":
        model.save(tmp_path / "model")
        model = pt.Artifact.load(tmp_path / "model")
    checks = experiment(FIRST >> model).checks
    seen = checks[checks["check"] == "seen in training"]["queries"].tolist()
    assert seen == [4 if how == "fit again" else 2]


def test_models_that_have_not_seen_the_queries_of_their_fold_pass(cross_encoder):
    folds = ld.training.k_fold_fit(trained(cross_encoder), TASK, LABELS, PAIRS)
    for results in (
        experiment(FIRST >> folds),
        experiment(lambda fold: fold.fit(FIRST >> trained(cross_encoder)), folds=PAIRS),
    ):
        assert "seen in training" not in set(results.checks["check"])


@pytest.mark.parametrize("argument", ["fold", "seed"])
def test_one_model_that_is_fitted_for_several_folds_or_seeds_is_refused(argument, cross_encoder):
    model = trained(cross_encoder)
    if argument == "fold":
        factory, options = (lambda seed, fold: fold.fit(FIRST >> model)), {"seeds": [0], "folds": PAIRS}
    else:
        train = TASK[TASK["qid"].isin(PAIRS[0])]
        factory, options = (lambda seed: FIRST >> model.fit(train, LABELS)), {"seeds": [0, 1]}
    with pytest.raises(ValueError, match=f"{argument} 1 returned the same MaxP"):
        experiment(factory, **options)
    finished = trained(cross_encoder, PAIRS[0])
    assert len(experiment(lambda seed, fold: FIRST >> finished, seeds=[0, 1], folds=PAIRS).seeds["a"]) == 2


@pytest.mark.parametrize(
    ("argument", "named"), [("perquery", r"\.perquery"), ("correction_alpha", "alpha="), ("x", "'x'")]
)
def test_arguments_of_pyterrier_name_what_takes_their_place(argument, named):
    with pytest.raises(TypeError, match=named):
        experiment(FIRST, **{argument: True})


RUN, OTHER = synthetic.run(TOPICS, 1.0, 0), synthetic.run(TOPICS, 1.0, 1)
ONLY_QRELS = {"filter_by_qrels": True, "filter_by_topics": False}
BAD = [
    ({"names": ["a", "a"]}, "names"),
    ({"systems": {}}, "systems"),
    ({"systems": RUN}, "systems"),
    ({"systems": {"a": lambda seed: None}}, "seeds="),
    ({"systems": {"a": lambda seed, fold: None}, "seeds": [0]}, "folds="),
    ({"systems": {"a": [RUN]}, "seeds": [0, 1]}, "seeds="),
    ({"systems": {"a": [lambda: RUN]}}, "'a'"),
    ({"systems": {"a": lambda fold=None, state=1: RUN}, "seeds": [0, 1]}, "fold, state"),
    ({"systems": {"a": lambda **options: RUN}, "folds": FOLDS}, "options"),
    ({"systems": {"a": lambda seed: 3}, "seeds": [0]}, "a, seed 0"),
    ({"systems": {"a": RUN.drop(columns="score")}}, "score"),
    ({"systems": {"a": RUN.head(0)}}, "no document"),
    ({"seeds": [0.5, 1]}, "seeds"),
    ({"baseline": ["c"]}, "'c'"),
    ({"partner": {"a": "c"}}, "'c'"),
    ({"baseline": [2]}, "'2'"),
    ({"correction": "x", "baseline": [0]}, "correction='x'"),
    ({"test": "x"}, "test='x'"),
    ({"correction": "holm"}, "correction='holm'"),
    ({"alpha": 5}, "alpha=5"),
    ({"margin": 0}, "margin=0"),
    ({"resamples": 0}, "Experiment: resamples=0"),
    ({"round": -1}, "round=-1"),
    ({"round": {"ndcg": 2}}, "round='ndcg'"),
    ({"metrics": []}, "metrics"),
    ({"folds": [TOPICS["qid"].tolist()]}, "folds"),
    ({"folds": [*FOLDS, FOLDS[0]]}, "folds"),
    ({"metrics": ["ndcg@ten"]}, "ndcg@ten"),
    ({"metrics": ["AP", "mrt"]}, "efficiency=True"),
    ({"qrels": QRELS.drop(columns="label")}, "label"),
    ({"qrels": "qrels.txt"}, "qrels"),
    ({"qrels": QRELS.assign(qid="x")}, "qid"),
    ({"qrels": QRELS.assign(qid="x"), **ONLY_QRELS}, "no qid in common"),
    ({"topics": TOPICS.head(0), **ONLY_QRELS}, "no qid in common"),
    ({"batch_size": 0}, "batch_size"),
]


@pytest.mark.parametrize(("changes", "word"), BAD, ids=lambda value: value if isinstance(value, str) else "")
def test_errors_name_the_wrong_argument(changes, word):
    names = {} if "systems" in changes else {"names": ["a", "b"]}
    given = {"systems": [RUN, OTHER], "topics": TOPICS, "qrels": QRELS, "metrics": ["AP"], **names, **changes}
    with pytest.raises(ValueError, match=re.escape(word)):
        Experiment(**given)
