"""RankGPT against a server with 200 ms latency: throughput by the number of queries in flight.

Run: python -m tests.benchmarks.bench_listwise
"""

from __future__ import annotations

import time

from pyterrier_longdoc.listwise import OpenAIBackend, RankGPT
from tests.support.llm import Answer, candidates, completion, oracle, serving

LATENCY = 0.2
QUERIES = 32
DOCUMENTS = 30
IN_FLIGHT = (1, 2, 4, 8, 16)


def main() -> None:
    run = candidates(queries=QUERIES, documents=DOCUMENTS)  # two windows per query
    print(f"{QUERIES} queries of {DOCUMENTS} documents, two windows each, {LATENCY * 1000:.0f} ms latency\n")
    print("in flight   seconds   windows/s   speed-up")
    alone = 0.0
    for concurrency in IN_FLIGHT:
        with serving(lambda body: Answer(completion(oracle(body["messages"])), wait=LATENCY)) as server:
            ranker = RankGPT(OpenAIBackend("tiny", base_url=f"{server.url}/v1"), concurrency=concurrency)
            ranker(run.head(DOCUMENTS))  # imports and the first connection
            warm = len(server.requests)
            start = time.perf_counter()
            ranker(run)
            seconds = time.perf_counter() - start
        windows = len(server.requests) - warm
        alone = alone or seconds
        print(f"{concurrency:9d} {seconds:9.2f} {windows / seconds:11.1f} {alone / seconds:9.1f}x")


if __name__ == "__main__":
    main()
