"""What a container may use, read from made-up /proc and /sys trees of cgroup versions 1 and 2."""

from __future__ import annotations

from pathlib import Path

import pytest

from chairlift import machine

MEMINFO = "MemTotal: 16000000 kB\nMemFree: 1000 kB\nMemAvailable: 8000000 kB\n"


class Root:
    """A fake file system."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.write("proc/meminfo", MEMINFO)

    def write(self, name: str, text: str) -> None:
        target = self.path / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text + "\n")

    def v2(self, path: str = "/", mounted: str = "/") -> None:
        self.write("proc/self/cgroup", f"0::{path}")
        self.write(
            "proc/self/mountinfo", f"30 20 0:26 {mounted} /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw,nsdelegate"
        )

    def v1(self, path: str = "/", mounted: str = "/") -> None:
        self.write("proc/self/cgroup", f"5:cpu,cpuacct:{path}\n4:memory:{path}\n1:name=systemd:/x\n0::/")
        mount = "{n} 20 0:3{n} {mounted} /sys/fs/cgroup/{name} rw shared:9 - cgroup cgroup rw,{name}"
        lines = [mount.format(n=n, mounted=mounted, name=name) for n, name in enumerate(("cpu,cpuacct", "memory"))]
        self.write("proc/self/mountinfo", "\n".join(lines))

    def topology(self, siblings: dict[int, str]) -> None:
        for cpu, text in siblings.items():
            self.write(f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list", text)


@pytest.fixture
def root(tmp_path: Path) -> Root:
    return Root(tmp_path)


def threads(root: Root, cpus: int = 8) -> int:
    return machine.detect(root.path, frozenset(range(cpus))).threads


@pytest.mark.parametrize(
    ("text", "want"),
    [("200000 100000", 2), ("50000 100000", 1), ("max 100000", 8), ("765000 100000", 7), ("10 100000", 1),
     ("1600000 100000", 8),
     ("", 8), ("nonsense", 8), ("200000 0", 8)],
)  # fmt: skip
def test_cpu_max(root: Root, text: str, want: int) -> None:
    """All of the host's cores used under a quota: threads wait for their throttled siblings at every barrier."""
    root.v2()
    root.write("sys/fs/cgroup/cpu.max", text)
    assert threads(root) == want


def test_the_tightest_cgroup_above_us_counts(root: Root) -> None:
    """Only our own cgroup read, while a pod's or a slice's limit stands higher up."""
    root.v2("/slice/pod/container")
    root.write("sys/fs/cgroup/slice/cpu.max", "300000 100000")
    root.write("sys/fs/cgroup/slice/pod/cpu.max", "500000 100000")
    root.write("sys/fs/cgroup/slice/pod/container/cpu.max", "max 100000")
    assert threads(root) == 3


def test_a_container_that_sees_its_own_part_only(root: Root) -> None:
    """The host's path looked up below a mount that begins at the container."""
    root.v2("/docker/abc", mounted="/docker/abc")
    root.write("sys/fs/cgroup/cpu.max", "400000 100000")
    assert threads(root) == 4


@pytest.mark.parametrize(("quota", "want"), [("250000", 2), ("-1", 8), ("50000", 1)])
def test_cgroup_v1_quota(root: Root, quota: str, want: int) -> None:
    """cgroup v1 forgotten, or its -1 taken for a limit."""
    root.v1("/docker/abc", mounted="/docker")
    root.write("sys/fs/cgroup/cpu,cpuacct/abc/cpu.cfs_quota_us", quota)
    root.write("sys/fs/cgroup/cpu,cpuacct/abc/cpu.cfs_period_us", "100000")
    assert threads(root) == want


def test_siblings_count_once(root: Root) -> None:
    """Two compute threads on one core's arithmetic units."""
    root.topology({0: "0,4", 1: "1,5", 4: "0,4", 5: "1,5"})
    found = machine.detect(root.path, frozenset({0, 1, 4, 5}))
    assert (found.num_cpus, found.num_cores, found.threads) == (4, 2, 2)
    assert "4 processors" in found.threads_reason


def test_threads_never_exceed_the_affinity(root: Root) -> None:
    """A quota larger than the affinity taken at its word."""
    root.v2()
    root.write("sys/fs/cgroup/cpu.max", "800000 100000")
    assert threads(root, cpus=2) == 2


def test_memory_without_a_cgroup(root: Root) -> None:
    """MemFree taken for what is available: file cache looks like use."""
    found = machine.detect(root.path, frozenset({0}))
    assert found.memory_total_bytes == 16_000_000 * 1024
    assert found.memory_available_bytes == 8_000_000 * 1024
    assert found.memory_limited_by == "the machine"


def test_memory_of_cgroup_v2(root: Root) -> None:
    """The host's memory planned with, inside a container that may have 1 GB of it."""
    root.v2("/pod/c")
    root.write("sys/fs/cgroup/pod/memory.max", "1000000000")
    root.write("sys/fs/cgroup/pod/memory.current", "700000000")
    root.write("sys/fs/cgroup/pod/memory.stat", "anon 100\ninactive_file 300000000\nactive_file 200000000\nslab 5")
    root.write("sys/fs/cgroup/pod/c/memory.max", "max")
    root.write("sys/fs/cgroup/pod/c/memory.current", "600000000")
    found = machine.detect(root.path, frozenset({0}))
    assert found.memory_available_bytes == 1_000_000_000 - (700_000_000 - 500_000_000)
    assert found.memory_limited_by == "the cgroup"


def test_memory_high_throttles_before_max(root: Root) -> None:
    """A pool planned up to memory.max, all of it beyond memory.high being reclaimed again and again."""
    root.v2()
    root.write("sys/fs/cgroup/memory.max", "2000000000")
    root.write("sys/fs/cgroup/memory.high", "1000000000")
    root.write("sys/fs/cgroup/memory.current", "400000000")
    assert machine.cgroup_memory(root.path) == 600_000_000


def test_memory_of_cgroup_v1(root: Root) -> None:
    """v1's no-limit number taken for a limit, or its file cache counted as use."""
    root.v1("/box")
    base = "sys/fs/cgroup/memory"
    root.write(f"{base}/memory.limit_in_bytes", "9223372036854771712")
    root.write(f"{base}/memory.usage_in_bytes", "5")
    root.write(f"{base}/box/memory.limit_in_bytes", "1000")
    root.write(f"{base}/box/memory.usage_in_bytes", "900")
    root.write(f"{base}/box/memory.stat", "inactive_file 1\ntotal_inactive_file 500\ntotal_active_file 100")
    assert machine.cgroup_memory(root.path) == 1000 - (900 - 600)


def test_use_beyond_the_limit_leaves_nothing(root: Root) -> None:
    """A negative amount of memory in the plan."""
    root.v2()
    root.write("sys/fs/cgroup/memory.max", "100")
    root.write("sys/fs/cgroup/memory.current", "200")
    assert machine.cgroup_memory(root.path) == 0


def test_nothing_to_read_is_no_error(tmp_path: Path) -> None:
    """A start that fails where /proc and /sys are hidden."""
    found = machine.detect(tmp_path, frozenset({0, 1, 2}))
    assert found.threads == 3
    assert found.memory_available_bytes > 0


def test_the_real_machine() -> None:
    """Readers that only work on made-up trees."""
    found = machine.detect()
    assert 1 <= found.threads <= found.num_cpus
    assert 0 < found.memory_available_bytes <= found.memory_total_bytes


@pytest.mark.parametrize("num_bytes", [8, 9, 4096, 2**22])
def test_bandwidth_of_a_file(tmp_path: Path, num_bytes: int) -> None:
    """A bandwidth in the wrong unit; a file shorter than its threads."""
    file = tmp_path / "weights"
    file.write_bytes(bytes(num_bytes))
    assert 1e3 < machine.measure_bandwidth(file, 2) < 1e13
