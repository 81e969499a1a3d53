"""Makes docs/structure.md, the map of all files, from the first sentence that each file says about itself.

`PYTHONPATH=tests python -m support.structure_page > docs/structure.md` writes it. A Python file is described by its
docstring, a C++ file or a shell script by the comment at its head. A source file `x.cpp` without such a comment shares
the row of its header `x.h`.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from support.paths import ROOT

PACKAGE = ROOT / "src" / "chairlift"
COMMAND = "PYTHONPATH=tests python -m support.structure_page > docs/structure.md"

ROOMS = {
    PACKAGE / "native": "The compiled core, in C++20: kernels, a pool of threads, and the replay of a recorded "
    "model. Knows arrays and ops, but no requests.",
    PACKAGE / "native" / "ops": "The ops of the compiled core: one file each, and what ops of single rows share.",
    PACKAGE / "native" / "testing": "Single kernels and arithmetic peaks as a second Python module, for tests and "
    "`chairlift bench kernels`.",
    ROOT / "experiments": "Measures the tables of [experiments.md](experiments.md). Does not ship with the program.",
    ROOT / "scripts": "What is run from a checkout: one short shell script each.",
    ROOT / "tests" / "support": "Helpers that tests share: models without weights, servers without sockets, clocks "
    "that tests move.",
}
"""What is said of folders that are no packages. One that does not exist is left out."""

INTRODUCTION = f"""# Structure

Every file that Chairlift is made of, with the first sentence that it says about itself. To follow one request through
these files, read [the tour](tour.md).

This page is made by `{COMMAND}`; a test keeps it true.
To change a line here, change the first sentence of the file.

Not listed: `deploy/` has files for systemd, containers, proxies and Prometheus, and [deploy.md](deploy.md) goes through
them. The folders of `tests/` mirror those of `src/chairlift/`. Beside these, `tests/system/` and `tests/soak/` run the
whole program, `tests/deploy/` the files of `deploy/`, `tests/clients/` other programs, and `tests/native/`
checks the C++ core.
"""


def docstring(path: Path) -> str:
    """A module's docstring, or nothing."""
    return ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""


def leading_comment(path: Path, mark: str) -> str:
    """The comment lines at a file's head, without their marks; a `#!` line is passed over."""
    lines = path.read_text(encoding="utf-8").splitlines()
    if lines and lines[0].startswith("#!"):
        del lines[0]
    found: list[str] = []
    for line in lines:
        if not line.startswith(mark):
            break
        found.append(line.removeprefix(mark).strip())
    return "\n".join(found)


def about(path: Path) -> str:
    """All that a file says about itself at its head."""
    match path.suffix:
        case ".py":
            return docstring(path)
        case ".h" | ".cpp":
            return leading_comment(path, "//")
        case _:
            return leading_comment(path, "#")


def first_sentence(text: str) -> str:
    """The first sentence of the first paragraph, in one line."""
    paragraph = " ".join(text.split("\n\n")[0].split())
    found = re.match(r".+?[.?!](?= [A-Z`(]|$)", paragraph)
    return found[0] if found else paragraph


def cell(text: str) -> str:
    """Text for a table: bars and, outside of code, angle brackets lose their meaning."""
    parts = re.split(r"(`[^`]*`)", text.replace("|", r"\|"))
    return "".join(part if part.startswith("`") else part.replace("<", "&lt;") for part in parts)


def files_of(folder: Path) -> list[Path]:
    """The files of a folder that the page names."""
    suffixes = ("", ".py", ".h", ".cpp")
    return sorted(
        path
        for path in folder.iterdir()
        if path.is_file() and path.suffix in suffixes and path.name != "__init__.py" and not path.name.startswith(".")
    )


def rows(folder: Path) -> Iterator[tuple[list[Path], str]]:
    """Files that share a row, with their sentence, which is empty where a file says nothing."""
    said = {path: first_sentence(about(path)) for path in files_of(folder)}
    silent = {path for path in said if path.suffix == ".cpp" and not said[path] and path.with_suffix(".h") in said}
    for path, sentence in said.items():
        if path not in silent:
            sources = [path.with_suffix(".cpp")] if path.suffix == ".h" else []
            yield [path, *(source for source in sources if source in silent)], sentence


def rooms() -> Iterator[tuple[Path, str]]:
    """Each folder with what it says about itself: packages first, then the rest."""
    for init in sorted(PACKAGE.rglob("__init__.py"), key=lambda path: path.parent):
        yield init.parent, " ".join(docstring(init).split("\n\n")[0].split())
    for folder, sentence in ROOMS.items():
        if folder.is_dir():
            yield folder, sentence


def section(folder: Path, sentence: str) -> str:
    """A room as a heading, its sentence, and a table of its files."""
    lines = [f"## {folder.relative_to(ROOT)}/", "", sentence]
    for number, (paths, text) in enumerate(rows(folder)):
        if number == 0:
            lines += ["", "| file | what it says |", "|---|---|"]
        links = ", ".join(f"[{path.name}](../{path.relative_to(ROOT)})" for path in paths)
        lines.append(f"| {links} | {cell(text)} |")
    return "\n".join(lines) + "\n"


def page() -> str:
    """The whole of docs/structure.md."""
    return "\n".join([INTRODUCTION, *(section(folder, sentence) for folder, sentence in rooms())])


if __name__ == "__main__":
    print(page(), end="")
