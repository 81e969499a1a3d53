"""The `tokenizer.ggml.*` fields of a GGUF file, as a `Tokenizer`.

Every field is untrusted. One that is missing, contradicts another or cannot be honoured is a `ModelError` naming it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from chairlift.errors import ModelError
from chairlift.models.tokenizer import (
    GPT2,
    LLAMA3,
    QWEN2,
    SMOLLM,
    PreTokenizer,
    Tokenizer,
    Vocabulary,
    VocabularyError,
    VocabularyPart,
)
from chairlift.text import quoted

_PREFIX = "tokenizer.ggml."

# Values of tokenizer.ggml.token_type, from the GGUF specification.
_CONTROL, _USER_DEFINED, _LAST_TYPE = 3, 4, 6

_FIELD_OF: Mapping[VocabularyPart, str] = {
    "tokens": "tokens",
    "control": "token_type",
    "merges": "merges",
    "bos_id": "bos_token_id",
}
"""The field that each part of a `Vocabulary` is read from."""


@dataclass(frozen=True, slots=True)
class _Variant:
    """One `tokenizer.ggml.pre`; `add_bos` applies where the file has no add_bos_token."""

    pre_tokenizer: PreTokenizer
    add_bos: bool = False


_VARIANTS: Mapping[str, _Variant] = {
    "smollm": _Variant(SMOLLM),
    "llama-bpe": _Variant(LLAMA3, add_bos=True),
    "llama3": _Variant(LLAMA3, add_bos=True),
    "llama-v3": _Variant(LLAMA3, add_bos=True),
    "qwen2": _Variant(QWEN2),
    "gpt-2": _Variant(GPT2),
    "gpt2": _Variant(GPT2),
}


def read_tokenizer(metadata: Mapping[str, Any]) -> Tokenizer:
    """Builds the tokenizer that a GGUF file describes.

    Raises ModelError naming the field when the metadata is of a kind that is not supported, or contradicts itself.
    """
    try:
        return Tokenizer(_Fields(metadata).vocabulary())
    except VocabularyError as error:
        raise _wrong(_FIELD_OF[error.part], error.what) from None


class _Fields:
    """The fields of one file, checked as they are read."""

    def __init__(self, metadata: Mapping[str, Any]) -> None:
        self._metadata = metadata
        self._require_model()
        self._variant = self._read_variant()
        self._tokens: list[str] = self._array("tokens", str)
        self._types: list[int] = self._array("token_type", int)
        self._check_types()

    def vocabulary(self) -> Vocabulary:
        named = (self._token_id(name) for name in ("eos_token_id", "eot_token_id", "eom_token_id"))
        return Vocabulary(
            tokens=self._tokens,
            merges=[_merge(i, text) for i, text in enumerate(self._array("merges", str))],
            pre_tokenizer=self._variant.pre_tokenizer,
            control=self._of_type(_CONTROL),
            user_defined=self._of_type(_USER_DEFINED),
            bos_id=self._token_id("bos_token_id"),
            add_bos=self._add_bos(),
            eos_ids=frozenset(i for i in named if i is not None),
            special_tokens=self._special_tokens(),
        )

    def _of_type(self, token_type: int) -> list[int]:
        return [i for i, kind in enumerate(self._types) if kind == token_type]

    def _token_id(self, name: str) -> int | None:
        """The id that a field such as `bos_token_id` holds; None where the file has no such field."""
        value = self._metadata.get(_PREFIX + name)
        if value is None:
            return None
        if type(value) is not int or not 0 <= value < len(self._tokens):
            raise _wrong(name, f"{quoted(value)} is no id of this vocabulary of {len(self._tokens)} tokens")
        return value

    def _add_bos(self) -> bool:
        value = self._metadata.get(_PREFIX + "add_bos_token", self._variant.add_bos)
        if type(value) is not bool:
            raise _wrong("add_bos_token", f"{quoted(value)} is neither true nor false")
        return value

    def _special_tokens(self) -> dict[str, str]:
        fields = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
        ids = {name: self._token_id(f"{field}_token_id") for name, field in fields.items()}
        return {f"{name}_token": self._tokens[i] for name, i in ids.items() if i is not None}

    def _require_model(self) -> None:
        model = self._metadata.get(_PREFIX + "model")
        if model != "gpt2":
            what = "missing" if model is None else f"{quoted(model)} is not supported"
            raise _wrong("model", what, hint="supported: gpt2, which is byte-level BPE")

    def _read_variant(self) -> _Variant:
        name = self._metadata.get(_PREFIX + "pre")
        variant = _VARIANTS.get(name) if isinstance(name, str) else None
        if variant is None:
            what = "missing" if name is None else f"{quoted(name)} is not supported"
            raise _wrong("pre", f"{what}; a guess could cut text wrongly", hint=f"supported: {', '.join(_VARIANTS)}")
        return variant

    def _array(self, name: str, kind: type) -> list[Any]:
        value = self._metadata.get(_PREFIX + name)
        if value is None:
            raise _wrong(name, "missing")
        if not isinstance(value, list) or not set(map(type, value)) <= {kind}:
            raise _wrong(name, f"not an array of {kind.__name__}")
        return value

    def _check_types(self) -> None:
        tokens, types = self._tokens, self._types
        if not tokens:
            raise _wrong("tokens", "empty")
        if len(types) != len(tokens):
            raise _wrong("token_type", f"{len(types)} entries for {len(tokens)} tokens")
        bad = next((i for i, kind in enumerate(types) if not 0 <= kind <= _LAST_TYPE), None)
        if bad is not None:
            raise _wrong("token_type", f"entry {bad} is {types[bad]}, which is no token type")


def _merge(index: int, text: str) -> tuple[str, str]:
    left, space, right = text.partition(" ")
    if not (left and space and right) or " " in right:
        raise _wrong("merges", f"entry {index} is {quoted(text)}, not two tokens with a space between")
    return left, right


def _wrong(field: str, what: str, *, hint: str = "") -> ModelError:
    return ModelError(f"{_PREFIX}{field}: {what}", hint=hint)
