"""Training data: groups of candidates, what an epoch draws of them, a teacher's scores."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import numpy as np
import pandas as pd
import pyterrier as pt
import pytest

import pyterrier_longdoc as ld
from pyterrier_longdoc.common.frames import keys_of
from pyterrier_longdoc.training import (
    Example,
    Group,
    TeacherScores,
    TrainingArgs,
    add_judged,
    make_groups,
    pseudo_qrels,
)
from pyterrier_longdoc.training.examples import draw_epoch, examples_per_epoch, make_examples

from ..support.toy import all_of, qrels, texts_of

RUN = pd.DataFrame(
    {
        "qid": ["1", "1", "1", "1", "2", "2", "3"],
        "query": ["a", "a", "a", "a", "b", "b", "c"],
        "docno": ["d1", "d2", "d3", "d4", "d1", "d5", "d1"],
        "score": [1.0, 9.0, 5.0, 7.0, 2.0, 1.0, 3.0],
    }
)
TEXTS = [f"text of {row.docno} for {row.qid}" for row in RUN.itertuples()]


# Groups.


def groups_of(run: pd.DataFrame, judged: pd.DataFrame, args: TrainingArgs | None = None) -> list[Example]:
    """The candidates of each query that is trained on, with the texts of `RUN`."""
    return all_of(make_groups(run, judged, args), TEXTS)


def test_groups():
    judged = qrels(("1", "d3", 1), ("2", "d1", 3), ("3", "d1", 1), ("4", "d1", 1))
    groups = groups_of(RUN, judged)
    assert groups == [
        Example("1", "a", tuple(f"text of d{i} for 1" for i in (2, 4, 3, 1)), (0.0, 0.0, 1.0, 0.0)),
        Example("2", "b", ("text of d1 for 2", "text of d5 for 2"), (3.0, 0.0)),
    ]  # query 3 has no negative
    # Neither the index nor the type of the qids decides.
    assert groups_of(RUN.set_axis([0, 0, 0, 1, 1, 5, 5]), judged) == groups
    integers = judged.astype({"qid": int})
    assert groups_of(RUN, integers) == groups
    assert groups_of(RUN.astype({"qid": int}), integers.assign(iteration="Q0")) == groups
    assert groups_of(RUN.astype({"qid": int}), judged) == groups


def test_labels():
    judged = qrels(("1", "d2", 1), ("1", "d3", 3), ("1", "d4", -1))
    (group,) = make_groups(RUN, judged)
    assert group.labels.tolist() == [1.0, 0.0, 3.0, 0.0]  # d1 is not judged
    assert (group.positives, group.negatives) == ([0, 2], [1, 3])
    for changes, labels in (
        ({"min_label": 2}, (0.0, 0.0, 2.0, 0.0)),
        ({"min_label": 1.5}, (0.0, 0.0, 2.5, 0.0)),
        # Where 0 is positive, candidates without a label are below it.
        ({"min_label": 0}, (2.0, 0.0, 4.0, 0.0)),
        ({"unjudged": "skip"}, (1.0, 0.0, 3.0)),
    ):
        (group,) = groups_of(RUN, judged, TrainingArgs(**changes))
        assert group.labels == labels


@pytest.mark.parametrize("order", ["score", "rank", "rows"])
def test_negatives_up_to_a_rank(order):
    run = {
        "score": RUN,
        "rank": RUN.drop(columns="score").assign(rank=[3, 0, 2, 1, 0, 1, 0]),
        "rows": RUN.drop(columns="score"),
    }[order]
    best_first = {"score": ["d2", "d3", "d1"], "rank": ["d2", "d3", "d1"], "rows": ["d1", "d2", "d3"]}[order]
    # The rank is among all candidates: d4, the positive, takes one of the first places of score and rank.
    places = {"score": [0, 2, 3], "rank": [0, 2, 3], "rows": [0, 1, 2]}[order]
    for limit in (1, 2, 3, 4):
        (group,) = make_groups(run, qrels(("1", "d4", 1)), TrainingArgs(max_negative_rank=limit))
        expected = [d for d, place in zip(best_first, places, strict=True) if place < limit]
        assert [TEXTS[row] for row in group.rows[group.negatives]] == [f"text of {d} for 1" for d in expected]
        assert [TEXTS[row] for row in group.rows[group.positives]] == ["text of d4 for 1"]


def test_pool_of_negatives():
    frame = pd.DataFrame({"qid": "1", "query": "a", "docno": [f"d{i}" for i in range(50)]})
    judged = qrels(("1", "d7", 1), ("1", "d45", 1))
    args = TrainingArgs(negative_pool=5, max_negative_rank=20)
    (group,) = make_groups(frame, judged, args)
    assert (len(group.rows), len(group.positives)) == (7, 2)
    assert (group.rows[group.negatives] < 20).all()
    assert make_groups(frame, judged, args)[0].rows.tolist() == group.rows.tolist()
    assert make_groups(frame, judged, replace(args, seed=1))[0].rows.tolist() != group.rows.tolist()
    assert len(make_groups(frame, judged, replace(args, negative_pool=500))[0].negatives) == 19
    assert len(make_groups(frame, judged, TrainingArgs(max_negative_rank=None))[0].negatives) == 48


def test_labels_and_scores_that_are_no_numbers():
    judged = qrels(("1", "d3", 1), ("1", "d2", 0), ("2", "d1", 1))
    for label, shown in (("relevant", "'relevant'"), (None, "nan"), (np.inf, "inf")):
        with pytest.raises(
            ValueError, match=rf"qrels: the column 'label' holds {shown} in row 1 \(qid '1', docno 'd2'\)"
        ):
            make_groups(RUN, judged.assign(label=[1, label, 1]))
    for column, value, shown in (
        ("score", np.nan, "nan"),
        ("score", "high", "'high'"),
        ("rank", None, "None"),
        ("teacher_score", "good", "'good'"),
    ):
        run = RUN.drop(columns="score").assign(**{column: pd.Series([1.0, 2, 3, 4, value, 6, 7], dtype=object)})
        with pytest.raises(
            ValueError, match=rf"'{column}' holds {shown} in row 4 \(qid '2', docno 'd1'\), and in 1 of 7"
        ):
            make_groups(run, judged)
    # Numbers that a file without types has as text are numbers: 10 is more than 9.
    written = RUN.assign(score=(RUN["score"] + 1).map(str))
    assert groups_of(written, judged.assign(label=["1", "0", "1"])) == groups_of(RUN, judged)


def test_nothing_to_train_on():
    with pytest.raises(ValueError, match=r"qrels lack the column\(s\) docno, label"):
        make_groups(RUN, pd.DataFrame({"qid": ["1"], "relevance": [1]}))


def test_teacher_column():
    run, judged = RUN.assign(teacher_score=np.arange(7.0), other=np.nan), qrels(("1", "d3", 1))
    assert make_groups(run, judged)[0].targets.tolist() == [1.0, 3.0, 2.0, 0.0]
    assert make_groups(RUN, judged)[0].targets is None
    with pytest.raises(ValueError, match="the teacher's scores: the column 'other' holds nan in row 0"):
        make_groups(run, judged, TrainingArgs(teacher_field="other"))


# Judged documents that were not retrieved.

JUDGED = qrels(
    ("2", "far", 2), ("1", "d3", 1), ("1", "no", 0), ("3", "d1", 1), ("3", "bad", -1), ("4", "up", 1), ("4", "down", 0)
)  # fmt: skip
LOADER = pt.apply.text(lambda row: f"text of {row.docno} for {row.qid}")
ALL = TrainingArgs(judged="all")


def test_judged_documents_that_were_not_retrieved():
    """All positives, and as negatives the judged ones beside those retrieved: FlexNeuART's export of training data."""
    run = RUN.assign(text=TEXTS)
    before = run.copy()
    added = add_judged(run, JUDGED, text_loader=LOADER)
    pd.testing.assert_frame_equal(run, before)
    pd.testing.assert_frame_equal(added.head(len(RUN)), run)
    new = added.iloc[len(RUN) :]
    assert new[["qid", "query", "docno"]].to_numpy().tolist() == [
        ["2", "b", "far"],
        ["1", "a", "no"],
        ["3", "c", "bad"],
    ]
    assert new["text"].tolist() == ["text of far for 2", "text of no for 1", "text of bad for 3"]
    assert (new["score"] == -np.inf).all()
    groups = all_of(make_groups(added, JUDGED, ALL), added["text"])
    names = ("d2 d4 d3 d1 no", "d1 d5 far", "d1 bad")  # behind what was retrieved; without them only the first is there
    assert [group.qid for group in make_groups(RUN, JUDGED)] == ["1"]
    assert [group.texts for group in groups] == [
        tuple(f"text of {name} for {qid}" for name in own.split()) for qid, own in enumerate(names, start=1)
    ]
    assert [group.labels for group in groups] == [(0.0, 0.0, 1.0, 0.0, 0.0), (0.0, 0.0, 2.0), (1.0, 0.0)]
    # Query 4 has no row, so that its text is known from the topics alone.
    topics = pd.DataFrame({"qid": ["4"], "query": ["d"]})
    more = add_judged(run, JUDGED, text_loader=LOADER, topics=topics)
    assert more.iloc[-2:][["qid", "query", "docno"]].to_numpy().tolist() == [["4", "d", "up"], ["4", "d", "down"]]
    assert make_groups(more, JUDGED, ALL)[-1].labels.tolist() == [1.0, 0.0]


def test_candidates_are_those_of_the_published_export():
    """Set by set as FlexNeuART's export makes them: positives, and judged negatives with the best k."""
    rng, docnos, k = random.Random(0), [f"d{i}" for i in range(30)], 6
    topics = pd.DataFrame({"qid": [f"q{i}" for i in range(12)], "query": "any"})
    rows, judged = [], []
    for qid in topics["qid"]:
        rows += [(qid, "any", d, -i) for i, d in enumerate(rng.sample(docnos, rng.choice([0, 4, 10])))]
        judged += [(qid, d, rng.choice([-1, 0, 0, 1, 2])) for d in rng.sample(docnos, rng.choice([1, 5]))]
    run, labels = pd.DataFrame(rows, columns=["qid", "query", "docno", "score"]), qrels(*judged)
    expected = {}
    for qid in topics["qid"]:
        positives = {d for q, d, grade in judged if q == qid and grade >= 1}
        pool = {d for q, d, grade in judged if q == qid and grade < 1}
        pool |= set([d for q, _, d, _ in rows if q == qid][:k]) - positives
        if positives and pool:
            expected[qid] = positives, pool
    assert 3 < len(expected) < 12
    full = add_judged(run, labels, topics=topics)
    groups = make_groups(full, labels, TrainingArgs(judged="all", max_negative_rank=k))
    found = {
        g.qid: tuple({full["docno"][row] for row in g.rows[part]} for part in (g.positives, g.negatives))
        for g in groups
    }
    assert found == expected


@pytest.mark.parametrize("order", ["score", "rank", "rows"])
def test_judged_negatives_are_drawn_whatever_their_rank(order):
    judged = qrels(("1", "d2", 1), ("1", "d1", 0), ("1", "no", 0), ("1", "far", 1))
    run = {
        "score": RUN,
        "rank": RUN.drop(columns="score").assign(rank=[3, 0, 2, 1, 0, 1, 0]),
        "rows": RUN.drop(columns="score").iloc[[1, 3, 2, 0, 4, 5, 6]],
    }[order]
    run = add_judged(run, judged)
    # d1 was retrieved last; d4, not judged, is the only negative up to rank 2.
    (group,) = make_groups(run, judged, TrainingArgs(judged="all", max_negative_rank=2))
    assert run["docno"].iloc[group.rows].tolist() == ["d2", "d4", "d1", "no", "far"]
    assert group.negatives == [1, 2, 3]
    (group,) = make_groups(run, judged, TrainingArgs(judged="all", unjudged="skip"))
    assert run["docno"].iloc[group.rows].tolist() == ["d2", "d1", "no", "far"]


def test_ids_of_any_type():
    run = pd.DataFrame({"qid": [1, 1, 2], "query": ["a", "a", "b"], "docno": [10, 11, 10], "rank": [0, 1, 0]})
    added = add_judged(run, qrels(("1", "12", 1), ("2", "10", 1), ("2", "13", 0)))
    ids = [("1", "10"), ("1", "11"), ("2", "10"), ("1", "12"), ("2", "13")]
    assert keys_of(added) == ids
    assert added[["qid", "docno"]].map(type).eq(str).all(axis=None)
    assert keys_of(add_judged(run, qrels(("1", "D12", 1)))) == [*ids[:3], ("1", "D12")]
    few = run.astype({"qid": "category", "docno": "category"})
    assert keys_of(add_judged(few, qrels(("1", "12", 1), ("2", "13", 0)))) == ids
    assert keys_of(add_judged(run.set_index(["qid", "docno"], drop=False), qrels(("1", "12", 1)))) == ids[:4]
    assert added["rank"].tolist() == [0, 1, 0, 2, 2]
    assert add_judged(run, qrels(("1", "10", 1))) is run


def test_judged_documents_without_text():
    with pytest.raises(ValueError, match=r"here 3, e\.g\. 'far' for the query '2', .* give text_loader= .*retrieved"):
        add_judged(RUN.assign(text=TEXTS), JUDGED)
    with pytest.raises(ValueError, match=r"does not supply the column\(s\) title"):
        add_judged(RUN.assign(title="", text=TEXTS), JUDGED, text_field=("title", "text"), text_loader=LOADER)
    assert "text" not in add_judged(RUN, JUDGED)  # is loaded later
    unknown = pt.apply.generic(lambda frame: frame.assign(text=[None, *frame["docno"].iloc[1:]]))
    with pytest.raises(ValueError, match=r"no text of 1 judged documents, e\.g\. 'far': leave them out of the qrels"):
        add_judged(RUN.assign(text=TEXTS), JUDGED, text_loader=unknown)
    with pytest.raises(ValueError, match=r"topics lack the column\(s\) query"):
        add_judged(RUN, JUDGED, topics=RUN[["qid"]])


def test_a_teacher_scores_judged_documents_too():
    run = RUN.assign(text=TEXTS, teacher_score=1.0)
    added = add_judged(run, JUDGED, text_loader=LOADER)
    with pytest.raises(ValueError, match=r"no finite number.*TeacherScores\(teacher\)\(add_judged\(run, qrels"):
        make_groups(added, JUDGED, ALL)
    scored = TeacherScores(pt.apply.doc_score(lambda row: len(row["docno"])))(added)
    assert make_groups(scored, JUDGED, ALL)[1].targets.tolist() == [2.0, 2.0, 3.0]


def test_fit_takes_judged_documents_in(cross_encoder):
    asked = []

    def load(inp):
        asked.extend(zip(inp["qid"], inp["docno"], strict=True))
        return inp.assign(text=[f"cat {docno}" for docno in inp["docno"]])

    recipe = TrainingArgs(judged="all", queries_per_step=1, learning_rates={"": 1e-3}, warmup=0.0)
    run, loader = RUN.assign(text=TEXTS), pt.apply.generic(load)
    settings = {"max_query_len": 8, "window_size": 20}

    def trained(data, **changes):
        model = ld.FirstP(cross_encoder, **settings, **{"training": recipe, "text_loader": loader, **changes})
        return model.fit(data, JUDGED)(run)["score"].tolist()

    by_loader = trained(run)
    assert asked == [("2", "far"), ("1", "no"), ("3", "bad")]
    judged = add_judged(run, JUDGED, text_loader=loader)
    assert by_loader == pytest.approx(trained(judged, text_loader=None), rel=1e-5)
    assert by_loader != trained(run, training=replace(recipe, judged="retrieved"))
    # Where all text is loaded, so is that of the added, the only positive of query 2.
    asked.clear()
    trained(RUN)
    assert ("2", "far") in asked
    with pytest.raises(ValueError, match="give text_loader="):
        trained(run, text_loader=None)


def test_pseudo_labels():
    labels = pseudo_qrels(RUN, relevant=2)
    assert labels[labels["label"] == 1][["qid", "docno"]].to_numpy().tolist() == [
        ["1", "d2"], ["1", "d4"], ["2", "d1"], ["2", "d5"], ["3", "d1"],
    ]  # fmt: skip
    (first,) = make_groups(RUN, labels)
    assert first.labels.tolist() == [1.0, 1.0, 0.0, 0.0]
    with pytest.raises(ValueError, match="relevant=0 must be at least 1"):
        pseudo_qrels(RUN, relevant=0)


# Sampling.

LABELS = np.array([0.0, 1.0, 0.0, 2.0, -1.0, 0.0])
GROUPS = [Group(f"q{i}", f"query {i}", np.arange(6), LABELS) for i in range(20)]
POINTWISE = TrainingArgs(sampling="pointwise", loss="pointwise_bce")
LISTWISE = TrainingArgs(sampling="listwise", loss="lambda_loss", negatives=3)


def test_pairs():
    for negatives in (1, 3, 9):
        picks = draw_epoch(GROUPS, TrainingArgs(negatives=negatives), 0)
        assert Counter(group.qid for group, _ in picks) == Counter(group.qid for group in GROUPS)
        for group, (first, *others) in picks:
            assert first in group.positives
            assert set(others) <= set(group.negatives)
            assert len(others) == negatives
            counts = Counter(others).values()
            assert max(counts) - min(counts) <= (1 if len(counts) == 4 else 0)


def test_pointwise_takes_every_candidate_once():
    picks = draw_epoch(GROUPS, POINTWISE, 0)
    assert len(picks) == examples_per_epoch(GROUPS, POINTWISE) == 120
    assert {(group.qid, candidates) for group, candidates in picks} == {(g.qid, (i,)) for g in GROUPS for i in range(6)}


def test_lists_have_a_positive():
    for group, candidates in draw_epoch(GROUPS, LISTWISE, 0):
        assert len(set(candidates)) == 4
        assert set(candidates) & set(group.positives)
    assert all(len(candidates) == 6 for _, candidates in draw_epoch(GROUPS, replace(LISTWISE, negatives=99), 0))


def test_draws_depend_on_seed_and_epoch_alone():
    args = TrainingArgs()
    state = random.getstate()
    first = draw_epoch(GROUPS, args, 3)
    random.seed(7)
    assert draw_epoch(GROUPS, args, 3) == first
    random.setstate(state)
    assert draw_epoch(GROUPS, args, 4) != first
    assert draw_epoch(GROUPS, replace(args, seed=1), 3) != first
    # A query's draw does not depend on which others there are.
    some, every = ({g.qid: candidates for g, candidates in draw_epoch(of, args, 3)} for of in (GROUPS[::2], GROUPS))
    assert some.items() <= every.items()


def rotate(text: str, rng: random.Random) -> str:
    start = rng.randrange(len(text) + 1)
    return text[start:] + text[:start]


def test_augmented_texts():
    group, texts = Group("q", "query", np.arange(2), np.array([2.0, 0.0])), texts_of(["abcdefgh", "ABCDEFGH"])
    args = TrainingArgs(augment=rotate)
    picks = draw_epoch([group], args, 0)
    (example,) = make_examples(picks, texts, args, 0)
    assert [sorted(text) for text in example.texts] == [list("abcdefgh"), list("ABCDEFGH")]
    assert make_examples(picks, texts, args, 0) == [example]
    assert len({make_examples(picks, texts, args, epoch)[0].texts for epoch in range(20)}) > 5


def test_examples_have_their_own_candidates_and_read_each_text_once():
    read = []
    texts = replace(texts_of(list("abcd")), read=lambda rows: [read.append(text) or text for text in rows["text"]])
    groups = [
        Group("p", "first", np.array([3, 0, 1]), np.array([2.0, 0.0, 1.0]), targets=np.array([0.3, 0.2, 0.1])),
        Group("q", "second", np.array([3, 0]), np.array([1.0, 0.0])),
    ]
    found = make_examples([(groups[0], (0, 2)), (groups[1], (0, 1, 1))], texts, LISTWISE, 0)
    assert found == [
        Example("p", "first", ("d", "b"), (2.0, 1.0), (0.3, 0.1)),
        Example("q", "second", ("d", "a", "a"), (1.0, 0.0, 0.0)),
    ]
    assert read == ["a", "b", "d"]
    assert make_examples([], texts, LISTWISE, 0) == []


# Teachers.


def test_teacher_scores():
    teacher = pt.apply.doc_score(lambda row: float(len(row["text"])))
    run = RUN.assign(text=TEXTS)
    before, mixed = run.copy(), run.sample(frac=1, random_state=0)
    out = TeacherScores(teacher, column="t")(mixed)
    pd.testing.assert_frame_equal(run, before)
    assert out["t"].tolist() == [float(len(text)) for text in out["text"]]
    pd.testing.assert_frame_equal(out.drop(columns="t"), mixed)
    with pytest.raises(ValueError, match=r"no score for 4 of 7 candidates, e.g. \('1', 'd1'\)"):
        TeacherScores(pt.apply.generic(lambda frame: frame[frame["qid"] != "1"]))(run)
    twice = pt.apply.generic(lambda frame: pd.concat([frame, frame.iloc[:1].assign(score=-9.0)]))
    with pytest.raises(ValueError, match="the teacher gives 1 candidates several scores"):
        TeacherScores(twice)(run)
    doubled = pd.concat([run, run.iloc[:1]])
    assert TeacherScores(pt.Transformer.identity())(doubled)["teacher_score"].tolist() == doubled["score"].tolist()
