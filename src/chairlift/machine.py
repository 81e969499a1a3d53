"""What this machine grants the process: processors, the cgroup's quota and memory, and how fast memory reads.

A container sees the host's processors and memory; its cgroup (version 1 or 2) says what it may use of them. Each reader
takes the root of the file system, so that a test can fake /proc and /sys. A missing file means "no limit", no error.
"""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

_UNLIMITED = 2**60
"""cgroup v1 writes "no limit" as a number near 2**63; no machine has an exabyte."""


@dataclass(frozen=True, slots=True)
class Machine:
    """The resources that this process may use; the host may have more."""

    num_cpus: int  # logical processors in our affinity
    num_cores: int  # physical cores among them
    quota: float | None  # processors' worth of time that the cgroup grants; None: no limit
    memory_total_bytes: int
    memory_available_bytes: int
    memory_limited_by: str  # "the cgroup" or "the machine"

    @property
    def threads(self) -> int:
        """Compute threads: floor(min(cores, quota)), at least 1.

        The siblings of a busy core add no arithmetic units; they are left to HTTP. A quota rounded up would come back
        as throttling. Threads are counted by core, not pinned to one: Linux fills idle cores before siblings by itself,
        and a pinned thread could not get out of a neighbour's way.
        """
        limit = self.num_cores if self.quota is None else min(self.num_cores, self.quota)
        return max(1, math.floor(limit))

    @property
    def threads_reason(self) -> str:
        """Why `threads` is what it is, for the start card."""
        cores = f"{self.num_cores} core{'s' if self.num_cores > 1 else ''} in our affinity"
        if self.num_cpus > self.num_cores:
            cores += f" ({self.num_cpus} processors)"
        if self.quota is None:
            return f"{cores}, no cgroup quota"
        return f"{cores}, cgroup quota of {self.quota:g}"


def detect(root: Path = Path("/"), affinity: frozenset[int] | None = None) -> Machine:
    """The machine as this process sees it. Tests give `affinity` in place of the process's own."""
    cpus = affinity if affinity is not None else _affinity()
    total, free = _memory(root)
    in_cgroup = cgroup_memory(root)
    available = free if in_cgroup is None else min(free, in_cgroup)
    return Machine(
        num_cpus=len(cpus),
        num_cores=physical_cores(cpus, root),
        quota=cpu_quota(root),
        memory_total_bytes=total,
        memory_available_bytes=available,
        memory_limited_by="the cgroup" if available < free else "the machine",
    )


def _affinity() -> frozenset[int]:
    if hasattr(os, "sched_getaffinity"):
        return frozenset(os.sched_getaffinity(0))
    return frozenset(range(os.cpu_count() or 1))


def physical_cores(cpus: frozenset[int], root: Path = Path("/")) -> int:
    """Number of cores that these logical processors lie on: siblings on one core count once."""
    folder = root / "sys/devices/system/cpu"
    return len({_read(folder / f"cpu{cpu}/topology/thread_siblings_list") or str(cpu) for cpu in cpus})


def cpu_quota(root: Path = Path("/")) -> float | None:
    """Processors' worth of time that the tightest cgroup above us grants; None without a limit."""
    quotas: list[float] = []
    for folder in _cgroups(root, "cpu"):
        if text := _read(folder / "cpu.max"):  # v2: "200000 100000" or "max 100000"
            quota, _, period = text.partition(" ")
        else:
            quota, period = _read(folder / "cpu.cfs_quota_us") or "-1", _read(folder / "cpu.cfs_period_us") or ""
        microseconds, per = _number(quota), _number(period)
        if microseconds is not None and microseconds > 0 and per:
            quotas.append(microseconds / per)
    return min(quotas, default=None)


def cgroup_memory(root: Path = Path("/")) -> int | None:
    """Bytes that the tightest cgroup above us still grants; None without a limit.

    File pages that can be dropped do not count as used: a model file that was just read must not reduce its KV pool.
    """
    rooms: list[int] = []
    for folder in _cgroups(root, "memory"):
        limits = [
            number
            for name in ("memory.max", "memory.high", "memory.limit_in_bytes")
            if (number := _number(_read(folder / name))) is not None and number < _UNLIMITED
        ]
        used = _number(_read(folder / "memory.current") or _read(folder / "memory.usage_in_bytes"))
        if limits and used is not None:
            rooms.append(max(0, min(limits) - max(0, used - _droppable(folder))))
    return min(rooms, default=None)


def _droppable(folder: Path) -> int:
    """Bytes of file cache in a cgroup and in those below it (v1's names for that begin with total_)."""
    stat = dict(line.split() for line in (_read(folder / "memory.stat") or "").splitlines() if len(line.split()) == 2)
    prefix = "total_" if "total_inactive_file" in stat else ""
    return sum(_number(stat.get(f"{prefix}{kind}_file")) or 0 for kind in ("inactive", "active"))


def _cgroups(root: Path, controller: str) -> Iterator[Path]:
    """Folders of our cgroup and every one above it, for v1's controller and for v2, as far as they are mounted."""
    ours: dict[str, str] = {}  # controller (v2: "") -> path within the hierarchy
    for line in (_read(root / "proc/self/cgroup") or "").splitlines():
        _, _, rest = line.partition(":")
        names, _, path = rest.partition(":")
        ours |= dict.fromkeys(names.split(","), path)
    for line in (_read(root / "proc/self/mountinfo") or "").splitlines():
        before, _, after = line.partition(" - ")
        fields, kind = before.split(), after.split()
        if len(fields) < 5 or len(kind) < 3 or kind[0] not in ("cgroup", "cgroup2"):
            continue
        name = "" if kind[0] == "cgroup2" else controller
        if name in ours and (not name or controller in kind[2].split(",")):
            yield from _upwards(root / fields[4].lstrip("/"), _below(ours[name], fields[3]))


def _below(path: str, mounted: str) -> str:
    """A cgroup's path below the folder that is mounted: containers often see only their own part of the tree."""
    if path == mounted or path.startswith(mounted.rstrip("/") + "/"):
        return path[len(mounted.rstrip("/")) :].strip("/")
    return ""


def _upwards(mount: Path, below: str) -> Iterator[Path]:
    parts = [part for part in below.split("/") if part and part != ".."]
    for depth in range(len(parts), -1, -1):
        yield mount.joinpath(*parts[:depth])


def _memory(root: Path) -> tuple[int, int]:
    """Bytes in all, and bytes that are available without swapping."""
    rows = dict(line.split(":", 1) for line in (_read(root / "proc/meminfo") or "").splitlines() if ":" in line)
    kib = {name: _number(value.split()[0]) for name, value in rows.items() if value.split()}
    total, available = kib.get("MemTotal"), kib.get("MemAvailable")
    if total is None or available is None:
        everything = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        return everything, everything
    return total * 1024, available * 1024


def _read(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return None


def _number(text: str | None) -> int | None:
    try:
        return int(text or "")
    except ValueError:
        return None  # "max"


def measure_bandwidth(file: Path, threads: int, *, max_bytes: int = 256 * 1024**2) -> float:
    """Bytes/s that `threads` threads read together, over a model's own bytes: the best pass of 40 ms, or of three.

    These are about the bytes that each token reads, so a cache that helps here helps there too. It takes tens of
    milliseconds and no memory. It is a figure for the start card, no benchmark: a busy neighbour lowers it.
    """
    import numpy as np

    mapped = np.memmap(file, np.uint8, mode="r")
    return read_speed(mapped[: min(len(mapped), max_bytes) // 8 * 8].view(np.int64), threads)


def read_speed(words: npt.NDArray[np.int64], threads: int, *, seconds: float = 0.04) -> float:
    """Bytes/s that `threads` threads read together over this memory: the best pass within `seconds`, or of three."""
    import numpy as np

    parts = [part for part in np.array_split(words, threads) if len(part)]
    best, passes, begin = math.inf, 0, time.perf_counter()
    while passes < 3 or time.perf_counter() - begin < seconds:
        passes += 1
        readers = [threading.Thread(target=part.max) for part in parts]
        start = time.perf_counter()
        for reader in readers:
            reader.start()
        for reader in readers:
            reader.join()
        best = min(best, time.perf_counter() - start)
    return words.nbytes / best
