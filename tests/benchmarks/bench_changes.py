"""How much scores change with one argument: MaxP as it is beside MaxP with another value, on the same documents.

    python tests/benchmarks/bench_changes.py [--topics 4] [--depth 10] [--model longdoc:maxp]

Reranks BM25's best documents of test topics of `longdoc:docstrings`, in float32 on one thread where nothing else is
said. Printed for each change: the largest difference of a score, the share of pairs whose scores differ at all, and
Kendall's tau between the orders, the mean over topics. Needs the extra `demo`.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyterrier as pt
import torch
from scipy.stats import kendalltau

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import pyterrier_longdoc as ld
from pyterrier_longdoc.demo import first_stage

CHANGES: dict[str, dict[str, Any]] = {
    "batch_size=1": {"batch_size": 1},
    'dtype="bfloat16"': {"dtype": "bfloat16"},
    'layout="padded"': {"layout": "padded"},
    "max_doc_len=477": {"max_doc_len": 477},
    "preselect=BM25Windows(3)": {"preselect": ld.BM25Windows(3)},
    "stride=66": {"stride": 66},
}


def scores(model: Any, candidates: pd.DataFrame, threads: int = 1) -> np.ndarray:
    """In the order of the candidates."""
    torch.set_num_threads(threads)
    return model(candidates)["score"].to_numpy()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--topics", type=int, default=4)
    parser.add_argument("--depth", type=int, default=10, help="documents of each")
    parser.add_argument("--model", default="longdoc:maxp", help="a saved or packaged MaxP")
    args = parser.parse_args()
    warnings.simplefilter("ignore", ld.TruncationWarning)
    dataset = pt.get_dataset("longdoc:docstrings")
    with tempfile.TemporaryDirectory() as folder:
        bm25 = first_stage(dataset, Path(folder) / "index", args.depth)
        candidates = (bm25 >> dataset.text_loader())(dataset.get_topics("test").head(args.topics))
    maxp = partial(ld.MaxP.load, args.model)
    plain = scores(maxp(dtype="float32"), candidates)
    changed = {"two threads": scores(maxp(dtype="float32"), candidates, threads=2)}
    changed |= {name: scores(maxp(**{"dtype": "float32", **change}), candidates) for name, change in CHANGES.items()}
    firstp = ld.FirstP("longdoc:minilm-l6", dtype="float32").start_from(maxp())
    changed["FirstP"] = scores(firstp, candidates)
    rows = []
    for name, other in changed.items():
        both = pd.DataFrame({"qid": candidates["qid"].to_numpy(), "plain": plain, "other": other})
        taus = [kendalltau(own["plain"], own["other"]).statistic for _, own in both.groupby("qid")]
        differences = np.abs(other - plain)
        rows.append((name, f"{differences.max():.2g}", f"{(differences > 0).mean():.0%}", f"{np.mean(taus):.3f}"))
    print(f"{len(candidates)} documents of {args.topics} topics; standard deviation of the scores: {plain.std():.2f}")
    print(pd.DataFrame(rows, columns=["change", "largest difference", "pairs", "tau"]).to_string(index=False))


if __name__ == "__main__":
    main()
