"""A schedule of one's own."""

from dataclasses import dataclass

from pyterrier_longdoc.listwise import RankGPT, Schedule

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
