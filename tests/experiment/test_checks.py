"""What `checks` lists of an experiment."""

from __future__ import annotations

import pandas as pd
import pyterrier as pt
import pytest

import pyterrier_longdoc as ld
from pyterrier_longdoc.experiment import ExperimentWarning

from ..support.systems import QUIET
from ..support.tiny import longer_results

pytestmark = QUIET

CANDIDATES = longer_results()
TOPICS = CANDIDATES[["qid", "query"]].drop_duplicates()
QRELS = pd.DataFrame({"qid": ["1", "q1", "q0"], "docno": ["d2", "d3", "d1"], "label": 1})


@pytest.fixture
def trained(cross_encoder):
    """A model that was trained on the queries "1" and "q1"."""
    recipe = ld.TrainingArgs(max_steps=1)
    model = ld.MaxP(cross_encoder, window_size=20, stride=20, max_query_len=8, training=recipe, device="cpu")
    return model.fit(CANDIDATES[CANDIDATES["qid"] != "q0"], QRELS[QRELS["qid"] != "q0"])


def test_queries_seen_in_training_are_listed(trained):
    systems = {"first": pt.Transformer.from_df(CANDIDATES), "trained": pt.Transformer.from_df(CANDIDATES) >> trained}
    with pytest.warns(ExperimentWarning):
        results = ld.Experiment(systems, TOPICS, QRELS, ["RR"])
    [row] = results.checks.query("check == 'seen in training'").to_dict("records")
    assert (row["name"], row["queries"]) == ("trained", len(trained.trained_on.qids & set(TOPICS["qid"])))
    assert trained.trained_on.qids == {"1", "q1"}


@pytest.mark.filterwarnings("ignore::pyterrier_longdoc.experiment.ExperimentWarning")
def test_queries_not_seen_in_training_are_not_listed(trained):
    systems = {"trained": pt.Transformer.from_df(CANDIDATES) >> trained}
    results = ld.Experiment(systems, TOPICS[TOPICS["qid"] == "q0"], QRELS, ["RR"])
    assert "seen in training" not in set(results.checks["check"])
