"""The shape of the code: who may import whom, how long things may get, and what is promised to users."""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

import chairlift
from support.paths import ROOT

PACKAGE = ROOT / "src" / "chairlift"
MODULES = sorted(path for path in PACKAGE.rglob("*.py"))
NATIVE = sorted(
    path for path in [*PACKAGE.glob("native/*"), *ROOT.glob("tests/native/*")] if path.suffix in (".h", ".cpp")
)
TESTS = sorted(ROOT.glob("tests/**/*.py"))
EXPERIMENTS = sorted(ROOT.glob("experiments/**/*.py"))

MAX_FILE_LINES = 500
MAX_FUNCTION_LINES = 60

ARRAYS_BEGIN = {"engine.batch", "engine.runner", "engine.engine", "engine.preemptions", "engine.watchdog"}
"""The engine above these is pure: no arrays, no clock, no logger."""

BENCH_ROOMS = {
    "client": set(),
    "report": set(),
    "load": {"client", "report"},
    "streaming": {"client", "report", "load"},
    "local": {"client", "report"},
}
"""The rooms of the bench, and those that each may import."""
PURE_BENCH = {
    "client": {"dialect", "sample", "target", "wire"},
    "report": {"stats"},
    "load": {"arrivals", "doubts", "goodput", "summary", "workload"},
    "streaming": {"buffering"},
}


def name_of(path: Path) -> str:
    """`src/chairlift/engine/batch.py` is "engine.batch", a package is its own name."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(part for part in parts if part != "__init__")


def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


def imports(path: Path) -> set[str]:
    """Modules that a file imports anywhere, those of ours without the package's name."""
    found: set[str] = set()
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found |= {f"{node.module}.{alias.name}" for alias in node.names} | {node.module or ""}
    return {name.removeprefix("chairlift.") for name in found}


def offences(subjects: Iterator[Path], banned: str) -> list[str]:
    """Imports that match a pattern, as "file: module"."""
    return [
        f"{path.relative_to(ROOT)}: {name}"
        for path in subjects
        for name in sorted(imports(path))
        if re.fullmatch(rf"({banned})(\..*)?", name)
    ]


def within(*packages: str) -> Iterator[Path]:
    return (path for path in MODULES if name_of(path).split(".")[0] in packages)


def test_the_deciding_part_of_the_engine_is_pure() -> None:
    """A scheduler that reads the clock or touches arrays cannot be simulated, nor its laws tested exactly."""
    pure = (path for path in within("engine") if name_of(path) not in ARRAYS_BEGIN)
    assert offences(pure, "numpy|time|datetime|logging|random|os|threading|asyncio|server|kernels") == []


def test_cost_and_plan_know_neither_arrays_nor_the_server() -> None:
    """Arithmetic that needs a model loaded, or that differs between the planner and the server."""
    assert offences(within("cost", "plan"), "numpy|server|time|os") == []


def test_models_and_kernels_know_no_engine() -> None:
    """A model file that depends on who schedules it."""
    assert offences(within("models", "kernels"), "engine|server|boot|config|cli") == []


def test_the_engine_knows_no_server() -> None:
    """JSON or asyncio in the engine."""
    assert offences(within("engine"), "server|asyncio|json|fastapi|pydantic|cli|boot") == []


def test_the_server_sees_the_engine_through_its_front_door() -> None:
    """Handlers that reach into the scheduler's state from another thread."""
    seen = {name for path in within("server") for name in imports(path) if name.startswith("engine.")}
    doors = {"engine.door", "engine.engine", "engine.request", "engine.observer"}
    assert {".".join(name.split(".")[:2]) for name in seen} <= doors


def test_the_bench_and_the_server_do_not_know_each_other() -> None:
    """A measuring tool that measures from the inside, or a server that loads its measuring tool."""
    banned = "server|engine|kernels|models|boot|httptools|uvicorn|starlette"
    assert offences(within("bench"), banned) == []
    assert offences(iter(EXPERIMENTS), banned) == []
    others = (path for path in MODULES if name_of(path).split(".")[0] not in ("bench", "microbench", "cli"))
    assert offences(others, "bench|microbench|experiments|aiohttp|httpx|matplotlib") == []


def test_the_rooms_of_the_bench_import_in_one_direction() -> None:
    """Rooms that import in a circle are one room with walls in it."""
    assert {path.parent.name for path in within("bench")} == {"bench", *BENCH_ROOMS}
    for room, seen in BENCH_ROOMS.items():
        inside = (path for path in within("bench") if name_of(path).startswith(f"bench.{room}"))
        others = sorted({*BENCH_ROOMS, "cli"} - {room} - seen)
        assert offences(inside, f"bench\\.({'|'.join(others)})|microbench") == []
    assert offences((path for path in MODULES if name_of(path) == "bench.options"), "bench|microbench") == []


def test_the_micro_benchmarks_know_no_server() -> None:
    """Figures of kernels with a scheduler's or a connection's time in them."""
    assert offences(within("microbench"), "server|engine|boot|aiohttp|bench\\.(client|load|local|streaming|cli)") == []
    callers = (path for path in MODULES if name_of(path).split(".")[0] != "microbench" and name_of(path) != "bench.cli")
    assert offences(callers, "microbench") == []


def test_the_figures_of_the_bench_are_pure() -> None:
    """Statistics that read a clock or a socket have no exact tests, and a workload that does cannot be repeated."""
    names = {f"bench.{room}.{module}" for room, modules in PURE_BENCH.items() for module in modules}
    pure = [path for path in within("bench") if name_of(path) in names]
    assert len(pure) == len(names)
    banned = "asyncio|time|os|socket|aiohttp|secrets"
    assert offences(iter(pure), banned) == []
    assert offences((path for path in pure if path.stem != "dialect"), "datetime") == []


def test_nothing_imports_the_command_line() -> None:
    """A library that cannot be used without its terminal front."""
    assert offences((path for path in MODULES if name_of(path) != "__main__"), "cli|__main__") == []


@pytest.mark.parametrize("path", MODULES + NATIVE + TESTS + EXPERIMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_files_stay_short(path: Path) -> None:
    """A file that nobody reads to its end."""
    assert len(path.read_text(encoding="utf-8").splitlines()) <= MAX_FILE_LINES


def test_functions_stay_short() -> None:
    """A schedule() of a thousand lines begins with one of sixty-one."""
    long = [
        f"{path.relative_to(ROOT)}: {node.name} has {(node.end_lineno or 0) - node.lineno + 1} lines"
        for path in MODULES + TESTS + EXPERIMENTS
        for node in ast.walk(tree(path))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and (node.end_lineno or 0) - node.lineno + 1 > MAX_FUNCTION_LINES
    ]
    assert long == []


def test_no_globals_and_one_reader_of_the_environment() -> None:
    """State that two servers in one process would share; settings that --help does not know."""
    wrong = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in MODULES + EXPERIMENTS
        for node in ast.walk(tree(path))
        if isinstance(node, ast.Global)
        or (
            isinstance(node, ast.Attribute)
            and node.attr in ("environ", "environb", "getenv")
            and path.name != "config.py"
        )
    ]
    assert wrong == []


def test_notes_to_self_have_an_issue() -> None:
    """A TODO that is never done because nobody owns it."""
    pattern = re.compile(r"\b(TODO|FIXME|XXX|HACK)\b(?!.*#\d+)")
    files = [path for path in MODULES + NATIVE + TESTS + EXPERIMENTS if path != Path(__file__)]
    wrong = [
        str(path) for path in files for line in path.read_text(encoding="utf-8").splitlines() if pattern.search(line)
    ]
    assert wrong == []


def test_every_test_says_what_it_guards_against() -> None:
    """A test that nobody dares to change because nobody knows what it is for."""
    silent = [
        f"{path.name}: {node.name}"
        for path in TESTS
        for node in ast.walk(tree(path))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and node.name.startswith("test_")
        and not ast.get_docstring(node)
    ]
    assert silent == []


def test_public_names() -> None:
    """An export added or lost by accident."""
    assert sorted(chairlift.__all__) == ["ChairliftError", "__version__"]
    assert all(hasattr(chairlift, name) for name in chairlift.__all__)


def test_one_version() -> None:
    """A wheel that calls itself something else than the program does."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["version"] == chairlift.__version__
    assert f"## {chairlift.__version__}" in (ROOT / "CHANGELOG.md").read_text()


def readme_tree() -> set[str]:
    """Paths in the README's file tree; folders end in a slash. What follows two spaces is a description."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    block = readme.split("## Files", 1)[1].split("```", 2)[1]
    found: set[str] = set()
    folders: list[tuple[int, str]] = []
    for line in filter(str.strip, block.splitlines()):
        indent = len(line) - len(line.lstrip())
        while folders and folders[-1][0] >= indent:
            folders.pop()
        base = "".join(name for _, name in folders)
        names = re.split(r"\s{2,}", line.strip())[0].split()
        found |= {base + name for name in names}
        if names[-1].endswith("/"):
            folders.append((indent, names[-1]))
    return found


def test_the_readme_tree_is_the_tree() -> None:
    """A map of a town that was rebuilt since."""
    listed = readme_tree()
    assert [path for path in sorted(listed) if not (ROOT / path).exists()] == []
    present = {
        str(path.relative_to(ROOT)) for path in MODULES if path.read_text().strip() and path.name != "__init__.py"
    }
    present |= {str(path.relative_to(ROOT)) for path in NATIVE if "tests" not in path.parts and path.suffix == ".h"}
    present |= {
        str(path.relative_to(ROOT))
        for folder in ("scripts", "docs")
        for path in (ROOT / folder).iterdir()
        if path.is_file()
    }
    assert sorted(present - listed) == []
