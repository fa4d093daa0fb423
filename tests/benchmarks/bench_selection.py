"""What it costs and saves to read only the k best windows of a document: selector by k, beside reading all.

    python tests/benchmarks/bench_selection.py [--topics 100] [--depth 20] [--k 1 2 3 5] [--threads 2]
    python tests/benchmarks/bench_selection.py --collection PATH/time --topics 0
    python tests/benchmarks/bench_selection.py --model longdoc:parade-attn --cross-encoder SMALLER
    python tests/benchmarks/bench_selection.py --gold PATH/medquad [--topics 200] [--scored 60] [--k 3]

Reranks BM25's top documents among those with more than `--min-tokens` tokens, and judges by the relevant ones among
these. Documents/s are those of one `transform` with everything loaded and nothing remembered, the best of `--rounds`;
"embedding, indexed" has the windows' embeddings from an earlier run. The change in nDCG@10 against all windows has a
p-value (paired t-test, corrected by Holm over the table). `longdoc:docstrings-*` and the bi-encoder of the default are
equally large: on so small a model, selection by embeddings that are not indexed cannot save time.

`--gold` compares the selectors that compute no layer of a model on dev questions with gold text: how often a right
document's best window, or one of its best three, overlaps the gold text, with the paired difference from BM25Windows
and its 95 % interval; and nDCG@10 of the first `--scored` questions when the model reads the best `k` windows of BM25's
ten best documents, with the CPU seconds of selection and model together. Needs the extra `demo`.
"""

from __future__ import annotations

import argparse
import tempfile
import time
import warnings
from functools import partial
from pathlib import Path
from typing import Any

CANDIDATES = 1000
"""Of which the documents that are too short are left out."""


def candidates(args: argparse.Namespace, tokenizer: Any) -> tuple[Any, Any, Any]:
    """Topics, their long candidates with text, and the qrels of long documents."""
    import pandas as pd
    import pyterrier as pt

    from pyterrier_longdoc.demo import first_stage

    folder = args.collection
    dataset = pt.get_dataset("longdoc:docstrings" if folder is None else f"longdoc:folder:{folder}")
    variant = "test-long" if folder is None else None
    topics, qrels = dataset.get_topics(variant), dataset.get_qrels(variant)
    judged = set(qrels["docno"])
    texts = pd.Series({d["docno"]: d["text"] for d in dataset.get_corpus_iter(verbose=False) if d["docno"] in judged})
    qrels = qrels[qrels["docno"].isin(texts.index[is_long(tokenizer, texts, args.min_tokens)])]
    topics = topics[topics["qid"].isin(qrels["qid"][qrels["label"] > 0])].reset_index(drop=True)
    if 0 < args.topics < len(topics):
        topics = topics.sample(args.topics, random_state=0).sort_values("qid").reset_index(drop=True)
    if not len(topics):
        raise SystemExit(f"no topic has a relevant document of more than {args.min_tokens} tokens: lower --min-tokens")
    with tempfile.TemporaryDirectory() as scratch:
        found = (first_stage(dataset, Path(scratch) / "index", CANDIDATES) >> dataset.text_loader())(topics)
    found = found[is_long(tokenizer, found["text"], args.min_tokens)].sort_values(["qid", "rank"])
    found = pt.model.add_ranks(found.groupby("qid").head(args.depth).reset_index(drop=True))
    return topics, found, qrels


def is_long(tokenizer: Any, texts: Any, tokens: int) -> Any:
    """Which texts have more than so many tokens."""
    from pyterrier_longdoc.modelling.tokens import tokenize

    distinct = list(dict.fromkeys(texts))
    lengths = dict(zip(distinct, map(len, tokenize(tokenizer, distinct)), strict=True))
    return texts.map(lengths) > tokens


def settings(args: argparse.Namespace) -> dict[tuple[str, str], Any]:
    """Preselections by the names of their rows."""
    import pyterrier_longdoc as ld

    words = load("longdoc:maxp", args.device)
    makers: dict[str, Any] = {
        "first": ld.FirstK,
        "bm25": ld.BM25Windows,
        "word embeddings": lambda k: ld.WordEmbeddingWindows(k, words),
    }
    if args.encoder != "none":
        encoder = ld.BiEncoder(args.encoder, device=args.device)
        makers["embedding"] = makers["embedding, indexed"] = lambda k: ld.EmbeddingWindows(k, encoder)
    if args.cross_encoder:
        small = load(args.cross_encoder, args.device)
        makers["cross-encoder"] = lambda k: ld.CrossEncoderWindows(k, small)
    return {("all", "all"): None} | {(name, str(k)): of(k) for name, of in makers.items() for k in args.k}


def load(name: str, device: str | None) -> Any:
    """A model of this package, or FirstP on any other cross-encoder."""
    import pyterrier_longdoc as ld

    if name.startswith("longdoc:") or (Path(name) / "pt_meta.json").is_file():
        return ld.CrossEncoder.load(name, device=device)
    return ld.FirstP(name, device=device)


def timed(model: Any, found: Any, rounds: int, *, indexed: bool) -> tuple[Any, float]:
    """The reranked frame, and the seconds of the fastest round."""
    from pyterrier_longdoc.common.caches import forget_embeddings

    model.transform(found.head(1))  # loads everything
    if indexed:
        model.transform(found)
    times = []
    for _ in range(rounds):
        if not indexed:
            forget_embeddings()
        start = time.perf_counter()
        out = model.transform(found)
        times.append(time.perf_counter() - start)
    return out, min(times)


def gold(args: argparse.Namespace, model: Any) -> None:
    """Prints evidence@1 and @3 of selectors on dev questions, and nDCG@10 of the model over the windows they choose."""
    import questions
    from ir_measures import nDCG

    import pyterrier_longdoc as ld
    from pyterrier_longdoc.modelling.tokens import tokenize

    asked = questions.Questions(Path(args.gold), "dev", args.topics)
    rows = asked.placed[["qid", "docno"]].drop_duplicates().merge(asked.topics, on="qid")
    rows["text"] = rows["docno"].map(asked.texts)
    texts = tokenize(model.model.tokenizer, rows["text"].tolist(), offsets=True)
    spans = list(map(model.make_windows(), texts))
    windows = sum(map(len, spans)) / len(spans)
    print(f"{Path(args.gold).name}: {len(asked.topics)} questions, {windows:.0f} windows a document")
    places = [list(map(text.characters, windows)) for text, windows in zip(texts, spans, strict=True)]
    scored = asked.topics.head(args.scored)
    found = questions.candidates(asked.texts, scored, 10)
    selectors = {
        "BM25Windows": ld.BM25Windows,
        "WordEmbeddingWindows": partial(ld.WordEmbeddingWindows, model=load(args.model, None)),
    }
    chosen, runs = {}, {"BM25": found}
    for name, of in selectors.items():
        selector = of(max(args.k))
        selector.scores(["a"], texts[:1], spans[:1])  # loads everything
        begin = time.process_time()
        scores = selector.scores(rows["query"].tolist(), texts, spans)
        per_document = 1000 * (time.process_time() - begin) / len(rows)
        chosen[name] = rows.assign(window_spans=places, window_scores=scores)
        model.preselect = selector
        begin = time.process_time()
        runs[name] = model.transform(found)
        print(f"{name}: {per_document:.1f} ms a document; {time.process_time() - begin:.0f} CPU s with {args.model}")
    evidence = ld.evidence_recall(chosen, asked.placed)
    print(evidence.table.round(3).to_string(index=False))
    columns = ["name", "reference", "measure", "difference", "low", "high", "p-value"]
    print(evidence.comparisons[columns].round(3).to_string(index=False))
    result = ld.Experiment(runs, scored, asked.qrels, [nDCG @ 10], baseline="BM25Windows")
    print(result.means.round(4).to_string(), result.comparisons[columns].round(4).to_string(index=False), sep="\n")


def main() -> None:
    """Prints the table of one model on one collection."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--collection", help="folder with docs.jsonl, topics.tsv and qrels.txt; default: docstrings")
    parser.add_argument("--topics", type=int, default=100, help="sample so many; 0 takes all")
    parser.add_argument("--depth", type=int, default=20, help="documents of a topic, at most")
    parser.add_argument("--min-tokens", type=int, default=1500)
    parser.add_argument("--k", type=int, nargs="*", default=[1, 2, 3, 5])
    parser.add_argument("--model", default="longdoc:maxp", help="a saved model of several windows")
    parser.add_argument("--encoder", default="longdoc:minilm-l6", help="of the bi-encoder; 'none' leaves it out")
    parser.add_argument("--cross-encoder", help="a small one that selects: a saved model, or any checkpoint")
    parser.add_argument("--gold", help="folder of a collection with gold text and splits: compare the choices with it")
    parser.add_argument("--scored", type=int, default=60, help="questions with --gold that the model reads windows for")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--device")
    parser.add_argument("--threads", type=int, help="of torch")
    args = parser.parse_args()
    import pandas as pd
    import pyterrier as pt
    import torch
    from ir_measures import nDCG

    if args.threads:
        torch.set_num_threads(args.threads)
    warnings.filterwarnings("ignore", message=".*did not read ")
    model = load(args.model, args.device)
    if args.gold:
        gold(args, model)
        return
    topics, found, qrels = candidates(args, model.model.tokenizer)
    print(f"{args.model}: {len(topics)} topics, {len(found)} documents of more than {args.min_tokens} tokens")
    runs, rows = {}, []
    for (name, k), preselect in settings(args).items():
        model.preselect = preselect
        runs[f"{name} {k}"], seconds = timed(model, found, args.rounds, indexed=name.endswith("indexed"))
        coverage = model.coverage
        rows.append(
            {"selector": name, "k": k, "docs/s": len(found) / seconds, "windows": coverage.windows_per_document}
        )
    table = pd.DataFrame(rows)
    table.insert(3, "speed-up", table["docs/s"] / table["docs/s"][0])
    result = pt.Experiment(
        list(runs.values()), topics, qrels, [nDCG @ 10], names=list(runs), baseline=0, correction="holm"
    ).set_index("name")
    measure = str(nDCG @ 10)
    table[measure] = result.loc[list(runs), measure].to_numpy()
    table["change"] = table[measure] - table[measure][0]
    table["p (Holm)"] = result.loc[list(runs), f"{measure} p-value corrected"].to_numpy()
    print(
        table.round({"docs/s": 1, "speed-up": 2, "windows": 2, measure: 4, "change": 4, "p (Holm)": 4}).to_string(
            index=False
        )
    )


if __name__ == "__main__":
    main()
