"""HTTP servers on this machine that stand for judges and reward servers. A test chooses their replies, also wrong
ones."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import ThreadingHTTPServer

from rljob_testing.local_servers import QuietHandler, running_http_server


@dataclass(frozen=True)
class Received:
    """One POST request."""

    path: str
    body: Mapping[str, object]
    key: str | None
    """The header Authorization."""
    at: float
    """Monotonic time."""

    @property
    def text(self) -> str:
        """The message of a chat completion's request."""
        match self.body:
            case {"messages": [{"content": str() as content}]}:
                return content
        raise AssertionError(f"not a chat: {self.body}")


@dataclass(frozen=True)
class Answer:
    """What the server does with a request."""

    body: str
    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict)
    num_bytes_sent: int | None = None
    """The server closes the connection after this many bytes of the body; None: it sends everything."""


@dataclass
class RewardService:
    """A running server."""

    url: str
    answer: Callable[[Received], Answer]
    """Returns the answer to a request; a test may replace this function."""
    received: list[Received] = field(default_factory=list)
    most_at_once: int = 0
    """The largest number of requests that were answered at the same time."""
    num_open: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def answers(self, *given: Answer) -> None:
        """Each request gets the next answer; the last one is repeated. Forgets the earlier requests."""
        left = list(given)
        self.received.clear()
        self.answer = lambda _: left.pop(0) if len(left) > 1 else left[0]

    def most_in(self, seconds: float) -> int:
        """The largest number of requests in any period of this length."""
        times = [each.at for each in self.received]
        return max(sum(begin <= at < begin + seconds for at in times) for begin in times)


@contextmanager
def reward_service(answer: Callable[[Received], Answer], port: int = 0) -> Iterator[RewardService]:
    """Runs a server that answers POST requests, and GET requests with status 405."""
    service = RewardService("", answer)

    class Handler(QuietHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            received = Received(self.path, body, self.headers["Authorization"], time.monotonic())
            with service.lock:
                service.received.append(received)
                service.num_open += 1
                service.most_at_once = max(service.most_at_once, service.num_open)
            try:
                self.send(service.answer(received))
            finally:
                with service.lock:
                    service.num_open -= 1

        def do_GET(self) -> None:
            self.send(Answer("", 405))

        def send(self, found: Answer) -> None:
            data = found.body.encode()
            if found.num_bytes_sent == 0:
                self.close_connection = True
                return
            self.send_response(found.status)
            for name, value in {"Content-Length": str(len(data)), **found.headers}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(data[: found.num_bytes_sent])
            self.close_connection = found.num_bytes_sent is not None

    server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
    with running_http_server(server):
        service.url = f"http://127.0.0.1:{server.server_address[1]}"
        yield service


def completion(text: str | None, *, finish_reason: str = "stop", num_tokens: tuple[int, int] = (100, 10)) -> Answer:
    """A chat completion with these numbers of prompt tokens and completion tokens."""
    prompt, completed = num_tokens
    return Answer(
        json.dumps(
            {
                "choices": [{"message": {"role": "assistant", "content": text}, "finish_reason": finish_reason}],
                "usage": {"prompt_tokens": prompt, "completion_tokens": completed, "total_tokens": prompt + completed},
            }
        )
    )
