"""A teacher's scores for a student."""

from __future__ import annotations

from typing import Any

import pandas as pd
import pyterrier as pt


class TeacherScores(pt.Transformer):
    """Adds a column with the scores of another transformer; all other columns stay, the score too.

    Args:
        teacher: scores `qid, query, docno` and text; frozen, whatever it is.
        column: its name, as in the student's `TrainingArgs(teacher_field=...)`.

    Example:
        `student = ld.MaxP(small, training=ld.TrainingArgs(loss="margin_mse"))`, then
        `(bm25 >> text >> TeacherScores(teacher) >> student).fit(topics, qrels)`. PARADE's distillation (Eq. 8) is
        `TrainingArgs.preset("parade-distillation")`.
    """

    def __init__(self, teacher: pt.Transformer, *, column: str = "teacher_score") -> None:
        super().__init__()
        self.teacher = teacher
        self.column = column

    def transform(self, inp: pd.DataFrame) -> pd.DataFrame:
        """Adds the column.

        Raises:
            ValueError: if the teacher drops a candidate, or has several scores for one.
        """
        columns = {"qid": str, "docno": str}
        answer: Any = self.teacher(inp)
        scored = answer[["qid", "docno", "score"]].astype(columns).drop_duplicates()
        twice = scored[scored.duplicated(["qid", "docno"])]
        if len(twice):
            raise ValueError(f"the teacher gives {len(twice)} candidates several scores, e.g. {_keys(twice)[0]}")
        scores = dict(zip(_keys(scored), scored["score"].astype(float), strict=True))
        keys = _keys(inp.astype(columns))
        missing = [key for key in keys if key not in scores]
        if missing:
            raise ValueError(
                f"the teacher gives no score for {len(missing)} of {len(keys)} candidates, e.g. {missing[0]}"
            )
        return inp.assign(**{self.column: [scores[key] for key in keys]})


def _keys(frame: pd.DataFrame) -> list[tuple[Any, Any]]:
    return list(zip(frame["qid"], frame["docno"], strict=True))
