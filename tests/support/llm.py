# ruff: noqa: RUF001
"""Stand-ins for language models: an oracle, scripted replies, and a scripted HTTP server on loopback."""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Callable
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace
from typing import Any

import pandas as pd
from hypothesis import strategies as st

SECRET = "sk-very-secret-0123456789"

SECRET_PARAMETERS = (
    *({name: SECRET} for name in ("api_key", "apiKey", "X-API-Key", "key", "token", "access_token", "Authorization")),
    *({name: SECRET} for name in ("client_secret", "password", "credentials", "Cookie", "hf_token", "extra_query")),
    {"headers": [("x-gateway", SECRET)]},
    {"extra_headers": {"x-gateway": SECRET}},
    {"extra_body": {"provider": {"api-key": SECRET}}},
    {"tools": [{"type": "mcp", "authorization": SECRET}]},
)
"""Parameters of a request that hold a secret."""

GRADE = re.compile(r"worth (\d+)")

HARD = st.sampled_from(
    [*"[]>,;0123456789 \n.-*`\"'<>", "[1]", "[2] > ", "[3, 4]", "<think>", "</think>", "１", "【", "٣"]
)
"""Pieces of replies and of texts that look like rankings."""


def shown(messages: list[dict[str, str]]) -> list[tuple[int, str]]:
    """The numbered documents of a conversation in the default prompt's form."""
    contents = [message["content"] for message in messages if message["role"] == "user"]
    return [(int(m[1]), m[2]) for content in contents for m in re.finditer(r"^\[(\d+)\] (.*)$", content, re.MULTILINE)]


def oracle(messages: list[dict[str, str]]) -> str:
    """Orders documents by the number in their text, "worth N"."""
    worth = {number: int(GRADE.search(text)[1]) for number, text in shown(messages)}
    return " > ".join(f"[{number}]" for number in sorted(worth, key=worth.__getitem__, reverse=True))


class Scripted:
    """Gives one reply after the other, the last one for ever, and keeps what it was asked."""

    def __init__(self, *replies: str | BaseException | Callable[[list], str]) -> None:
        self.replies = list(replies)
        self.asked: list[list[dict[str, str]]] = []

    def __call__(self, messages: list[dict[str, str]]) -> str:
        self.asked.append(messages)
        reply = self.replies.pop(0) if len(self.replies) > 1 else self.replies[0]
        if isinstance(reply, BaseException):
            raise reply
        return reply(messages) if callable(reply) else reply


def candidates(queries: int = 1, documents: int = 100, *, shuffle: int = 7) -> pd.DataFrame:
    """Documents whose text says what they are worth, in an order that has nothing to do with it."""
    rows = [
        {
            "qid": f"q{q}",
            "query": f"query number {q}",
            "docno": f"d{d}",
            "text": f"document {d} of query {q} is worth {(d * shuffle + 3 * q) % documents}.",
            "score": float(documents - d),
            "rank": d,
        }
        for q in range(queries)
        for d in range(documents)
    ]
    return pd.DataFrame(rows)


def order(frame: pd.DataFrame) -> list[str]:
    return frame.sort_values("rank", kind="stable")["docno"].tolist()


def worth(frame: pd.DataFrame) -> pd.Series:
    return frame["text"].str.extract(GRADE)[0].astype(int)


class Answer:
    """One HTTP response.

    Args:
        body: JSON-able, or the raw bytes.
        status: HTTP status.
        headers: further headers.
        wait: seconds before it is sent.
        cut: announce more bytes than are sent.
    """

    def __init__(self, body: Any, status: int = 200, *, headers: dict | None = None, wait: float = 0, cut: int = 0):
        self.body = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.status, self.headers, self.wait, self.cut = status, headers or {}, wait, cut


def completion(text: str | None, **message: Any) -> dict[str, Any]:
    """OpenAI's form of a reply."""
    return {
        "id": "1",
        "object": "chat.completion",
        "created": 1,
        "model": "tiny",
        "choices": [
            {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": text, **message}}
        ],
        "usage": {"prompt_tokens": 100, "completion_tokens": 10, "total_tokens": 110},
    }


@contextmanager
def serving(*answers: Answer | Callable[[dict], Answer], about: Callable[[str], Answer] | None = None):
    """A server that answers requests as `Scripted` does.

    It has its `url` and `(path, headers, body)` of each request.

    Args:
        answers: to what is sent to it.
        about: what it tells at a path when it is only looked at; None for nothing.
    """
    scripted, requests = Scripted(*answers), []

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            requests.append((self.path, dict(self.headers), body))
            answer = scripted(body)
            time.sleep(answer.wait)
            with suppress(BrokenPipeError, ConnectionResetError):  # a client that timed out
                self.send(answer)

        def do_GET(self) -> None:
            self.send(Answer({"detail": "Not Found"}, 404) if about is None else about(self.path))

        def send(self, answer: Answer) -> None:
            self.send_response(answer.status)
            for name, value in {"Content-Type": "application/json", **answer.headers}.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(answer.body) + answer.cut))
            self.end_headers()
            self.wfile.write(answer.body)
            if answer.cut:
                self.close_connection = True

        def log_message(self, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
    try:
        url = f"http://127.0.0.1:{server.server_port}"
        yield SimpleNamespace(url=url, requests=requests)
    finally:
        server.shutdown()
        server.server_close()
