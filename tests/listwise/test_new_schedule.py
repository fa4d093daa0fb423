"""A schedule of one's own."""

from dataclasses import dataclass

import pandas as pd
import pyterrier as pt
import pytest

from pyterrier_longdoc.experiment import Experiment
from pyterrier_longdoc.listwise import RankGPT, Reply, Schedule

from ..support.llm import candidates, oracle, worth


@dataclass(frozen=True)
class OneByOne(Schedule):
    """The best document of the whole list, then the best of the others, and so on, `k` times."""

    k: int = 3

    def rank(self, n):
        left = list(range(n))
        top = []
        for _ in range(min(self.k, n)):
            (answer,) = yield [left]
            top += (answer or left)[:1]
            left = [document for document in left if document != top[-1]]
        return top

    def estimate(self, n):
        return min(self.k, n - 1)


def test_a_new_schedule():
    ranker = RankGPT(oracle, schedule=OneByOne())
    out = ranker(candidates(documents=9, shuffle=1))
    assert worth(out.sort_values("rank")).tolist() == [8, 7, 6, 0, 1, 2, 3, 4, 5]
    assert ranker.rounds == {"q0": [[9], [8], [7]]}


class Oracle:
    """The oracle as a backend, which tells who it is."""

    model, settings = "oracle", {}

    def __call__(self, messages):
        return Reply(oracle(messages))


def edited(sign):
    @dataclass(frozen=True)
    class Edited(OneByOne):
        def rank(self, n):
            return (yield from super().rank(n))[::sign]

    return Edited()


@pytest.mark.filterwarnings("ignore::pyterrier_longdoc.experiment.ExperimentWarning")
def test_runs_of_an_edited_schedule_are_made_anew(tmp_path):
    frame = candidates(documents=9, shuffle=1)
    judged = pd.DataFrame({"qid": ["q0"], "docno": [frame["docno"][worth(frame).argmax()]], "label": [1]})
    topics, values = frame[["qid", "query"]].drop_duplicates(), []
    for sign in (1, -1):
        pipeline = pt.Transformer.from_df(frame) >> RankGPT(Oracle(), schedule=edited(sign))
        results = Experiment({"a": pipeline}, topics, judged, ["RR"], save_dir=tmp_path)
        values.append(results.means.loc["a", "RR"])
    assert values == [1.0, pytest.approx(1 / 3)]
    assert "Edited" in results.checks.set_index("check").loc["made anew", "message"]
