"""The fixture vocabulary as a GGUF file would hold it, with whatever a test wants changed."""

from __future__ import annotations

import json
from typing import Any

from support.paths import FIXTURES

VOCABULARY = json.loads((FIXTURES / "tokenizer_vocabulary.json").read_text(encoding="utf-8"))
VARIANTS = ["gpt-2", "qwen2", "llama-bpe", "smollm"]
CONTROL, USER_DEFINED = 3, 4


def metadata(pre: str = "gpt-2", **fields: Any) -> dict[str, Any]:
    """The fixture vocabulary as GGUF metadata; a field given as None is left out."""
    base = {
        "model": "gpt2",
        "pre": pre,
        "tokens": VOCABULARY["tokens"],
        "token_type": VOCABULARY["types"],
        "merges": VOCABULARY["merges"],
        "bos_token_id": id_of("<|begin_of_text|>"),
        "eos_token_id": id_of("<|endoftext|>"),
    }
    return {f"tokenizer.ggml.{name}": value for name, value in (base | fields).items() if value is not None}


def id_of(token: str) -> int:
    """The id of a token of the fixture vocabulary."""
    index: int = VOCABULARY["tokens"].index(token)
    return index


def with_tokens(*added: tuple[str, int]) -> dict[str, Any]:
    """Token and type arrays of the fixture vocabulary with more tokens behind."""
    return {
        "tokens": VOCABULARY["tokens"] + [text for text, _ in added],
        "token_type": VOCABULARY["types"] + [kind for _, kind in added],
    }


def replaced(values: list[Any], index: int, value: Any) -> list[Any]:
    """The list with one entry changed."""
    return [*values[:index], value, *values[index + 1 :]]
