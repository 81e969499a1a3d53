"""The documentation against the program: commands parse, snippets compile, links lead somewhere, tables are current."""

from __future__ import annotations

import ast
import json
import re
import shlex
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from chairlift import cli, config
from support.paths import ROOT

DOCS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
IDS = [str(path.relative_to(ROOT)) for path in DOCS]


def blocks(path: Path, language: str) -> Iterator[str]:
    """Fenced code of one language."""
    for found in re.finditer(rf"^```{language}\n(.*?)^```", path.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL):
        yield found[1]


def commands(path: Path) -> Iterator[list[str]]:
    """Shell commands in fenced code: continuation lines and open quotes joined, comments dropped."""
    for block in blocks(path, "sh"):
        text = ""
        for line in block.replace("\\\n", " ").splitlines():
            text = f"{text}\n{line}" if text else line
            try:
                words = shlex.split(text, comments=True)
            except ValueError:
                continue  # a quote is still open
            text = ""
            while "&&" in words:
                yield words[: words.index("&&")]
                words = words[words.index("&&") + 1 :]
            if words:
                yield words
        assert not text, f"{path}: a quote that is never closed"


def anchors(path: Path) -> set[str]:
    """Targets of #links, as code hosts make them of headings."""
    headings = re.findall(r"^#+ (.*)$", path.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("path", DOCS, ids=IDS)
def test_links_lead_somewhere(path: Path) -> None:
    """A link to a page that was renamed."""
    for target in re.findall(r"\]\(([^)\s]+)\)", path.read_text(encoding="utf-8")):
        if re.match(r"https?://", target):
            continue
        file, _, anchor = target.partition("#")
        page = (path.parent / file) if file else path
        assert page.exists(), target
        assert not anchor or anchor in anchors(page), target


@pytest.mark.parametrize("path", DOCS, ids=IDS)
def test_files_named_in_text_exist(path: Path) -> None:
    """A guide that sends people to a file that is not there."""
    if path.name in ("CHANGELOG.md", "log.md"):
        return  # they tell of the past
    places = [ROOT, ROOT / "src/chairlift", *(ROOT / "src/chairlift").iterdir()]
    for name in re.findall(r"`([\w./-]+/[\w.-]+\.(?:py|h|cpp|md|toml))`", path.read_text(encoding="utf-8")):
        assert any((place / name).exists() for place in places), name


@pytest.mark.parametrize("path", DOCS, ids=IDS)
def test_chairlift_commands_parse(path: Path) -> None:
    """A documented flag that does not exist, or that was renamed."""
    for words in commands(path):
        if words[0] == "chairlift":
            name = words[1:3] if words[1] == "bench" else words[1:2]
            result = CliRunner().invoke(cli.app, [*words[1:], "--help"])
            assert result.exit_code == 0, (words, result.output)
            flags = {setting.flag for setting in config.SETTINGS.values()}
            given = {word for word in words if word.startswith("--")}
            known = set(
                re.findall(
                    r"--[a-z][a-z-]*", CliRunner().invoke(cli.app, [*name, "--help"], env={"COLUMNS": "200"}).output
                )
            )
            assert given <= known | flags, words


@pytest.mark.parametrize("path", DOCS, ids=IDS)
def test_scripts_named_in_commands_exist(path: Path) -> None:
    """A first command that is not there."""
    for words in commands(path):
        if words[0].startswith(("scripts/", ".ci/")):
            script = ROOT / words[0]
            assert script.stat().st_mode & 0o111, script


@pytest.mark.parametrize("path", DOCS, ids=IDS)
def test_snippets_are_valid(path: Path) -> None:
    """Python that does not compile, TOML that the program refuses, JSON that no server reads."""
    for block in blocks(path, "python"):
        ast.parse(block)
    for block in blocks(path, "toml"):
        for key, value in tomllib.loads(block).items():
            config.SETTINGS[key.replace("-", "_")].parse(value, key)
    for words in commands(path):
        if words[0] == "curl" and "-d" in words:
            json.loads(words[words.index("-d") + 1])


def test_the_settings_page_is_current() -> None:
    """A page that lists last month's settings."""
    assert (ROOT / "docs/configuration.md").read_text(encoding="utf-8") == config.markdown()


def test_scripts_are_short_and_run_from_anywhere() -> None:
    """A script that only works in one directory, goes on after a failure, or has become a program."""
    for script in [*(ROOT / "scripts").iterdir(), ROOT / ".ci/run"]:
        if script.is_file():
            text = script.read_text(encoding="utf-8")
            assert re.match(r"#!/(bin/sh|usr/bin/env bash|bin/bash)\n", text), script
            assert re.search(r"^set -e", text, re.MULTILINE), script
            assert 'dirname "$0"' in text or "BASH_SOURCE" in text, script
            assert len(text.splitlines()) <= 60, script
