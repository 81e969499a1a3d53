"""The shape of the code: which module may import which, how long things may get, and what is promised to users."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

import chairlift
from support import structure_page
from support.paths import ROOT

PACKAGE = ROOT / "src" / "chairlift"
MODULES = sorted(path for path in PACKAGE.rglob("*.py"))
NATIVE = sorted(
    path for path in [*PACKAGE.glob("native/**/*"), *ROOT.glob("tests/native/*")] if path.suffix in (".h", ".cpp")
)
TESTS = sorted(ROOT.glob("tests/**/*.py"))
EXPERIMENTS = sorted(ROOT.glob("experiments/**/*.py"))

MAX_FILE_LINES = 500
MAX_FUNCTION_LINES = 60
MAX_README_LINES = 130

IMPURE_ENGINE = {
    f"engine.{name}" for name in ("batch", "engine", "logit_rows", "runner", "telemetry", "warm_up", "watchdog")
}
"""The rest of the engine is pure: no arrays, no clock, no lock, no logger, no settings."""

STEP_PATH = ("engine", "scheduler", "request", "step", "blocks", "prefix_cache", "batch", "runner")
"""What one reads to understand a step."""

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
    pure = (path for path in within("engine") if name_of(path) not in IMPURE_ENGINE)
    banned = "numpy|time|datetime|logging|random|os|threading|contextlib|asyncio|server|kernels|config|keys|plan"
    assert offences(pure, banned) == []


def test_a_step_can_be_understood_in_one_sitting() -> None:
    """An engine that grows until nobody reads it to its end."""
    paths = [PACKAGE / "engine" / f"{name}.py" for name in STEP_PATH]
    assert sum(len(path.read_text(encoding="utf-8").splitlines()) for path in paths) <= 1500


def test_cost_and_plan_know_neither_arrays_nor_the_server() -> None:
    """Arithmetic that needs a model loaded, or that differs between the planner and the server."""
    assert offences(within("cost", "plan"), "numpy|server|time|os") == []


def test_models_and_kernels_know_no_engine() -> None:
    """A model file that depends on who schedules it."""
    assert offences(within("models", "kernels"), "engine|server|boot|config|cli") == []


def test_the_engine_knows_no_server() -> None:
    """JSON or asyncio in the engine."""
    assert offences(within("engine"), "server|asyncio|json|fastapi|pydantic|cli|boot") == []


def test_the_server_uses_the_api_of_the_engine_alone() -> None:
    """Handlers that reach into the scheduler's state from another thread."""
    seen = {name for path in within("server") for name in imports(path) if name.startswith("engine.")}
    allowed = {"engine.admission", "engine.engine", "engine.request", "engine.sampling_params", "engine.observer"}
    assert {".".join(name.split(".")[:2]) for name in seen} <= allowed


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


def test_names_mean_one_thing() -> None:
    """Two classes of one name, of which a reader takes one for the other; a module that hides a standard one."""
    classes = Counter(node.name for path in MODULES for node in ast.walk(tree(path)) if isinstance(node, ast.ClassDef))
    assert [name for name, count in classes.items() if count > 1] == []
    assert [str(path.relative_to(ROOT)) for path in MODULES if path.stem in sys.stdlib_module_names] == []


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


def test_the_structure_page_is_current() -> None:
    """A map of a town that was rebuilt since."""
    is_current = (ROOT / "docs/structure.md").read_text(encoding="utf-8") == structure_page.page()
    assert is_current, f"docs/structure.md is out of date; write it again: {structure_page.COMMAND}"


def test_the_structure_page_names_every_file() -> None:
    """A room that nobody told the generator of."""
    named = {path for folder, _ in structure_page.rooms() for paths, _ in structure_page.rows(folder) for path in paths}
    files = [path for path in PACKAGE.rglob("*") if path.suffix in (".py", ".h", ".cpp") and path.name != "__init__.py"]
    assert [str(path.relative_to(ROOT)) for path in sorted(set(files) - named)] == []


@pytest.mark.parametrize(
    ("text", "first"),
    [
        ("A. B.", "A."),
        (
            "Qwen2 (Yang et al. 2024): a layer, see isa.h for more. Pure.",
            "Qwen2 (Yang et al. 2024): a layer, see isa.h for more.",
        ),
        ("One\nline. `two` lines.", "One line."),
        ("A picture\n\n    of boxes.", "A picture"),
        ("", ""),
    ],
)
def test_a_first_sentence_ends_where_it_ends(text: str, first: str) -> None:
    """A map whose lines stop at an abbreviation, or go on to a drawing."""
    assert structure_page.first_sentence(text) == first


def test_every_file_says_what_it_is() -> None:
    """A file that the map can only name."""
    silent = [
        str(paths[0].relative_to(ROOT))
        for folder, _ in structure_page.rooms()
        for paths, sentence in structure_page.rows(folder)
        if not sentence
    ]
    assert silent == []


def test_every_room_says_what_it_is() -> None:
    """A folder whose purpose is a guess from its name."""
    assert [str(folder) for folder, sentence in structure_page.rooms() if not sentence] == []


def test_the_readme_is_short_and_leads_everywhere() -> None:
    """A first page that nobody reads to its end, or a page that nobody finds from it."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(readme.splitlines()) <= MAX_README_LINES
    pages = [str(path.relative_to(ROOT)) for path in [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")]]
    assert [name for name in pages if name != "README.md" and f"]({name})" not in readme] == []
