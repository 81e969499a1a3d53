"""Fixtures that more than one test file needs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import hypothesis
import pytest

from chairlift import config, store
from support.tiny_gguf import tiny_model

hypothesis.settings.register_profile("chairlift", deadline=None)  # how long an example takes is the machine's affair
hypothesis.settings.load_profile("chairlift")

TinyGGUF = Callable[..., Path]
"""`tiny_gguf(architecture="llama", **shape)`: the path of such a file; see `support.tiny_gguf`."""


@pytest.fixture(scope="session")
def tiny_gguf(tmp_path_factory: pytest.TempPathFactory) -> TinyGGUF:
    """Writes each tiny model once a session; callers must not change the file."""
    directory = tmp_path_factory.mktemp("models")
    written: dict[str, Path] = {}

    def path_of(architecture: str = "llama", **shape: Any) -> Path:
        key = f"{architecture} {sorted(shape.items())}"
        if key not in written:
            written[key] = tiny_model(directory / f"tiny-{len(written)}.gguf", architecture, **shape)
        return written[key]

    return path_of


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """The default model, fetched into the user's cache if it is not there yet."""
    return store.resolve("smollm2", config.load().cache_dir)
