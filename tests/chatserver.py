"""A chat endpoint on this machine that does what its script says, misbehaviour included."""

from __future__ import annotations

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


def completion(text: str, **choice: Any) -> bytes:
    """A proper chat completion; it cost ten tokens to read and one a word to write."""
    message = {"role": "assistant", "content": text}
    found = {
        "id": "x",
        "object": "chat.completion",
        "created": 0,
        "model": "m",
        "choices": [{"index": 0, "finish_reason": "stop", "message": message} | choice],
        "usage": {
            "prompt_tokens": 10,
            "completion_tokens": len(text.split()),
            "total_tokens": 10 + len(text.split()),
        },
    }
    return json.dumps(found).encode()


def failure(status: int, **headers: str) -> Raw:
    """An error as endpoints report it."""
    names = {name.replace("_", "-"): value for name, value in headers.items()}
    return Raw(json.dumps({"error": {"message": f"no {status}"}}).encode(), status, names)


class ChatServer:
    """What the server was asked, and how many requests were under way at the same time."""

    def __init__(self, script: Script, port: int) -> None:
        self.base_url = f"http://127.0.0.1:{port}/v1"
        self.script = script
        self.bodies: list[Body] = []
        self.keys: list[str | None] = []
        self.busiest = 0
        self._busy = 0
        self._lock = threading.Lock()
        self.closing = threading.Event()

    def act(self, body: Body, key: str | None) -> Act:
        """Take one request in and say what to do with it."""
        with self._lock:
            self.bodies.append(body)
            self.keys.append(key)
            self._busy += 1
            self.busiest = max(self.busiest, self._busy)
            number = len(self.bodies) - 1
        try:
            act = self.script(number, body)
            if isinstance(act, Raw):
                self.closing.wait(act.wait_s)
            return act
        finally:
            with self._lock:
                self._busy -= 1


@contextmanager
def chat_server(script: Script) -> Iterator[ChatServer]:
    """Serve on a free port of this machine until the block ends."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            act = state.act(body, self.headers["Authorization"])
            raw = Raw(completion(act)) if isinstance(act, str) else act
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

    class Server(ThreadingHTTPServer):
        daemon_threads = False  # so that closing waits for the last of them

        def handle_error(self, request: Any, client_address: Any) -> None:
            """A client that has left is no error."""

    server = Server(("127.0.0.1", 0), Handler)
    state = ChatServer(script, server.server_address[1])
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield state
    finally:
        state.closing.set()
        server.shutdown()
        server.server_close()
        thread.join()
