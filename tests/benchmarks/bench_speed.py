"""Windows per second of MaxP on a CPU, next to the CrossEncoder of sentence-transformers, and the machine's ceiling.

    python tests/benchmarks/bench_speed.py --collection PATH/time [--topics 2] [--depth 10] [--threads 2]
        [--rounds 3] [--settings torch torch-bf16 openvino st st-bf16 st-openvino ...] [--memory]

BM25's top documents of each topic are reranked by the packaged MaxP, written as a Hugging Face checkpoint that both
sides load, over windows of 150 words with stride 75. The CrossEncoder (`st...`) receives the texts of the same windows,
which are split before the clock starts, and the best score of each document is taken. It sorts pairs by length itself;
its batch size is the fastest of 16, 32 and 64. MaxP is timed from the frame of texts to the frame of scores, with
nothing remembered from earlier rounds. Settings take turns, and the table shows the best round of each.

`st` is the CrossEncoder's default: torch in float32. Its own OpenVINO and ONNX backends need optimum-intel and
optimum-onnx, which do not install next to transformers 5.24. `st-openvino...` and `st-onnx...` are the same exports
made by hand: the CrossEncoder as it is, with its encoder computed by OpenVINO or ONNX Runtime; `st-onnx-int8` is
quantized dynamically, as in sentence-transformers. Settings that lack a library are left out with a note.

Columns: `first s`, seconds from the constructor to the score of one document, with the export; `peak`, the share of the
machine's matrix peak at this precision that the encoder reaches. The peak is that of the fastest of torch, numpy and
OpenVINO. `error` (the largest difference of a score, in standard deviations of all scores) and `tau` (Kendall's, mean
over topics) compare with `torch`. `truncated` counts the windows (`st`) or documents that were not read to the end.
`MB` (with `--memory`) is the peak of a process that scores with this setting alone. Needs the extras `demo` and
`openvino`, sentence-transformers, and for `st-onnx...` onnx and onnxruntime.
"""

from __future__ import annotations

import argparse
import copy
import json
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ir_measures
import numpy as np
import pandas as pd
import questions
import torch
from scipy.stats import kendalltau

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import pyterrier_longdoc as ld
from pyterrier_longdoc.modelling.backbones.load import load_backbone
from pyterrier_longdoc.modelling.devices import has_bfloat16
from pyterrier_longdoc.modelling.runtimes import BackboneInputs, ByPosition, Form, compiled, converted
from pyterrier_longdoc.modelling.tokens import tokenize
from tests.support import memory

OURS = ("torch", "torch-bf16", "openvino")
PEERS = ("st", "st-bf16", "st-openvino", "st-onnx", "st-onnx-int8")
NAMES = ("input_ids", "attention_mask", "token_type_ids")
WINDOWS = ld.SlidingWords(150, 75)
BATCH_SIZES = (16, 32, 64)
NEARLY_LINEAR = 1e-3
"""A state times this is so small that tanh changes it by less than 1e-4 of its size."""


@dataclass
class Setting:
    """A system, and what was measured of it; `score` takes the number of rows, `tune` looks for the best batch size."""

    name: str
    score: Callable[[int], np.ndarray]
    truncated: Callable[[], int]
    tune: Callable[[], None] = lambda: None
    seconds: list[float] = field(default_factory=list)
    scores: np.ndarray | None = None
    first: float = float("nan")

    @property
    def precision(self) -> str:
        """float32, bf16 or int8."""
        return next((kind for kind in ("bf16", "int8") if self.name.endswith(kind)), "float32")


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


def passages(scorer: Any, frame: pd.DataFrame) -> list[list[str]]:
    """The texts of the windows of each row."""
    cut: dict[str, list[str]] = {}
    for text in dict.fromkeys(frame["text"]):
        (document,) = tokenize(scorer.tokenizer, [text], offsets=True)
        cut[text] = [text[slice(*document.characters(span))] for span in scorer.reader.windows(document)]
    return [cut[text] for text in frame["text"]]


def ours(name: str, folder: str, frame: pd.DataFrame, max_query_len: int) -> Setting:
    """This package's MaxP with one of its runtimes."""
    runtime, _, precision = name.partition("-")
    options = {"runtime": runtime, "dtype": "bfloat16" if precision == "bf16" else "float32", "device": "cpu"}
    model = ld.MaxP(folder, windows=WINDOWS, max_query_len=max_query_len, **options)

    def score(rows: int) -> np.ndarray:
        return model(frame.head(rows))["score"].to_numpy()

    return Setting(name, score, lambda: model.coverage.pairs_truncated)


def peer(name: str, folder: str, frame: pd.DataFrame, cut: list[list[str]]) -> Setting:
    """The CrossEncoder over the texts of the windows, and the best score of each row."""
    from sentence_transformers import CrossEncoder

    options: dict[str, Any] = {"max_length": 512, "device": "cpu", "activation_fn": torch.nn.Identity()}
    if name == "st-bf16":
        options["model_kwargs"] = {"dtype": torch.bfloat16}
    model = CrossEncoder(folder, **options)
    pairs = [(query, passage) for query, texts in zip(frame["query"], cut, strict=True) for passage in texts]
    library, _, precision = name.removeprefix("st-").partition("-")
    if library in ("openvino", "onnx"):
        encoder = load_backbone(folder).model.eval()
        if library == "openvino":
            form = compiled(converted(encoder, NAMES), torch.float32)
        else:
            form = onnx_form(encoder, dict(model.tokenizer(pairs[:1], return_tensors="pt")), int8=precision == "int8")
        replace_encoder(model, form)
    size = 32

    def predict(pairs: list[tuple[str, str]], size: int) -> np.ndarray:
        return np.asarray(model.predict(pairs, batch_size=size, show_progress_bar=False), dtype="float64")

    def score(rows: int) -> np.ndarray:
        counts = list(map(len, cut[:rows]))
        return np.maximum.reduceat(predict(pairs[: sum(counts)], size), np.cumsum([0, *counts[:-1]]))

    def seconds(size: int) -> float:
        start = time.perf_counter()
        predict(pairs[:64], size)
        return time.perf_counter() - start

    def tune() -> None:
        nonlocal size
        size = min(BATCH_SIZES, key=seconds)

    return Setting(name, score, lambda: sum(len(ids) > 512 for ids in model.tokenizer(pairs)["input_ids"]), tune)


def replace_encoder(model: Any, form: Form) -> None:
    """Let another library compute the encoder of a CrossEncoder, which batches and pools as before."""
    from transformers.modeling_outputs import BaseModelOutputWithPooling

    bert = model.model.bert

    def forward(input_ids: torch.Tensor, **inputs: Any) -> BaseModelOutputWithPooling:
        states = form({"input_ids": input_ids, **{name: inputs[name] for name in NAMES[1:]}})
        return BaseModelOutputWithPooling(last_hidden_state=states, pooler_output=bert.pooler(states))

    bert.forward = forward


def onnx_form(encoder: Any, inputs: BackboneInputs, *, int8: bool) -> Form:
    """The encoder in ONNX Runtime."""
    import onnxruntime
    from onnxruntime.quantization import QuantType, quantize_dynamic

    with tempfile.TemporaryDirectory() as scratch:
        file, quantized = str(Path(scratch, "float32.onnx")), str(Path(scratch, "int8.onnx"))
        torch.onnx.export(
            ByPosition(encoder, NAMES),
            tuple(inputs[name] for name in NAMES),
            file,
            input_names=list(NAMES),
            dynamic_axes={name: {0: "windows", 1: "tokens"} for name in NAMES},
            dynamo=False,
        )
        if int8:
            vnni = "vnni" in Path("/proc/cpuinfo").read_text()
            quantize_dynamic(file, quantized, weight_type=QuantType.QInt8 if vnni else QuantType.QUInt8)
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = torch.get_num_threads()
        session = onnxruntime.InferenceSession(quantized if int8 else file, options, providers=["CPUExecutionProvider"])
    return lambda inputs: torch.from_numpy(session.run(None, {name: inputs[name].numpy() for name in NAMES})[0])


# The machine's ceiling.


def matrix_peaks(size: int = 1024, layers: int = 4, rounds: int = 5) -> dict[str, dict[str, float]]:
    """GFLOP/s of products of square matrices, by precision and library; no bf16 where it is emulated."""
    import openvino

    x, weights = torch.randn(size, size), torch.nn.Sequential(*(torch.nn.Linear(size, size) for _ in range(layers)))
    array, flops = x.numpy(), 2 * size**3 / 1e9

    def speed(run: Callable[[], Any], products: int = 1) -> float:
        seconds = []
        for _ in range(rounds + 1):
            start = time.perf_counter()
            run()
            seconds.append(time.perf_counter() - start)
        return products * flops / min(seconds[1:])

    form = compiled(openvino.convert_model(weights, example_input=x), torch.float32)
    with torch.inference_mode():
        peaks = {
            "float32": {
                "torch": speed(lambda: x @ x),
                "numpy": speed(lambda: array @ array),
                "openvino": speed(lambda: form({"x": x}), layers),
            }
        }
        if has_bfloat16(torch.device("cpu")):
            half = x.bfloat16()
            peaks["bf16"] = {"torch": speed(lambda: half @ half)}
    return peaks


def giga_operations(model: torch.nn.Module, lengths: list[int]) -> float:
    """Billions of multiplications and additions, in linear layers and in attention, for windows of so many tokens."""
    weights = sum(module.weight.numel() for module in model.modules() if isinstance(module, torch.nn.Linear))
    width = model.config.hidden_size * model.config.num_hidden_layers
    return sum(2.0 * weights * tokens + 4.0 * width * tokens**2 for tokens in lengths) / 1e9


def tau(frame: pd.DataFrame, scores: np.ndarray, reference: np.ndarray) -> float:
    """Kendall's tau with the reference, mean over topics with more than one document."""
    both = pd.DataFrame({"qid": frame["qid"].to_numpy(), "a": scores, "b": reference})
    return float(np.mean([kendalltau(of["a"], of["b"]).statistic for _, of in both.groupby("qid") if len(of) > 1]))


def ndcg(frame: pd.DataFrame, scores: np.ndarray, qrels: pd.DataFrame) -> float:
    """NDCG@10 of a run."""
    run_ = pd.DataFrame({"query_id": frame["qid"], "doc_id": frame["docno"], "score": scores})
    judged = qrels.rename(columns={"qid": "query_id", "docno": "doc_id", "label": "relevance"})
    return float(ir_measures.calc_aggregate([ir_measures.nDCG @ 10], judged, run_)[ir_measures.nDCG @ 10])


def table(
    settings: list[Setting], frame: pd.DataFrame, qrels: pd.DataFrame, windows: int, speeds: dict[str, float]
) -> pd.DataFrame:
    """One row per setting; `speeds` are shares of the peak at one second."""
    by_name = {setting.name: setting for setting in settings}
    base, peers = by_name.get("torch", settings[0]), [setting for setting in settings if setting.name in PEERS]
    rows = []
    for setting in settings:
        best = min(setting.seconds)
        rivals = [min(peer.seconds) for peer in peers if peer.precision == setting.precision]
        rows.append(
            {
                "setting": setting.name,
                "windows/s": round(windows / best, 1),
                "to torch": round(min(base.seconds) / best, 2),
                "to best st": round(min(rivals) / best, 2) if rivals else "",
                "peak": f"{speeds[setting.precision] / best:.0%}" if setting.precision in speeds else "",
                "first s": round(setting.first, 1),
                "error": f"{np.abs(setting.scores - base.scores).max() / base.scores.std():.1e}",
                "tau": round(tau(frame, setting.scores, base.scores), 3),
                "nDCG@10": round(ndcg(frame, setting.scores, qrels), 4),
                "truncated": setting.truncated(),
            }
        )
    return pd.DataFrame(rows)


def build(
    args: argparse.Namespace, folder: str, frame: pd.DataFrame, cut: list[list[str]], query: int
) -> list[Setting]:
    """The settings that can be made here."""
    settings = []
    for name in args.settings:
        start = time.perf_counter()
        try:
            one = ours(name, folder, frame, query) if name in OURS else peer(name, folder, frame, cut)
        except ImportError as error:
            print(f"  {name} is left out: {str(error).strip().splitlines()[0]}", flush=True)
            continue
        one.score(1)
        one.first = time.perf_counter() - start
        one.tune()
        print(f"  {name}: first document after {one.first:.1f} s", flush=True)
        settings.append(one)
    return settings


def run(settings: list[Setting], rounds: int, rows: int) -> None:
    """Let the settings take turns; another one begins each round."""
    for round_ in range(rounds):
        for i in range(len(settings)):
            setting = settings[(round_ + i) % len(settings)]
            start = time.perf_counter()
            setting.scores = setting.score(rows)
            setting.seconds.append(time.perf_counter() - start)
            print(f"  round {round_ + 1}: {setting.name} {setting.seconds[-1]:.2f} s", file=sys.stderr, flush=True)


def megabytes(name: str) -> int:
    """The peak of a process that scores with one setting alone."""
    command = [sys.executable, __file__, *sys.argv[1:], "--settings", name, "--report-memory"]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    return json.loads(lines[-1])["MB"]


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--collection", type=Path, required=True, help="folder with docs.jsonl, topics.tsv, qrels.txt")
    parser.add_argument("--topics", type=int, default=4, help="number of topics; 0 takes all (default 4)")
    parser.add_argument("--depth", type=int, default=10)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--settings", nargs="+", choices=[*OURS, *PEERS], default=[*OURS, *PEERS])
    parser.add_argument("--memory", action="store_true", help="measure memory as well, in a process for each setting")
    parser.add_argument("--report-memory", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    warnings.filterwarnings("ignore", category=ld.TruncationWarning)
    asked = questions.Questions(args.collection, "test", args.topics)
    frame = questions.candidates(asked.texts, asked.topics, args.depth)
    with tempfile.TemporaryDirectory() as scratch:
        folder = checkpoint(Path(scratch))
        tokenizer = load_backbone(folder).tokenizer
        queries = tokenizer(list(frame["query"]), add_special_tokens=False)["input_ids"]
        query = max(map(len, queries))
        scorer = ld.MaxP(folder, windows=WINDOWS, max_query_len=query, device="cpu").model
        cut = passages(scorer, frame)
        settings = build(args, folder, frame, cut, query)
        if args.report_memory:
            memory.growth(lambda: settings[0].score(len(frame)))
            print(json.dumps({"MB": round(memory.status("VmHWM"))}))
            return
        windows = sum(map(len, cut))
        print(
            f"{frame['qid'].nunique()} topics, {len(frame)} documents, {windows} windows of 150 words with stride 75; "
            f"{args.threads} thread(s), best of {args.rounds} rounds"
        )
        peaks = matrix_peaks()
        print("GFLOP/s of products of 1024 x 1024 matrices:")
        print(pd.DataFrame(peaks).T.round(0).to_string())
        run(settings, args.rounds, len(frame))
        pairs = [(q, text) for q, texts in zip(frame["query"], cut, strict=True) for text in texts]
        lengths = [len(ids) for ids in tokenizer(pairs)["input_ids"]]
        work = giga_operations(scorer.encoder.backbone, lengths)
        shares = {precision: work / max(speeds.values()) for precision, speeds in peaks.items()}
        results = table(settings, frame, asked.qrels, windows, shares)
        if args.memory:
            results["MB"] = [megabytes(name) for name in results["setting"]]
    print(results.to_string(index=False))


if __name__ == "__main__":
    main()
