"""A server for a benchmark: `pasta serve` in a process of its own, on a free port."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from threading import Thread


@dataclass(frozen=True, slots=True)
class Served:
    """Where a server is, and what it calls its model; and its process, if it was started here."""

    base_url: str
    model: str
    pid: int | None = None

    @property
    def cpu_s(self) -> float | None:
        """Processor seconds that it has had; None where nobody can say."""
        try:
            stat = Path(f"/proc/{self.pid}/stat").read_text(encoding="utf-8")
        except OSError:
            return None
        user, system = stat.rpartition(")")[2].split()[11:13]
        return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


@contextmanager
def served(options: Sequence[str]) -> Iterator[Served]:
    """Run `pasta serve` with these options until the block ends.

    Ends the benchmark with the server's own words if it does not start.
    """
    command = [sys.executable, "-m", "pasta_decoding", "serve", "--port", "0", *options]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as server:
        found = _found(server)
        assert server.stderr is not None, "it was asked for"
        # What it says is passed on: a full pipe would stop it.
        reader = Thread(target=sys.stderr.writelines, args=(server.stderr,))
        reader.start()
        try:
            yield found
        finally:
            server.terminate()
            reader.join()


def _found(server: subprocess.Popen[str]) -> Served:
    """Read what the server says until it says where it is; it says nothing more if all is well."""
    assert server.stderr is not None, "it was asked for"
    said: list[str] = []
    for line in server.stderr:
        if place := re.search(r"(\S+) at (http://\S+)$", line.rstrip()):
            return Served(f"{place[2]}/v1", place[1], server.pid)
        said.append(line)
    raise SystemExit("pasta serve did not start: " + "".join(said).strip())
