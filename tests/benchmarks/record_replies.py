"""Records what `notebooks/5_language_models.ipynb` replays: a small collection, BM25's run, and a model's replies.

No language model stands behind the replies: the packaged MaxP scores each document as it is shown in the prompt, and
answers in the form of OpenAI's API, on a port of this machine. The notebook's own cells ask, so that nothing else says
what is in the cache. The collection is made of the standard library's docstrings: another Python makes another one.

Run: python -m tests.benchmarks.record_replies
"""

from __future__ import annotations

import json
import math
import os
import re
import sqlite3
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import pandas as pd
import pyterrier as pt

import pyterrier_longdoc as ld
from pyterrier_longdoc.common.store import Store
from pyterrier_longdoc.data import DocstringsDataset
from pyterrier_longdoc.data.docstrings import installed_packages
from pyterrier_longdoc.data.provider import docstrings_with
from pyterrier_longdoc.demo import first_stage
from pyterrier_longdoc.experiment import write_run
from pyterrier_longdoc.listwise.prompt_budget import Tokens
from tests.support.llm import Answer, completion, serving

NOTEBOOK = Path(__file__).parents[2] / "notebooks" / "5_language_models.ipynb"
FOLDER = Path(ld.__file__).parent / "data" / "replies"
TOPICS, DEPTH = 10, 20

_DOCUMENT = re.compile(r"^\[(\w+)\] (.*)$", re.MULTILINE)
_QUERY = re.compile(r"Query: (.*)")


def make_collection(folder: Path) -> None:
    """Topics whose relevant document BM25 finds, and its best documents for each; rankings can change no others."""
    far = docstrings_with("far", DocstringsDataset({"stdlib": installed_packages()["stdlib"]}))
    qrels = far.get_qrels("test")
    with tempfile.TemporaryDirectory() as scratch:
        run = first_stage(far, Path(scratch) / "index", DEPTH).transform(far.get_topics("test"))
    found = run.merge(qrels[qrels["label"] > 0], on=["qid", "docno"])["qid"].drop_duplicates()
    chosen = set(found.sample(TOPICS, random_state=1))
    run = run[run["qid"].isin(chosen)]
    topics, qrels = (frame[frame["qid"].isin(chosen)] for frame in (far.get_topics("test"), qrels))
    shown = far.text_loader()(run[["docno"]].drop_duplicates().sort_values("docno"))
    documents = shown[["docno", "text"]].to_dict("records")
    (folder / "docs.jsonl").write_text("".join(f"{json.dumps(each)}\n" for each in documents), encoding="utf-8")
    lines = (f"{qid}\t{query}\n" for qid, query in topics[["qid", "query"]].itertuples(index=False))
    (folder / "topics.tsv").write_text("".join(lines), encoding="utf-8")
    judged = (f"{qid} 0 {docno} {label}\n" for qid, docno, label in qrels[["qid", "docno", "label"]].to_numpy())
    (folder / "qrels.txt").write_text("".join(judged), encoding="utf-8")
    write_run(run, folder / "bm25.res", "BM25")


class StandIn:
    """Answers requests by the packaged MaxP's score of each document that a prompt shows."""

    def __init__(self) -> None:
        self.model = ld.MaxP.load("longdoc:maxp", dtype="float32")
        self.tokens = Tokens("longdoc:minilm-l6")
        self.score = cache(self._score)

    def __call__(self, request: dict[str, Any]) -> Answer:
        messages = request["messages"]
        asked = messages[-1]["content"]
        query = _QUERY.search(asked)[1]
        if "\n\nDocument: " in asked:
            margin = self.score(query, asked.partition("\n\nDocument: ")[2].rpartition("\n\n")[0])
            likely = {"Yes": -math.log1p(math.exp(-margin)), "No": -math.log1p(math.exp(margin))}
        else:
            shown = [found for each in messages for found in _DOCUMENT.findall(each["content"])]
            scores = {name: self.score(query, text) for name, text in shown}
            total = math.log(sum(map(math.exp, scores.values())))
            likely = {name: score - total for name, score in scores.items()}
        best_first = sorted(likely, key=likely.__getitem__, reverse=True)
        if request.get("logprobs"):
            listed = [{"token": name, "logprob": likely[name], "bytes": None} for name in best_first]
            body = completion(best_first[0])
            body["choices"][0]["logprobs"] = {"content": [{**listed[0], "top_logprobs": listed}]}
        else:
            body = completion(" > ".join(f"[{name}]" for name in best_first))
        written = self.tokens.count(body["choices"][0]["message"]["content"])
        read = self.tokens.count_messages(messages)
        body["usage"] = {"prompt_tokens": read, "completion_tokens": written, "total_tokens": read + written}
        return Answer(body)

    def _score(self, query: str, text: str) -> float:
        return float(self.model(pd.DataFrame([{"qid": "1", "query": query, "docno": "1", "text": text}]))["score"][0])


def ask(url: str) -> None:
    """Runs the notebook's cells with a model that answers."""
    cells = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    code = "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")
    code = code.replace("replay_only=True", "replay_only=False")
    code = code.replace("http://localhost:8000", url)
    with tempfile.TemporaryDirectory() as scratch:
        os.chdir(scratch)
        exec(compile(code, NOTEBOOK.name, "exec"), {"__name__": "__main__", "display": lambda shown: None})
        os.chdir(Path(__file__).parents[2])


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    make_collection(FOLDER)
    replies = FOLDER / "replies.sqlite"
    replies.unlink(missing_ok=True)
    os.environ.pop("LONGDOC_FAST", None)
    with serving(StandIn()) as server:
        ask(server.url)
    with sqlite3.connect(replies) as connection:
        connection.execute("VACUUM")  # the order of requests is not to change the file's contents
    print(f"{len(Store(replies))} replies, {replies.stat().st_size / 1e3:.0f} kB, from {pt.__name__} {pt.__version__}")


if __name__ == "__main__":
    main()
