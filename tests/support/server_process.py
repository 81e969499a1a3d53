"""A real `chairlift serve` in a process of its own, and what can be seen of it from outside."""

from __future__ import annotations

import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx
from openai import OpenAI


@dataclass
class Server:
    """A running `chairlift serve`."""

    process: subprocess.Popen[str]
    port: int
    lines: list[str] = field(default_factory=list)
    """What it wrote so far, standard error included."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def client(self) -> OpenAI:
        return OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=120)

    def metric(self, name: str) -> float:
        """The sum of a metric over its labels."""
        text = httpx.get(f"{self.url}/metrics", timeout=10).text
        values = re.findall(rf"^chairlift:{name}(?:{{[^}}]*}})? (\S+)$", text, re.MULTILINE)
        assert values, f"{name} is not exported"
        return sum(map(float, values))

    def resident_bytes(self) -> int:
        """Memory that the process has in RAM."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(re.findall(r"^VmRSS:\s+(\d+) kB$", status, re.MULTILINE)[0]) * 1024

    def num_descriptors(self) -> int:
        """Open files and sockets."""
        return sum(1 for _ in Path(f"/proc/{self.process.pid}/fd").iterdir())

    def num_threads(self) -> int:
        """Threads of the process."""
        return sum(1 for _ in Path(f"/proc/{self.process.pid}/task").iterdir())

    def cpu_seconds(self) -> float:
        """Processor time so far."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rsplit(")", 1)[1].split()
        return (int(fields[11]) + int(fields[12])) / 100

    def wake_ups(self) -> int:
        """How often its threads have gone to sleep so far, and so been woken."""
        statuses = [path.read_text() for path in Path(f"/proc/{self.process.pid}/task").glob("*/status")]
        return sum(int(re.findall(r"^voluntary_ctxt_switches:\s+(\d+)", status, re.M)[0]) for status in statuses)

    def end(self, timeout_s: float = 20.0) -> int:
        """SIGTERM; the exit status."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(timeout_s)


@contextmanager
def serving(path: Path | str, *flags: str) -> Iterator[Server]:
    """Starts a server on a free port, waits until it is ready, and ends it in the end."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "chairlift", "serve", str(path), "--port", str(port), *flags]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert process.stdout is not None
    server = Server(process, port)
    reader = threading.Thread(target=lambda: server.lines.extend(process.stdout or ()))
    reader.start()
    try:
        end = time.monotonic() + 60
        while not is_ready(server.url):
            assert process.poll() is None, "the server ended:\n" + "".join(server.lines)
            assert time.monotonic() < end, "the server did not become ready:\n" + "".join(server.lines)
            time.sleep(0.05)
        yield server
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            raise
        finally:
            reader.join()
            process.stdout.close()


def is_ready(url: str) -> bool:
    """Whether /health says so."""
    try:
        return httpx.get(f"{url}/health", timeout=2).status_code == 200
    except httpx.TransportError:
        return False
