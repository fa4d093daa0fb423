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
from pyterrier_longdoc.common.frames import Document, Question, documents, keys_of
from pyterrier_longdoc.data.collection import TextLoader
from pyterrier_longdoc.training import (
    Example,
    LeftOutWarning,
    QueryGroup,
    TeacherScores,
    TrainingArgs,
    add_judged,
    make_groups,
)
from pyterrier_longdoc.training.examples import draw_epoch, make_examples

from ..support.toy import all_of, qrels, set_of

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


def texts(*values: str) -> tuple[Document, ...]:
    return tuple(documents(values))


def groups_of(run: pd.DataFrame, judged: pd.DataFrame, args: TrainingArgs | None = None) -> list[Example]:
    """The candidates of each query that is trained on, with the texts of `RUN`."""
    return all_of(make_groups(run, judged, args), TEXTS)


def test_groups_contain_queries_with_positives_and_negatives():
    judged = qrels(("1", "d3", 1), ("2", "d1", 3), ("3", "d1", 1), ("4", "d1", 1))
    groups = groups_of(RUN, judged)
    assert groups == [
        Example("1", Question("a"), texts(*(f"text of d{i} for 1" for i in (2, 4, 3, 1))), (0.0, 0.0, 1.0, 0.0)),
        Example("2", Question("b"), texts("text of d1 for 2", "text of d5 for 2"), (3.0, 0.0)),
    ]  # query 3 has no negative
    # Neither the index nor the type of the qids decides.
    assert groups_of(RUN.set_axis([0, 0, 0, 1, 1, 5, 5]), judged) == groups
    integers = judged.astype({"qid": int})
    assert groups_of(RUN, integers) == groups
    assert groups_of(RUN.astype({"qid": int}), integers.assign(iteration="Q0")) == groups
    assert groups_of(RUN.astype({"qid": int}), judged) == groups


def test_labels_depend_on_min_label_and_unjudged():
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
def test_max_negative_rank_limits_the_negatives(order):
    bare = RUN.drop(columns="score")
    run, best_first = {
        "score": (RUN, [1, None, 2, 0]),  # d4, the positive, takes one of the first places of score and rank
        "rank": (bare.assign(rank=[3, 0, 2, 1, 0, 1, 0]), [1, None, 2, 0]),
        "rows": (bare, [0, 1, 2, None]),
    }[order]
    for limit in (1, 2, 3, 4):
        (group,) = make_groups(run, qrels(("1", "d4", 1)), TrainingArgs(max_negative_rank=limit))
        assert group.rows[group.negatives].tolist() == [row for row in best_first[:limit] if row is not None]
        assert group.rows[group.positives].tolist() == [3]


def test_negative_pool_samples_negatives_by_seed():
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


def test_labels_and_scores_that_are_not_numbers_are_refused_by_row():
    for column, value in [
        ("label", None),
        ("label", np.inf),
        ("score", "high"),
        ("rank", None),
        ("teacher_score", np.nan),
    ]:
        run, judged = RUN, qrels(("1", "d3", 1), ("1", "d2", 0), ("2", "d1", 1))
        if column == "label":
            judged = judged.assign(label=[1, value, 1])
        else:
            run = RUN.drop(columns="score").assign(**{column: pd.Series([1.0, value, 3, 4, 5, 6, 7], dtype=object)})
        with pytest.raises(ValueError, match=rf"'{column}' .*docno 'd2'"):
            make_groups(run, judged)


def test_targets_are_the_scores_in_the_teacher_column():
    run, judged = RUN.assign(teacher_score=0.0, other=np.arange(7.0)), qrels(("1", "d3", 1))
    assert make_groups(run, judged)[0].targets.tolist() == [0.0] * 4
    other = TrainingArgs(teacher_field="other")
    assert make_groups(run, judged, other)[0].targets.tolist() == [1.0, 3.0, 2.0, 0.0]
    assert make_groups(RUN, judged)[0].targets is None


# Judged documents that were not retrieved.

JUDGED = qrels(
    ("2", "far", 2), ("1", "d3", 1), ("1", "no", 0), ("3", "d1", 1), ("3", "bad", -1), ("4", "up", 1), ("4", "down", 0)
)  # fmt: skip
LOADER = pt.apply.text(lambda row: f"text of {row.docno} for {row.qid}")
ALL = TrainingArgs(judged="all")


def test_add_judged_adds_judged_documents_that_were_not_retrieved():
    """Adds all positives and judged negatives to the retrieved documents, as FlexNeuART's export of training data."""
    run = RUN.assign(text=TEXTS)
    before = run.copy()
    added = add_judged(run, JUDGED, text_loader=LOADER)
    pd.testing.assert_frame_equal(run, before)
    pd.testing.assert_frame_equal(added.head(len(RUN)), run)
    new = added.iloc[len(RUN) :]
    assert keys_of(new) == [("2", "far"), ("1", "no"), ("3", "bad")]
    assert new["query"].tolist() == ["b", "a", "c"]
    assert new["text"].tolist() == ["text of far for 2", "text of no for 1", "text of bad for 3"]
    assert (new["score"] == -np.inf).all()
    groups = all_of(make_groups(added, JUDGED, ALL), added["text"])
    names = ("d2 d4 d3 d1 no", "d1 d5 far", "d1 bad")  # behind what was retrieved; without them only the first is there
    assert [group.qid for group in make_groups(RUN, JUDGED)] == ["1"]
    assert [group.texts for group in groups] == [
        texts(*(f"text of {name} for {qid}" for name in own.split())) for qid, own in enumerate(names, start=1)
    ]
    assert [group.labels for group in groups] == [(0.0, 0.0, 1.0, 0.0, 0.0), (0.0, 0.0, 2.0), (1.0, 0.0)]


def test_add_judged_takes_queries_without_candidates_from_the_topics():
    topics = pd.DataFrame({"qid": ["4"], "query": ["d"]})
    more = add_judged(RUN.assign(text=TEXTS), JUDGED, text_loader=LOADER, topics=topics)
    assert more.iloc[-2:][["qid", "query", "docno"]].to_numpy().tolist() == [["4", "d", "up"], ["4", "d", "down"]]
    assert make_groups(more, JUDGED, ALL)[-1].labels.tolist() == [1.0, 0.0]


def test_add_judged_accepts_ids_of_any_type():
    run = pd.DataFrame({"qid": [1, 1, 2], "query": ["a", "a", "b"], "docno": [10, 11, 10], "rank": [0, 1, 0]})
    added = add_judged(run, qrels(("1", "12", 1), ("2", "10", 1), ("2", "13", 0)))
    ids = [("1", "10"), ("1", "11"), ("2", "10"), ("1", "12"), ("2", "13")]
    assert keys_of(added) == ids
    assert added[["qid", "docno"]].map(type).eq(str).all(axis=None)
    assert keys_of(add_judged(run, qrels(("1", "D12", 1)))) == [*ids[:3], ("1", "D12")]
    few = run.astype({"qid": "category", "docno": "category"})
    assert keys_of(add_judged(few, qrels(("1", "12", 1), ("2", "13", 0)))) == ids
    assert added["rank"].tolist() == [0, 1, 0, 2, 2]
    assert add_judged(run, qrels(("1", "10", 1))) is run


def test_add_judged_needs_a_text_loader_for_candidates_with_texts():
    with pytest.raises(ValueError, match="text_loader="):
        add_judged(RUN.assign(text=TEXTS), JUDGED)
    assert "text" not in add_judged(RUN, JUDGED)  # is loaded later


def no_text(frame):
    return frame.assign(text=frame["docno"].where(~frame["docno"].isin(["far", "bad"])))


def no_row(frame):
    return frame[~frame["docno"].isin(["far", "bad"])].assign(text="a cat")


def error(frame):
    return frame.assign(text=frame["docno"].map(lambda docno: {"far": None, "bad": None}.get(docno, docno).upper()))


COLLECTION = TextLoader({docno: {"text": "a cat"} for docno in (*RUN["docno"], "no")}, ["text"])


@pytest.mark.parametrize("loads", [no_text, no_row, error, COLLECTION], ids=["no text", "no row", "error", "KeyError"])
@pytest.mark.parametrize("run", [RUN, RUN.assign(text=TEXTS)], ids=["text is loaded later", "with text"])
def test_judged_documents_that_the_loader_lacks_are_left_out(loads, run):
    loader = loads if isinstance(loads, pt.Transformer) else pt.apply.generic(loads)
    with pytest.warns(LeftOutWarning, match="^2 judged documents are left out"):
        added = add_judged(run, JUDGED, text_loader=loader)
    assert keys_of(added.iloc[len(run) :]) == [("1", "no")]
    assert list(added.columns) == list(run.columns)
    with pytest.warns(LeftOutWarning):
        assert add_judged(run, JUDGED.iloc[:1], text_loader=loader) is run


def test_all_judged_documents_are_added_in_order():
    names = [f"new{n}" for n in range(300)]
    added = add_judged(RUN.assign(text=TEXTS), qrels(*(("1", name, 0) for name in names)), text_loader=LOADER)
    assert added["text"].iloc[len(RUN) :].tolist() == [f"text of {name} for 1" for name in names]


@pytest.mark.parametrize("failure", [ConnectionError("the disk is gone"), RuntimeError("no such index")])
def test_errors_of_a_text_loader_are_raised_unchanged(failure):
    def fail(frame):
        raise failure

    with pytest.raises(type(failure), match=str(failure)):
        add_judged(RUN, JUDGED, text_loader=pt.apply.generic(fail))


def test_fit_trains_on_judged_documents_that_were_not_retrieved(cross_encoder):
    recipe = TrainingArgs(judged="all", queries_per_step=1, learning_rates={"": 1e-3}, warmup=0.0)
    run, loader = RUN.assign(text=TEXTS), pt.apply.text(lambda row: f"cat {row['docno']}")

    def trained(data, **changes):
        settings = {"training": recipe, "text_loader": loader, "max_query_len": 8, "window_size": 20, **changes}
        return ld.FirstP(cross_encoder, **settings).fit(data, JUDGED)(run)["score"].tolist()

    by_loader = trained(run)
    judged = add_judged(run, JUDGED, text_loader=loader)
    assert by_loader == pytest.approx(trained(judged, text_loader=None), rel=1e-5)
    assert by_loader != trained(run, training=replace(recipe, judged="retrieved"))


# Sampling.

LABELS = np.array([0.0, 1.0, 0.0, 2.0, -1.0, 0.0])
GROUPS = [QueryGroup(f"q{i}", Question(f"query {i}"), np.arange(6), LABELS) for i in range(20)]
POINTWISE = TrainingArgs(sampling="pointwise", loss="pointwise_bce")
LISTWISE = TrainingArgs(sampling="listwise", loss="lambda_loss", negatives=3)


def test_each_epoch_draws_a_positive_and_negatives_for_each_query():
    for negatives in (1, 3, 9):
        picks = draw_epoch(GROUPS, TrainingArgs(negatives=negatives), 0)
        assert Counter(group.qid for group, _ in picks) == Counter(group.qid for group in GROUPS)
        for group, (first, *others) in picks:
            assert first in group.positives
            assert set(others) <= set(group.negatives)
            assert len(others) == negatives
            counts = Counter(others).values()
            assert max(counts) - min(counts) <= (1 if len(counts) == 4 else 0)


def test_pointwise_sampling_draws_every_candidate_once():
    picks = draw_epoch(GROUPS, POINTWISE, 0)
    assert len(picks) == 120
    assert {(group.qid, candidates) for group, candidates in picks} == {(g.qid, (i,)) for g in GROUPS for i in range(6)}


def test_lists_contain_a_positive():
    for group, candidates in draw_epoch(GROUPS, LISTWISE, 0):
        assert len(set(candidates)) == 4
        assert set(candidates) & set(group.positives)
    assert all(len(candidates) == 6 for _, candidates in draw_epoch(GROUPS, replace(LISTWISE, negatives=99), 0))


def test_draws_only_depend_on_seed_and_epoch():
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


def test_augmented_texts_depend_on_the_epoch():
    data = set_of([QueryGroup("q", Question("query"), np.arange(2), np.array([2.0, 0.0]))], ["abcdefgh", "ABCDEFGH"])
    args = TrainingArgs(augment=rotate)
    picks = draw_epoch(data.groups, args, 0)
    (example,) = make_examples(picks, data, args, 0)
    assert [sorted(text.text) for text in example.texts] == [list("abcdefgh"), list("ABCDEFGH")]
    assert make_examples(picks, data, args, 0) == [example]
    assert len({make_examples(picks, data, args, epoch)[0].texts for epoch in range(20)}) > 5


def test_examples_contain_their_candidates_and_each_text_is_read_once():
    read = []
    groups = [
        QueryGroup(
            "p", Question("first"), np.array([3, 0, 1]), np.array([2.0, 0.0, 1.0]), targets=np.array([0.3, 0.2, 0.1])
        ),
        QueryGroup("q", Question("second"), np.array([3, 0]), np.array([1.0, 0.0])),
    ]
    data = replace(set_of(groups, list("abcd")), read=lambda rows: read.extend(rows["text"]) or texts(*rows["text"]))
    found = make_examples([(groups[0], (0, 2)), (groups[1], (0, 1, 1))], data, LISTWISE, 0)
    assert found == [
        Example("p", Question("first"), texts("d", "b"), (2.0, 1.0), (0.3, 0.1)),
        Example("q", Question("second"), texts("d", "a", "a"), (1.0, 0.0, 0.0)),
    ]
    assert read == ["a", "b", "d"]
    assert make_examples([], data, LISTWISE, 0) == []


# Teachers.


def test_teacher_scores_adds_the_scores_of_a_teacher_in_row_order():
    run = RUN.assign(text=TEXTS)
    before, mixed = run.copy(), run.sample(frac=1, random_state=0)
    out = TeacherScores(pt.apply.doc_score(lambda row: float(len(row["text"]))), column="t")(mixed)
    pd.testing.assert_frame_equal(run, before)
    assert out["t"].tolist() == [float(len(text)) for text in out["text"]]
    pd.testing.assert_frame_equal(out.drop(columns="t"), mixed)
    doubled = pd.concat([run, run.iloc[:1]])
    assert TeacherScores(pt.Transformer.identity())(doubled)["teacher_score"].tolist() == doubled["score"].tolist()


def test_a_teacher_must_give_each_candidate_one_score():
    for change, count in [
        (lambda frame: frame[frame["qid"] != "1"], 4),
        (lambda frame: pd.concat([frame, frame.iloc[:1].assign(score=-9.0)]), 1),
    ]:
        with pytest.raises(ValueError, match=f"{count} candidates"):
            TeacherScores(pt.apply.generic(change))(RUN.assign(text=TEXTS))
