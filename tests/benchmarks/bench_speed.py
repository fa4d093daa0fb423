"""Documents per second of MaxP, runtime by runtime, beside the CrossEncoder of sentence-transformers.

    python tests/benchmarks/bench_speed.py --collection PATH/time [--topics 20] [--depth 100] [--threads 2]
        [--rounds 3] [--settings torch torch-bf16 openvino openvino-bf16 openvino-int8 st st-bf16 ...]

BM25's top documents of each topic are reranked by the packaged MaxP, written as a Hugging Face checkpoint that both
sides load, over windows of 150 words, one every 75. The CrossEncoder (`st...`) gets the texts of the same windows, cut
beforehand and free of charge, and the best score of each document is taken; `tokens that differ` is the share of
windows that are other tokens when read alone. MaxP is timed from the frame of texts to the frame of scores, with
nothing remembered from earlier rounds. A first round exports and quantizes; then settings take turns, round by round.
Figures are those of each one's best round, the first included. Agreement is with the CrossEncoder in fp32: Kendall's
tau (mean over topics) and the difference in nDCG@10.

`st` is the CrossEncoder's default (torch, fp32, 32 pairs in a batch). `st-openvino` is its own OpenVINO back end and
needs optimum-intel; `st-export` is for where that cannot be installed: the CrossEncoder as it is, its encoder replaced
by this package's OpenVINO export, in the precision that OpenVINO would choose. Settings that lack a library are left
out with a note. Needs the extras `demo` and `openvino`, and sentence-transformers.
"""

from __future__ import annotations

import argparse
import copy
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import pyterrier_longdoc as ld
from pyterrier_longdoc.common.caches import forget_embeddings
from pyterrier_longdoc.demo import first_stage
from pyterrier_longdoc.modelling.backbones.load import load_backbone
from pyterrier_longdoc.modelling.devices import resolve_dtype
from pyterrier_longdoc.modelling.runtimes import OpenVinoRuntime
from pyterrier_longdoc.modelling.tokens import tokenize

OURS = {
    "torch": ("torch", "float32"),
    "torch-fastest": ("torch", "fastest"),
    "torch-bf16": ("torch", "bfloat16"),
    "openvino": ("openvino", "float32"),
    "openvino-bf16": ("openvino", "bfloat16"),
    "openvino-int8": ("openvino", "float32"),
}
PEERS = ("st", "st-bf16", "st-openvino", "st-export")
WINDOWS = ld.SlidingWords(150, 75)
NEARLY_LINEAR = 1e-3
"""A state times this is so small that tanh changes it by less than 1e-4 of its size."""


@dataclass
class Setting:
    """A system, the seconds of its rounds, and the scores of its last one."""

    name: str
    score: Callable[[], np.ndarray]
    seconds: list[float] = field(default_factory=list)
    scores: np.ndarray | None = None
    padding: float | None = None


def checkpoint(folder: Path) -> str:
    """The packaged MaxP as a BERT cross-encoder.

    Its last layer reads the first token's state, which BERT's classifier sends through a linear layer and tanh: here
    that layer only scales the state down to where tanh does nothing, and the last layer scales it up again.
    """
    from transformers import BertForSequenceClassification

    scorer = ld.MaxP.load("longdoc:maxp", device="cpu").model
    config = copy.deepcopy(scorer.encoder.backbone.config)
    config.num_labels = 1
    model = BertForSequenceClassification(config).eval()
    missing, _ = model.bert.load_state_dict(scorer.encoder.backbone.state_dict(), strict=False)
    if any(not name.startswith("pooler.") for name in missing):
        raise RuntimeError(f"the packaged encoder lacks {missing}")
    with torch.no_grad():
        model.bert.pooler.dense.weight.copy_(NEARLY_LINEAR * torch.eye(config.hidden_size))
        model.bert.pooler.dense.bias.zero_()
        model.classifier.weight.copy_(scorer.head.final.weight / NEARLY_LINEAR)
        model.classifier.bias.copy_(scorer.head.final.bias)
    model.save_pretrained(folder)
    scorer.tokenizer.save_pretrained(folder)
    return str(folder)


def passages(scorer: Any, frame: pd.DataFrame) -> tuple[list[list[str]], float]:
    """The texts of the windows of each row, and the share of windows that are other tokens when read alone."""
    cut: dict[str, list[str]] = {}
    differ = []
    for text in dict.fromkeys(frame["text"]):
        (document,) = tokenize(scorer.tokenizer, [text], offsets=True)
        spans = scorer.settings.windows(document)
        cut[text] = [text[slice(*document.characters(span))] for span in spans]
        alone = tokenize(scorer.tokenizer, cut[text])
        differ += [list(document.ids[a:b]) != list(again.ids) for (a, b), again in zip(spans, alone, strict=True)]
    return [cut[text] for text in frame["text"]], float(np.mean(differ))


def ours(name: str, folder: str, frame: pd.DataFrame, max_query_len: int) -> Setting:
    """This package's MaxP by one of its runtimes."""
    runtime, dtype = OURS[name]
    model = ld.MaxP(folder, windows=WINDOWS, max_query_len=max_query_len, runtime=runtime, dtype=dtype, device="cpu")
    if name == "openvino-int8":
        model = model.quantize(frame)

    def score() -> np.ndarray:
        forget_embeddings()
        scores = model(frame)["score"].to_numpy()
        setting.padding = getattr(model.coverage, "padding", None)
        return scores

    setting = Setting(name, score)
    return setting


def peer(name: str, folder: str, frame: pd.DataFrame, cut: list[list[str]], args: argparse.Namespace) -> Setting:
    """The CrossEncoder over the texts of the windows, and the best score of each row."""
    from sentence_transformers import CrossEncoder

    options: dict[str, Any] = {"max_length": 512, "device": "cpu", "activation_fn": torch.nn.Identity()}
    if name == "st-bf16":
        options["model_kwargs"] = {"dtype": torch.bfloat16}
    if name == "st-openvino":
        options |= {"backend": "openvino", "model_kwargs": {"ov_config": {"INFERENCE_NUM_THREADS": args.threads}}}
    model = CrossEncoder(folder, **options)
    bfloat16 = name == "st-export" and resolve_dtype("fastest", torch.device("cpu")) == torch.bfloat16
    if name == "st-export":
        replace_encoder(model, folder)
    pairs = [(query, passage) for query, texts in zip(frame["query"], cut, strict=True) for passage in texts]
    starts = np.cumsum([0, *map(len, cut[:-1])])

    def score() -> np.ndarray:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=bfloat16):
            scores = model.predict(pairs, batch_size=args.peer_batch_size, show_progress_bar=False)
        return np.maximum.reduceat(np.asarray(scores, dtype="float64"), starts)

    return Setting(name, score)


def replace_encoder(model: Any, folder: str) -> None:
    """Lets OpenVINO compute the encoder of a CrossEncoder, which goes on batching and pooling as before."""
    from transformers.modeling_outputs import BaseModelOutputWithPooling

    bert, encoder = model.model.bert, load_backbone(folder).model.eval()
    runtime = OpenVinoRuntime()

    def forward(input_ids: torch.Tensor, **inputs: Any) -> BaseModelOutputWithPooling:
        given = {name: inputs.get(name) for name in ("attention_mask", "token_type_ids")}
        states = runtime(encoder, {"input_ids": input_ids, **given})
        return BaseModelOutputWithPooling(last_hidden_state=states, pooler_output=bert.pooler(states))

    bert.forward = forward


def run(settings: list[Setting], rounds: int) -> None:
    """So many rounds in turn, each begun by another setting."""
    for round_ in range(rounds):
        for i in range(len(settings)):
            setting = settings[(round_ + i) % len(settings)]
            start = time.perf_counter()
            setting.scores = setting.score()
            setting.seconds.append(time.perf_counter() - start)


def tau(frame: pd.DataFrame, scores: np.ndarray, reference: np.ndarray) -> float:
    """Kendall's tau with the reference, mean over topics with more than one document."""
    from scipy.stats import kendalltau

    both = pd.DataFrame({"qid": frame["qid"].to_numpy(), "a": scores, "b": reference})
    return float(np.mean([kendalltau(of["a"], of["b"]).statistic for _, of in both.groupby("qid") if len(of) > 1]))


def ndcg(frame: pd.DataFrame, scores: np.ndarray, qrels: pd.DataFrame) -> float:
    """NDCG@10 of a run."""
    import ir_measures

    run_ = pd.DataFrame({"query_id": frame["qid"], "doc_id": frame["docno"], "score": scores})
    judged = qrels.rename(columns={"qid": "query_id", "docno": "doc_id", "label": "relevance"})
    judged = judged[judged["query_id"].isin(set(run_["query_id"]))]
    return float(ir_measures.calc_aggregate([ir_measures.nDCG @ 10], judged, run_)[ir_measures.nDCG @ 10])


def table(settings: list[Setting], frame: pd.DataFrame, qrels: pd.DataFrame, windows: int) -> pd.DataFrame:
    """One row per setting."""
    best = {setting.name: min(setting.seconds) for setting in settings}
    fastest = min((seconds for name, seconds in best.items() if name in PEERS), default=float("nan"))
    by_name = {setting.name: setting for setting in settings}
    reference = by_name.get("st", settings[0]).scores
    gain = ndcg(frame, reference, qrels)
    return pd.DataFrame(
        {
            "setting": setting.name,
            "s": round(best[setting.name], 2),
            "documents/s": round(len(frame) / best[setting.name], 1),
            "windows/s": round(windows / best[setting.name], 1),
            "to st": round(best.get("st", float("nan")) / best[setting.name], 2),
            "to best st": round(fastest / best[setting.name], 2),
            "slowest round": round(max(setting.seconds) / best[setting.name], 2),
            "tau": round(tau(frame, setting.scores, reference), 4),
            "|d nDCG@10|": round(abs(ndcg(frame, setting.scores, qrels) - gain), 4),
            "padding": "" if setting.padding is None else f"{setting.padding:.1%}",
        }
        for setting in settings
    )


def collection(args: argparse.Namespace) -> tuple[pd.DataFrame, pd.DataFrame]:
    """BM25's top documents with their texts, and the qrels."""
    import pyterrier as pt

    dataset = pt.get_dataset(f"longdoc:folder:{args.collection}")
    topics = dataset.get_topics()
    if 0 < args.topics < len(topics):
        topics = topics.sample(args.topics, random_state=0).sort_values("qid").reset_index(drop=True)
    with tempfile.TemporaryDirectory() as scratch:
        bm25 = first_stage(dataset, Path(scratch) / "index", args.depth)
        return (bm25 >> dataset.text_loader())(topics), dataset.get_qrels()


def build(
    args: argparse.Namespace, folder: str, frame: pd.DataFrame, cut: list[list[str]], query: int
) -> list[Setting]:
    """The settings that can be made here, each after a first round, in which it exports and quantizes."""
    settings = []
    for name in args.settings:
        start = time.perf_counter()
        try:
            made = ours(name, folder, frame, query) if name in OURS else peer(name, folder, frame, cut, args)
            run([made], 1)
        except Exception as error:
            # sentence-transformers raises a plain Exception where optimum is missing.
            if not isinstance(error, ImportError) and "requires installing Optimum" not in str(error):
                raise
            print(f"  {name} is left out: {str(error).strip().splitlines()[0]}", flush=True)
            continue
        print(f"  {name}: first round {time.perf_counter() - start:.1f} s", flush=True)
        settings.append(made)
    return settings


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--collection", required=True, help="folder with docs.jsonl, topics.tsv and qrels.txt")
    parser.add_argument("--topics", type=int, default=20, help="sample so many; 0 takes all (default 20)")
    parser.add_argument("--depth", type=int, default=100)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--peer-batch-size", type=int, default=32, help="of the CrossEncoder (default: its own, 32)")
    parser.add_argument("--settings", nargs="+", choices=[*OURS, *PEERS], default=[*OURS, *PEERS])
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    warnings.filterwarnings("ignore", category=ld.TruncationWarning)
    frame, qrels = collection(args)
    with tempfile.TemporaryDirectory() as scratch:
        folder = checkpoint(Path(scratch))
        tokenizer = load_backbone(folder).tokenizer
        query = max(len(ids) for ids in tokenizer(list(set(frame["query"])), add_special_tokens=False)["input_ids"])
        scorer = ld.MaxP(folder, windows=WINDOWS, max_query_len=query, device="cpu").model
        cut, differ = passages(scorer, frame)
        windows = sum(map(len, cut))
        print(
            f"{frame['qid'].nunique()} topics, {len(frame)} documents, {windows} windows of 150 words, one every 75; "
            f"tokens that differ: {differ:.2%} of windows; {args.threads} thread(s), best of {args.rounds} rounds"
        )
        settings = build(args, folder, frame, cut, query)
        run(settings, args.rounds)
    print(table(settings, frame, qrels, windows).to_string(index=False))


if __name__ == "__main__":
    main()
