"""A chat endpoint on this machine that does what its script says, misbehaviour included."""

import json
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Body = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Raw:
    """A reply, byte by byte; `wait_s` before it, and no reply at all if `hang_up`."""

    body: bytes = b""
    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict)
    wait_s: float = 0.0
    hang_up: bool = False


Act = str | Raw
"""What the server does with one request: a text is said properly."""

Script = Callable[[int, Body], Act]
"""Called with the number of the request, from 0, and its body."""


def in_turn(acts: Sequence[Act]) -> Script:
    """Do one act a request, the last one for ever."""
    return lambda number, _body: acts[min(number, len(acts) - 1)]


def completion(text: str) -> bytes:
    """A proper chat completion; it cost ten tokens to read and one a word to write."""
    message, words = {"role": "assistant", "content": text}, len(text.split())
    usage = {"prompt_tokens": 10, "completion_tokens": words, "total_tokens": 10 + words}
    choice = {"index": 0, "finish_reason": "stop", "message": message}
    head = {"id": "x", "object": "chat.completion", "created": 0, "model": "m"}
    return json.dumps(head | {"choices": [choice], "usage": usage}).encode()


def failure(status: int, **headers: str) -> Raw:
    """An error as endpoints report it."""
    names = {name.replace("_", "-"): value for name, value in headers.items()}
    return Raw(json.dumps({"error": {"message": f"no {status}"}}).encode(), status, names)


class ChatServer(ThreadingHTTPServer):
    """What the server was asked, and how many requests were under way at the same time."""

    daemon_threads = False  # so that closing waits for the last of them

    def __init__(self, script: Script) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.base_url = f"http://127.0.0.1:{self.server_address[1]}/v1"
        self.script = script
        self.bodies: list[Body] = []
        self.keys: list[str | None] = []
        self.busiest = self.busy = 0
        self.lock = threading.Lock()
        self.closing = threading.Event()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that has left is no error."""


class Handler(BaseHTTPRequestHandler):
    server: ChatServer

    def do_POST(self) -> None:
        state = self.server
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with state.lock:
            state.bodies.append(body)
            state.keys.append(self.headers["Authorization"])
            state.busy += 1
            state.busiest = max(state.busiest, state.busy)
            number = len(state.bodies) - 1
        act = state.script(number, body)
        raw = Raw(completion(act)) if isinstance(act, str) else act
        state.closing.wait(raw.wait_s)
        with state.lock:
            state.busy -= 1
        if raw.hang_up or state.closing.is_set():
            return
        self.send_response(raw.status)
        for name, value in {"Content-Type": "application/json", **raw.headers}.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(raw.body)))
        self.end_headers()
        self.wfile.write(raw.body)

    def log_message(self, format: str, *args: Any) -> None:
        pass


@contextmanager
def chat_server(script: Script) -> Iterator[ChatServer]:
    """Serve on a free port of this machine until the block ends."""
    with ChatServer(script) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield server
        finally:
            server.closing.set()
            server.shutdown()
            thread.join()
