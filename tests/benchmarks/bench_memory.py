"""What `fit` loads before its first step, and what `transform` holds beyond the frame.

    python tests/benchmarks/bench_memory.py [--rows 200000] [--checkout PATH]

`fit`: candidates without text, 100 for a query, and a loader that counts; one optimiser step of 16 queries with two
documents each, by a tiny random model. Seconds and MB are of the whole `fit`, the first step included.
`transform`: the same rows with short texts and no encoder (scores are the numbers of windows), so that the bytes are
those of the way through the package. With `--checkout` another
checkout of the project is measured, for a table of before and after. Linux.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
import tracemalloc
import warnings
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pandas as pd

PER_QUERY = 100


def candidates(rows: int, texts: int = 0) -> pd.DataFrame:
    """100 candidates for each query, with so many distinct texts if any."""
    queries, ranks = np.divmod(np.arange(rows), PER_QUERY)
    run = pd.DataFrame({"qid": [f"q{query}" for query in queries], "query": [f"query {query}" for query in queries]})
    run["docno"] = [f"D{row % (texts or rows)}" for row in range(rows)]
    run["score"] = -ranks.astype(float)
    return run.assign(text=[f"the old dog and cat {row % texts}" for row in range(rows)]) if texts else run


def fit(backbone: str, rows: int) -> dict[str, float]:
    """Texts that are loaded, seconds and MB until the first step is done."""
    import pyterrier as pt

    import pyterrier_longdoc as ld
    from tests.support.memory import growth

    loaded: list[int] = []

    def load(frame: pd.DataFrame) -> pd.DataFrame:
        loaded.append(len(frame))
        # Made anew each time, as a store on disk would.
        return frame.assign(text=[f"{docno} the old dog and cat " * 80 for docno in frame["docno"]])

    run = candidates(rows)
    judged = run.iloc[::PER_QUERY][["qid", "docno"]].assign(label=1)
    model = ld.MaxP(
        backbone,
        window_size=32,
        stride=32,
        max_query_len=8,
        max_doc_len=32,  # so that the step itself takes little
        training=ld.TrainingArgs(max_steps=1),
        text_loader=pt.apply.generic(load),
    )
    _ = model.model  # loaded before the clock starts
    start = time.perf_counter()
    grown = growth(lambda: model.fit(run, judged))
    return {"rows": rows, "texts loaded": sum(loaded), "seconds": time.perf_counter() - start, "MB": grown}


def transform(backbone: str, rows: int, texts: int, dtype: str) -> dict[str, float | str]:
    """Bytes a row beyond the frame: at most while it runs, and of what is kept."""
    import torch

    import pyterrier_longdoc as ld
    from pyterrier_longdoc.modelling.model import Model

    run = candidates(rows, texts).astype({"text": dtype})
    model = ld.FirstP(backbone, max_query_len=8)

    def count_windows(self: Model, read: list, coverage: object) -> tuple:
        return read, torch.tensor([float(len(pair.windows)) for pair in read])

    with patch.object(Model, "compute", count_windows):
        model(run.head(PER_QUERY))  # imports and first calls
        gc.collect()
        tracemalloc.start()
        out = model(run)
        kept, peak = (size / rows for size in tracemalloc.get_traced_memory())
        tracemalloc.stop()
    assert len(out) == rows
    return {"rows": rows, "distinct texts": texts, "text column": dtype, "peak bytes a row": peak, "kept": kept}


def main() -> None:
    """Prints both tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=200_000)
    parser.add_argument("--checkout", type=Path, default=Path(__file__).resolve().parents[2])
    args = parser.parse_args()
    sys.path.insert(0, str(args.checkout))
    warnings.simplefilter("ignore")
    from tests.support import tiny

    backbone = tiny.encoder()
    print(pd.DataFrame([fit(backbone, args.rows)]).round(1).to_string(index=False), flush=True)
    cases = [(args.rows // 4, "object"), (args.rows // 4, "str"), (args.rows, "str")]
    rows = [transform(backbone, args.rows, *case) for case in cases]
    print(pd.DataFrame(rows).round(1).to_string(index=False))


if __name__ == "__main__":
    main()
