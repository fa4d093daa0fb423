"""Does a killed training end with the weights of one that was not? Kills at random moments, compared byte for byte.

    python tests/benchmarks/bench_resume.py [--kills 20] [--seed 0]

A tiny PARADE is trained on a toy task, in a process that is killed (`kill -9`) at a random moment within the time that
an uninterrupted training takes, and started again until it ends. Prints each kill with the step of the state it left,
and how many of the final checkpoints are the same. Not for Windows.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from pathlib import Path

from safetensors import safe_open

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import json

import pyterrier_longdoc as ld
from pyterrier_longdoc.training.resume import STATE_FILE
from tests.support import processes, tiny
from tests.support.toy import toy_task


def fit(backbone: str, state: Path, out: Path) -> None:
    """Trains and saves."""
    run, judged = toy_task(0)
    recipe = ld.TrainingArgs(
        epochs=12, queries_per_step=2, learning_rates={"": 1e-2}, metric="RR", checkpoint=state, save_steps=3
    )
    model = ld.PARADE(backbone, window_size=6, stride=4, max_query_len=2, training=recipe)
    model.fit(run, judged, run, judged)
    model.save(out)


def step_of(state: Path) -> int | None:
    """The step of a saved state; None if there is none."""
    if not (state / STATE_FILE).exists():
        return None
    with safe_open(state / STATE_FILE, framework="pt") as file:
        return json.loads(file.metadata()["about"])["state"]["step"]


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    rng = random.Random(args.seed)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        backbone = tiny.checkpoint(folder / "backbone")
        start = time.perf_counter()
        assert processes.wait(processes.start(lambda: fit(backbone, folder / "whole-state", folder / "whole"))) == 0
        seconds = time.perf_counter() - start
        expected = (folder / "whole" / "model.safetensors").read_bytes()
        print(f"uninterrupted: {seconds:.1f} s, {step_of(folder / 'whole-state')} steps")
        killed = same = 0
        while killed < args.kills:
            state, out = folder / f"state-{killed}", folder / f"out-{killed}"
            child = processes.start(lambda state=state, out=out: fit(backbone, state, out))
            time.sleep(rng.uniform(0, seconds))
            processes.kill(child)
            if processes.wait(child) == 0:
                print("ended before it was killed: not counted")
                for path in (*state.iterdir(), *out.iterdir()):
                    path.unlink()
                continue
            left = step_of(state)
            assert processes.wait(processes.start(lambda state=state, out=out: fit(backbone, state, out))) == 0
            equal = (out / "model.safetensors").read_bytes() == expected
            killed, same = killed + 1, same + equal
            print(f"kill {killed:2}: state of step {left}, final weights {'the same' if equal else 'DIFFERENT'}")
        print(f"{killed} kills, {same} final checkpoints the same as without")
        sys.exit(same != killed)


if __name__ == "__main__":
    main()
