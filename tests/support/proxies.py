"""nginx and HAProxy as shipped in deploy/, in front of servers that a test controls.

Only what must differ on each machine is replaced in the shipped files: ports, and where the certificate lies.
"""

from __future__ import annotations

import csv
import os
import re
import shutil
import socket
import ssl
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import httpx
import pytest

from chairlift import wait
from support.paths import ROOT
from support.server_process import Server

DEPLOY = ROOT / "deploy"
PATH = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin"])
"""Debian's servers are not on everybody's path."""


def tool(name: str) -> str:
    """The program of that name; skips the test where there is none (scripts/check-long makes sure that there is)."""
    found = shutil.which(name, path=PATH)
    if found is None:
        pytest.skip(f"{name} is not installed; scripts/ci-packages does that")
    return found


def free_port() -> int:
    """A port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Proxy:
    """A running proxy with TLS. `admin` is HAProxy's socket for commands; nginx needs none."""

    def __init__(self, port: int, certificate: Path, admin: Path | None = None) -> None:
        self.url = f"https://127.0.0.1:{port}"
        self._trust = ssl.create_default_context(cafile=str(certificate))
        self._admin = admin

    def put_aside(self, instance: str, num_arrived: Callable[[], float]) -> None:
        """No new requests for an instance that is to be restarted, where the proxy has to be told.

        Returns once all that it was given before has arrived there: what the shipped file does with `sleep 1`.
        """
        if self._admin is not None:
            assert self._command(f"set server chairlift/{instance} state drain") == ""
            while self._num_sessions(instance) > num_arrived():
                pass

    def _num_sessions(self, instance: str) -> int:
        """Requests that were given to an instance and are not over (`scur`)."""
        rows = csv.DictReader(self._command("show stat").removeprefix("# ").splitlines())
        return next(int(row["scur"]) for row in rows if (row["pxname"], row["svname"]) == ("chairlift", instance))

    def see_gone(self, instance: str) -> None:
        """Returns when the proxy has noticed that an instance ended, so that no check is still on its way."""
        self._until_state(instance, "0 8")

    def take_back(self, instance: str) -> None:
        """It may have requests again; returns when it does."""
        if self._admin is not None:
            assert self._command(f"set server chairlift/{instance} state ready") == ""
        self._until_state(instance, "2 0")

    def _until_state(self, instance: str, state: str) -> None:
        """Waits for an operational state (0: down, 2: up) and an administrative one (8: drained, 0: none)."""
        while self._admin is not None and f" {instance} 127.0.0.1 {state} " not in self._command(
            "show servers state chairlift"
        ):
            pass

    def _command(self, line: str) -> str:
        with socket.socket(socket.AF_UNIX) as sock:
            sock.connect(str(self._admin))
            sock.sendall(f"{line}\n".encode())
            return sock.makefile().read().strip()

    def client(self) -> httpx.Client:
        """A client that trusts its certificate, and that never repeats a request."""
        return httpx.Client(base_url=self.url, verify=self._trust, timeout=60, trust_env=False)


def make_certificate(folder: Path) -> tuple[Path, Path]:
    """A self-signed certificate for 127.0.0.1, and its key."""
    certificate, key = folder / "fullchain.pem", folder / "privkey.pem"
    command = [tool("openssl"), "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    command += ["-days", "2", "-subj", "/CN=chairlift test", "-addext", "subjectAltName=IP:127.0.0.1"]
    subprocess.run([*command, "-keyout", str(key), "-out", str(certificate)], check=True, capture_output=True)
    return certificate, key


def replaced(text: str, pattern: str, new: str) -> str:
    """The text with every match replaced; a pattern that no longer matches the shipped file fails the test."""
    text, count = re.subn(pattern, new, text)
    assert count, f"{pattern} is not in the shipped file"
    return text


def nginx_files(folder: Path, port: int, ports: tuple[int, ...]) -> Path:
    """The shipped configuration in a folder of its own, certificate included; gives the main file."""
    certificate, key = make_certificate(folder)
    site = (DEPLOY / "nginx/chairlift.conf").read_text()
    site = replaced(site, r"listen 443 ssl", f"listen 127.0.0.1:{port} ssl")
    site = replaced(site, r"/etc/nginx/tls/fullchain\.pem", str(certificate))
    site = replaced(site, r"/etc/nginx/tls/privkey\.pem", str(key))
    for shipped, own in zip((8000, 8001), ports, strict=True):
        site = replaced(site, rf":{shipped}\b", f":{own}")
    (folder / "snippets").mkdir()
    shutil.copy(DEPLOY / "nginx/chairlift-proxy.conf", folder / "snippets")
    return write_nginx(folder, site)


def write_nginx(folder: Path, site: str) -> Path:
    """A main file around a site, which keeps all that nginx writes in the folder."""
    kinds = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    temporary = "".join(f"  {kind}_temp_path {folder}/{kind};\n" for kind in kinds)
    user = "user root;\n" if os.geteuid() == 0 else ""
    main = folder / "nginx.conf"
    main.write_text(
        f"{user}daemon off;\nworker_processes 2;\npid {folder}/pid;\nerror_log {folder}/error.log info;\n"
        f"events {{}}\nhttp {{\n  access_log {folder}/access.log;\n{temporary}{site}\n}}\n"
    )
    return main


@contextmanager
def nginx(folder: Path, ports: tuple[int, ...]) -> Iterator[Proxy]:
    """nginx with the shipped configuration before two instances."""
    port = free_port()
    main = nginx_files(folder, port, ports)
    with running([tool("nginx"), "-p", str(folder), "-c", str(main), "-e", f"{folder}/error.log"], port):
        yield Proxy(port, folder / "fullchain.pem")


def haproxy_file(folder: Path, port: int, ports: tuple[int, ...]) -> Path:
    """The shipped configuration of HAProxy in a folder of its own, certificate included."""
    certificate, key = make_certificate(folder)
    pem = folder / "chairlift.pem"
    pem.write_bytes(certificate.read_bytes() + key.read_bytes())
    text = (DEPLOY / "haproxy/chairlift.cfg").read_text()
    text = replaced(text, r"bind :443", f"bind 127.0.0.1:{port}")
    text = replaced(text, r"/etc/haproxy/tls/chairlift\.pem", str(pem))
    text = replaced(text, r"stats socket /run/haproxy/admin\.sock", f"stats socket {folder}/admin.sock")
    for shipped, own in zip((8000, 8001), ports, strict=True):
        text = replaced(text, rf":{shipped}\b", f":{own}")
    file = folder / "haproxy.cfg"
    file.write_text(text)
    return file


@contextmanager
def haproxy(folder: Path, ports: tuple[int, ...]) -> Iterator[Proxy]:
    """HAProxy with the shipped configuration before two instances."""
    port = free_port()
    with running([tool("haproxy"), "-db", "-f", str(haproxy_file(folder, port, ports))], port):
        yield Proxy(port, folder / "fullchain.pem", folder / "admin.sock")


Start = Callable[[Path, tuple[int, ...]], AbstractContextManager[Proxy]]

PROXIES: dict[str, Start] = {"nginx": nginx, "haproxy": haproxy}


@contextmanager
def running(command: list[str], port: int) -> Iterator[None]:
    """A process that listens on a port, until the block ends."""
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    assert process.stderr is not None
    try:
        while True:
            assert process.poll() is None, process.stderr.read().decode()
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
        yield
    finally:
        process.terminate()
        process.wait(10)
        process.stderr.close()


# -- what stands behind them ------------------------------------------------------------------------------------------

Behaviour = Callable[[BaseHTTPRequestHandler], None]


@contextmanager
def backends(*behaviours: Behaviour | None) -> Iterator[tuple[int, ...]]:
    """Ports of healthy HTTP servers that answer every POST as told; None is a port where nobody listens."""
    with ExitStack() as stack:
        yield tuple(free_port() if each is None else stack.enter_context(_backend(each)) for each in behaviours)


@contextmanager
def _backend(behaviour: Behaviour) -> Iterator[int]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("content-length", "0")
            self.end_headers()

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["content-length"]))
            self.close_connection = True
            behaviour(self)

        def log_message(self, format: str, *args: object) -> None:
            pass

    class Quiet(ThreadingHTTPServer):
        def handle_error(self, request: object, client_address: object) -> None:
            pass  # a health check that leaves early, or a behaviour that means to

    server = Quiet(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield server.server_port
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


class Instance:
    """A real `chairlift serve` on a port of its own that can be ended and started again."""

    def __init__(self, model: Path) -> None:
        self.port = free_port()
        self._command = [sys.executable, "-m", "chairlift", "serve", str(model), "--port", str(self.port)]
        self.server: Server
        self._reader: threading.Thread

    def start(self) -> None:
        """Starts it, and waits until it is ready."""
        process = subprocess.Popen(self._command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        server = Server(process, self.port)
        output = process.stdout
        assert output is not None
        self._reader = threading.Thread(target=lambda: server.lines.extend(output))
        self._reader.start()
        self.server = server
        outcome = wait.wait(wait.Server.parse(server.url), 60, server.lines.append)
        assert outcome is wait.WaitOutcome.READY, "".join(server.lines)

    def end(self) -> int:
        """SIGTERM; the exit status once it is gone."""
        process = self.server.process
        process.terminate()
        try:
            return process.wait(60)
        finally:
            process.kill()
            self._reader.join()
            if process.stdout is not None:
                process.stdout.close()
