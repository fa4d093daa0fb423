"""What the title in every window is worth: packaged models over long docstrings, whose titles are their dotted paths.

    python tests/benchmarks/titles.py [--topics 60] [--depth 10] [--windows 3] [--models maxp parade-attn]

Topics of the docstrings' test split whose document has more than 512 tokens and is among BM25's top documents (BM25 has
not indexed the titles); each system reranks these, and reads the windows that `BM25Windows` finds best, with what it
reads with them. `text`: without the title, as the models were trained; `joined`: the title before the text, in its
first window; `repeated`: `repeat="title"`, in every window. Differences from `text`, and of `repeated` from `joined`,
with the topics that gain and lose, and p-values (paired t-test, corrected by Holm over the rows of a table). The title
is a dotted path such as `scipy.linalg._basic.solve_banded`, which names what the query describes: the models were
trained without it, so that both directions are possible. Needs the extra `demo`.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

VARIANTS: dict[str, dict[str, Any]] = {
    "text": {},
    "joined": {"text_field": ("title", "text")},
    "repeated": {"text_field": ("title", "text"), "repeat": "title"},
}


def candidates(args: argparse.Namespace) -> tuple[Any, Any, Any]:
    """Topics, BM25's top documents with text and title, and qrels."""
    import pyterrier as pt

    from pyterrier_longdoc.demo import first_stage

    dataset = pt.get_dataset("longdoc:docstrings")
    topics, qrels = dataset.get_topics("test-long"), dataset.get_qrels("test-long")
    with tempfile.TemporaryDirectory() as scratch:
        pipeline = first_stage(dataset, Path(scratch) / "index", args.depth) >> dataset.text_loader(["text", "title"])
        found = pipeline(topics)
    relevant = qrels[qrels["label"] > 0].merge(found[["qid", "docno"]], on=["qid", "docno"])
    topics = topics[topics["qid"].isin(relevant["qid"])]
    if 0 < args.topics < len(topics):
        topics = topics.sample(args.topics, random_state=0)
    topics = topics.sort_values("qid").reset_index(drop=True)
    return topics, found[found["qid"].isin(topics["qid"])].reset_index(drop=True), qrels


def main() -> None:
    """Prints a table for each model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--topics", type=int, default=60, help="sample so many; 0 takes all")
    parser.add_argument("--depth", type=int, default=10, help="documents of a topic")
    parser.add_argument("--windows", type=int, default=3, help="that are read of a document; 0 reads all")
    parser.add_argument("--models", nargs="*", default=["maxp", "parade-attn"], help="of longdoc:...")
    parser.add_argument("--dtype", help="float32, bfloat16 or fastest")
    args = parser.parse_args()
    import pyterrier as pt
    from ir_measures import RR, nDCG

    import pyterrier_longdoc as ld

    topics, found, qrels = candidates(args)
    print(f"{len(topics)} topics, {len(found)} candidates of {found['docno'].nunique()} documents")
    preselect = ld.BM25Windows(args.windows) if args.windows else None
    measures = [RR, nDCG @ 10]
    for name in args.models:
        runs, told = {"BM25": found}, {}
        for variant, arguments in VARIANTS.items():
            model = ld.CrossEncoder.load(f"longdoc:{name}", preselect=preselect, dtype=args.dtype, **arguments)
            runs[variant], told[variant] = model(found), model.coverage
        print(f"\n{name}: {told['repeated']}")
        for baseline in ("text", "joined"):
            names = list(runs) if baseline == "text" else ["joined", "repeated"]
            table = pt.Experiment(
                [runs[each] for each in names],
                topics,
                qrels,
                measures,
                names=names,
                baseline=names.index(baseline),
                correction="holm",
            ).set_index("name")
            columns = {}
            for measure in map(str, measures):
                columns[measure] = table[measure].round(4)
                columns[f"{measure} change"] = (table[measure] - table.loc[baseline, measure]).round(4)
                columns[f"{measure} +/-"] = [
                    f"{up:.0f}/{down:.0f}"
                    for up, down in zip(table[f"{measure} +"], table[f"{measure} -"], strict=True)
                ]
                columns[f"{measure} p"] = table[f"{measure} p-value corrected"].map("{:.2g}".format)
            print(f"against {baseline}\n{table.assign(**columns)[list(columns)].to_string()}")


if __name__ == "__main__":
    main()
