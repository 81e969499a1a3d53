"""The limits of the box, from a made-up /proc and /sys to the line that a user reads before anything is loaded."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from chairlift import boot, machine
from chairlift.config import Config
from chairlift.errors import ChairliftError, ConfigError, DoesNotFit
from chairlift.kernels.cpu import CPUBackend
from conftest import TinyGGUF

MIB = 1024**2
Box = Callable[[int], None]


class NotLoaded(Exception):
    """Raised where weights would be read."""


class NoBackend(CPUBackend):
    """Kernels that must not be asked to load anything."""

    def load(self, *_: Any, **__: Any) -> Any:
        raise NotLoaded


@pytest.fixture
def box(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Box:
    """Makes this a container of so many bytes on a host with 64 GiB, and refuses to load weights."""

    def limit(num_bytes: int) -> None:
        files = {
            "proc/meminfo": f"MemTotal: {64 * 2**20} kB\nMemAvailable: {60 * 2**20} kB\n",
            "proc/self/cgroup": "0::/\n",
            "proc/self/mountinfo": "30 20 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n",
            "sys/fs/cgroup/memory.max": f"{num_bytes}\n",
            "sys/fs/cgroup/memory.current": "0\n",
            "sys/fs/cgroup/cpu.max": "150000 100000\n",
        }
        for name, text in files.items():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(text)

    found = machine.detect
    monkeypatch.setattr(machine, "detect", lambda: found(tmp_path, frozenset(range(8))))
    monkeypatch.setattr(boot, "make_backend", lambda name, settings, box: NoBackend("none", threads=box.threads))
    return limit


def refusal(path: Path, **settings: Any) -> ChairliftError:
    """The error that a start ends with, before weights are read."""
    with pytest.raises(ChairliftError) as caught:
        boot.load(Config(model=str(path), **settings))
    return caught.value


def starts(path: Path, **settings: Any) -> bool:
    """Whether a start gets as far as reading weights."""
    try:
        boot.load(Config(model=str(path), **settings))
    except NotLoaded:
        return True
    except DoesNotFit:
        return False
    raise AssertionError("it loaded nothing and raised nothing")


def test_weights_beyond_the_cgroup(box: Box, tiny_gguf: TinyGGUF) -> None:
    """Fault: the host's memory believed, and a process killed half way through loading."""
    box(100 * MIB)
    error = refusal(tiny_gguf())
    assert isinstance(error, DoesNotFit)
    for words in ("needed", "weights", "100 MiB available", "limited by the cgroup", "at most", "of weights"):
        assert words in str(error), words
    box(400 * MIB)
    assert starts(tiny_gguf())


def test_a_pool_beyond_the_cgroup_says_what_would_fit(box: Box, tiny_gguf: TinyGGUF) -> None:
    """Fault: an offer that is itself refused."""
    box(400 * MIB)
    path = tiny_gguf(context=4096)
    error = refusal(path, kv_memory=2**40)
    offered = int(re.findall(r"at most --kv-memory (\d+)MiB fits", str(error))[0])
    assert 0 < offered < 400
    assert starts(path, kv_memory=offered * MIB)
    assert not starts(path, kv_memory=(offered + 1) * MIB)


def test_too_little_for_any_context_says_which_share_would_do(box: Box, tiny_gguf: TinyGGUF) -> None:
    """Fault: "raise it", and the user has to guess how far."""
    path = tiny_gguf(layers=2, heads=8, kv_heads=8, head_dim=64, context=4096)
    needed = 256 * 2 * 2 * 8 * 64 * 2  # KV of the least context worth starting for
    least = next(mib for mib in range(100, 400) if starts_in(box, path, mib * MIB, memory_utilization=0.95))
    box(least * MIB)
    error = refusal(path, memory_utilization=0.1)
    offered = float(re.findall(r"--memory-utilization 0\.1; (\S+) is enough", str(error))[0])
    assert f"KV for 256 tokens {needed / MIB:.2f} MiB" in str(error)
    assert starts(path, memory_utilization=offered)
    assert not starts(path, memory_utilization=offered - 0.01)


def starts_in(box: Box, path: Path, num_bytes: int, **settings: Any) -> bool:
    box(num_bytes)
    return starts(path, **settings)


def test_a_context_beyond_the_model(box: Box, tiny_gguf: TinyGGUF) -> None:
    """Fault: a length that the model was never trained for is taken, or fails somewhere in the kernels."""
    box(400 * MIB)
    error = refusal(tiny_gguf(context=512), max_model_len=2**24)
    assert isinstance(error, ConfigError)
    assert "--max-model-len 16777216" in str(error)
    assert "at most 512" in str(error)


@pytest.mark.parametrize(("cpus", "quota", "want"), [(8, 150_000, 1), (8, 450_000, 4), (2, 450_000, 2), (8, -1, 8)])
def test_threads_are_those_of_affinity_and_quota(tmp_path: Path, cpus: int, quota: int, want: int) -> None:
    """Fault (CASES A21): a thread for every processor of the host, of which the container may use a few."""
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "sys/fs/cgroup/cpu").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text("3:cpu:/\n")
    (tmp_path / "proc/self/mountinfo").write_text("30 20 0:26 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu\n")
    (tmp_path / "sys/fs/cgroup/cpu/cpu.cfs_quota_us").write_text(f"{quota}\n")
    (tmp_path / "sys/fs/cgroup/cpu/cpu.cfs_period_us").write_text("100000\n")
    assert machine.detect(tmp_path, frozenset(range(cpus))).threads == want


def test_physical_cores_before_siblings(tmp_path: Path) -> None:
    """Fault: two threads on one core's units; or siblings counted where an affinity holds nothing else."""
    for cpu in range(8):
        folder = tmp_path / f"sys/devices/system/cpu/cpu{cpu}/topology"
        folder.mkdir(parents=True)
        (folder / "thread_siblings_list").write_text(f"{cpu % 4},{cpu % 4 + 4}\n")
    for cpus, want in ((range(8), 4), ((0, 4), 1), ((0, 1, 4), 2), ((4, 5, 6), 3)):
        assert machine.detect(tmp_path, frozenset(cpus)).threads == want


def test_the_command_line_says_it_in_two_lines(tiny_gguf: TinyGGUF) -> None:
    """Fault: a traceback, or seconds of loading before it."""
    command = [sys.executable, "-m", "chairlift", "serve", str(tiny_gguf()), "--port", "0", "--kv-memory", "1024TiB"]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert answer.returncode == 1
    said, hint = answer.stderr.strip().splitlines()
    assert said.startswith("error: ")
    assert "does not fit" in said
    assert "at most --kv-memory" in hint
