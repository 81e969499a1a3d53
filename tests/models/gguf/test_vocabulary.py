"""The tokenizer fields of GGUF metadata: what they mean, and what happens when they lie."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chairlift.errors import ModelError
from chairlift.models.gguf.vocabulary import read_tokenizer
from support.vocabularies import VARIANTS, VOCABULARY, metadata, replaced


@pytest.mark.parametrize("alias", ["llama3", "llama-v3"])
def test_aliases(alias: str) -> None:
    """Files by older converters name the same pre-tokeniser differently."""
    text = "It's 12345 o'clock\n\n  in the mountains"
    same, own = read_tokenizer(metadata(alias)), read_tokenizer(metadata("llama-bpe"))
    assert same.encode(text, add_bos=True, parse_special=False) == own.encode(text, add_bos=True, parse_special=False)
    assert same.add_bos


@pytest.mark.parametrize(
    ("pre", "field", "wanted"),
    [("gpt-2", None, False), ("gpt-2", True, True), ("llama-bpe", None, True), ("llama-bpe", False, False)],
)
def test_whether_bos_is_added(pre: str, field: bool | None, wanted: bool) -> None:
    """Llama 3 without its BOS, or another model with one that it never saw."""
    assert read_tokenizer(metadata(pre, add_bos_token=field)).add_bos is wanted


TOO_FEW = VOCABULARY["types"][:-1]
LIES: list[tuple[dict[str, Any], str]] = [
    ({"model": "llama"}, "tokenizer.ggml.model.*'llama'.*supported: gpt2"),
    ({"model": None}, "tokenizer.ggml.model.*missing"),
    ({"model": ["gpt2"]}, "tokenizer.ggml.model"),
    ({"pre": "default"}, "tokenizer.ggml.pre.*'default'.*supported: smollm, llama-bpe"),
    ({"pre": "deepseek-coder"}, "tokenizer.ggml.pre.*'deepseek-coder'"),
    ({"pre": None}, "tokenizer.ggml.pre.*missing"),
    ({"pre": 3}, "tokenizer.ggml.pre"),
    ({"pre": "x" * 10**6}, r"tokenizer.ggml.pre.{0,100}\.\.\. is not"),
    ({"tokens": None}, "tokenizer.ggml.tokens: missing"),
    ({"tokens": "abc"}, "tokenizer.ggml.tokens: not an array"),
    ({"tokens": [1, 2]}, "tokenizer.ggml.tokens: not an array"),
    ({"tokens": [], "token_type": []}, "tokenizer.ggml.tokens: empty"),
    ({"tokens": replaced(VOCABULARY["tokens"], 7, VOCABULARY["tokens"][3])}, "tokenizer.ggml.tokens: .* twice"),
    ({"token_type": None}, "tokenizer.ggml.token_type: missing"),
    ({"token_type": TOO_FEW}, f"token_type: {len(TOO_FEW)} entries for {len(TOO_FEW) + 1}"),
    ({"token_type": replaced(VOCABULARY["types"], 5, 77)}, "token_type: entry 5 is 77"),
    ({"token_type": replaced(VOCABULARY["types"], 5, 1.0)}, "token_type: not an array"),
    ({"merges": None}, "tokenizer.ggml.merges: missing"),
    ({"merges": ["ab"]}, "tokenizer.ggml.merges: entry 0"),
    ({"merges": ["a b", "a b c"]}, "tokenizer.ggml.merges: entry 1"),
    ({"merges": ["a "]}, "tokenizer.ggml.merges: entry 0"),
    ({"merges": [" a"]}, "tokenizer.ggml.merges: entry 0"),
    ({"merges": ["nowhere a"]}, "tokenizer.ggml.merges: .*nowhere"),
    ({"merges": ["z Ġmountain"]}, "tokenizer.ggml.merges: .*zĠmountain"),
    ({"bos_token_id": -1}, "tokenizer.ggml.bos_token_id: -1"),
    ({"bos_token_id": True}, "tokenizer.ggml.bos_token_id"),
    ({"bos_token_id": None, "add_bos_token": True}, "tokenizer.ggml.bos_token_id: missing"),
    ({"eos_token_id": 10**9}, "tokenizer.ggml.eos_token_id: 1000000000"),
    ({"eot_token_id": "2"}, "tokenizer.ggml.eot_token_id"),
    ({"add_bos_token": 1}, "tokenizer.ggml.add_bos_token"),
]


@pytest.mark.parametrize(("fields", "message"), LIES)
def test_lying_metadata_is_named(fields: dict[str, Any], message: str) -> None:
    """A hostile or broken file ends in a traceback, or in a tokenizer that is silently wrong."""
    with pytest.raises(ModelError, match=message) as caught:
        read_tokenizer(metadata(**fields))
    assert len(str(caught.value)) < 400


VALUES = st.none() | st.booleans() | st.integers() | st.text(max_size=5)
FIELDS = ["tokens", "token_type", "merges", "bos_token_id", "eos_token_id", "add_bos_token", "eot_token_id"]


@settings(max_examples=150, deadline=None)
@given(
    tokens=st.lists(st.text(st.sampled_from("abĠé \0"), max_size=3), max_size=12),
    types=st.lists(st.integers(0, 6), max_size=12),
    merges=st.lists(st.text(st.sampled_from("ab Ġ"), max_size=4), max_size=4),
    odd=st.dictionaries(st.sampled_from(FIELDS), VALUES | st.lists(VALUES, max_size=4), max_size=2),
    pre=st.sampled_from(VARIANTS),
)
def test_any_metadata_gives_a_tokenizer_or_a_clear_error(
    tokens: list[str], types: list[int], merges: list[str], odd: dict[str, Any], pre: str
) -> None:
    """A combination of fields nobody thought of."""
    types = (types + [1] * len(tokens))[: len(tokens)]
    fields = {"tokens": tokens, "token_type": types, "merges": merges, "bos_token_id": 0} | odd
    # Any other error than ours fails this test.
    with contextlib.suppress(ModelError):
        tokenizer = read_tokenizer(metadata(pre, **fields))
        tokenizer.decode(tokenizer.encode("ab a Ġ\0", add_bos=True, parse_special=True))
