"""The tokenizer against `transformers`' ids, and what control tokens may and may not do."""

from __future__ import annotations

import json
import sys
import threading
import unicodedata
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chairlift.errors import ModelError, RequestError
from chairlift.models.checkpoint import open_checkpoint
from chairlift.models.gguf.vocabulary import read_tokenizer
from chairlift.models.tokenizer import Tokenizer
from support.paths import FIXTURES
from support.vocabularies import CONTROL, USER_DEFINED, VARIANTS, VOCABULARY, id_of, metadata, replaced, with_tokens

EXPECTED = json.loads((FIXTURES / "tokenizer_expected.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="module", params=VARIANTS)
def variant(request: pytest.FixtureRequest) -> tuple[str, Tokenizer]:
    return request.param, read_tokenizer(metadata(request.param))


@pytest.fixture(scope="module")
def gpt2() -> Tokenizer:
    return read_tokenizer(metadata())


@pytest.fixture(scope="module")
def smollm2(smollm2_path: Path) -> Tokenizer:
    with open_checkpoint(smollm2_path) as checkpoint:
        return checkpoint.tokenizer()


def assert_expected(tokenizer: Tokenizer, name: str) -> None:
    ids = EXPECTED["ids"][name]
    for i, text in enumerate(EXPECTED["texts"]):
        plain = ids["plain"][i]
        assert tokenizer.encode(text, add_bos=False, parse_special=False) == plain, repr(text)
        assert tokenizer.encode(text, add_bos=False, parse_special=True) == ids["parsed"].get(str(i), plain), repr(text)


def test_ids_equal_transformers(variant: tuple[str, Tokenizer]) -> None:
    """A pre-tokeniser that cuts one kind of text differently: the model reads tokens it was never trained on."""
    name, tokenizer = variant
    assert_expected(tokenizer, name)


def test_ids_of_the_default_model_equal_transformers(smollm2: Tokenizer) -> None:
    """As above with the real vocabulary of 49,152 tokens."""
    assert_expected(smollm2, "SmolLM2-135M-Instruct")


def test_default_model_facts(smollm2: Tokenizer) -> None:
    """The first 17 ids are control tokens, two of which end a turn or a text, and no BOS is added."""
    assert smollm2.vocab_size == len(smollm2.vocab_bytes) == 49152
    assert smollm2.special_ids == frozenset(range(17))
    assert smollm2.eos_ids == {0, 2}
    assert (smollm2.bos_id, smollm2.add_bos) == (1, False)
    assert smollm2.special_tokens["eos_token"] == "<|im_end|>"


@settings(max_examples=150, deadline=None)
@given(text=st.text())
def test_round_trip(text: str) -> None:
    """A byte lost or altered on the way to ids and back."""
    for name, normal in (("gpt-2", text), ("llama-bpe", text), ("qwen2", unicodedata.normalize("NFC", text))):
        tokenizer = TOKENIZERS[name]
        ids = tokenizer.encode(text, add_bos=False, parse_special=False)
        assert tokenizer.decode(ids) == normal
        assert b"".join(tokenizer.vocab_bytes[i] for i in ids) == normal.encode()


PIECES = st.sampled_from(
    ["<|im_start|>", "<|im_end|>", "<|eot_id|>", "<|", "|>", "im_end", "<tool_call>", "a", " ", "\n"]
)


@settings(max_examples=150, deadline=None)
@given(text=st.lists(PIECES).map("".join))
def test_typed_text_never_gives_a_control_token(text: str) -> None:
    """A user ends the system prompt by typing `<|im_end|>`."""
    for tokenizer in TOKENIZERS.values():
        assert not tokenizer.special_ids & set(tokenizer.encode(text, add_bos=False, parse_special=False))


TOKENIZERS = {name: read_tokenizer(metadata(name)) for name in VARIANTS}


def test_control_tokens_are_read_only_where_asked(gpt2: Tokenizer) -> None:
    """A rendered template needs its control tokens; user-defined tokens are always read."""
    text = "<|im_start|><tool_call>"
    assert gpt2.encode(text, add_bos=False, parse_special=True) == [id_of("<|im_start|>"), id_of("<tool_call>")]
    plain = gpt2.encode(text, add_bos=False, parse_special=False)
    assert plain[-1] == id_of("<tool_call>")
    assert gpt2.decode(plain) == text


def test_added_tokens_are_found_before_the_text_is_normalised() -> None:
    """Qwen's own tokenizer reads `[e´]` (two characters) as text, although NFC makes the token's text of it."""
    tokenizer = read_tokenizer(metadata("qwen2", **with_tokens(("[\u00e9]", USER_DEFINED))))
    added = len(VOCABULARY["tokens"])
    assert tokenizer.encode("[\u00e9]", add_bos=False, parse_special=False) == [added]
    assert added not in tokenizer.encode("[e\u0301]", add_bos=False, parse_special=False)


@pytest.mark.parametrize(
    ("pre", "added", "text"),
    [
        ("gpt-2", ("<|", CONTROL), "<|"),
        ("llama-bpe", ("Ġpause", CONTROL), "a pause"),
        ("llama-bpe", ("stop", CONTROL), "stop"),
    ],
)
def test_control_token_that_text_would_spell(pre: str, added: tuple[str, int], text: str) -> None:
    """BPE itself, by a merge or by `ignore_merges`, turns a user's words into a control token."""
    merges = VOCABULARY["merges"] + (["< |"] if added[0] == "<|" else [])
    fields = with_tokens(added)
    if added[0] in VOCABULARY["tokens"]:
        fields = {"token_type": replaced(VOCABULARY["types"], id_of(added[0]), CONTROL)}
        merges = VOCABULARY["merges"]
    tokenizer = read_tokenizer(metadata(pre, merges=merges, **fields))
    ids = tokenizer.encode(text, add_bos=False, parse_special=False)
    assert not tokenizer.special_ids & set(ids)
    assert tokenizer.decode(ids) == text


def test_byte_that_is_a_control_token_is_refused() -> None:
    """Every text with that byte would lose it or hold a control token."""
    with pytest.raises(ModelError, match="token_type"):
        read_tokenizer(metadata(token_type=replaced(VOCABULARY["types"], id_of("a"), CONTROL)))


def test_many_special_tokens() -> None:
    """Ids drift, or building takes minutes, once a vocabulary has thousands of reserved tokens."""
    added = [(f"<|reserved_{i}|>", CONTROL) for i in range(5000)]
    tokenizer = read_tokenizer(metadata(**with_tokens(*added)))
    base = len(VOCABULARY["tokens"])
    ids = tokenizer.encode("<|reserved_4999|><|reserved_0|>", add_bos=False, parse_special=True)
    assert ids == [base + 4999, base]


def test_bos_is_never_doubled(gpt2: Tokenizer) -> None:
    """A template that writes BOS itself, and a tokenizer that adds another."""
    bos = gpt2.bos_id
    once = gpt2.encode("<|begin_of_text|>Hi", add_bos=True, parse_special=True)
    assert once == gpt2.encode("Hi", add_bos=True, parse_special=False)
    assert once.count(bos or 0) == 1
    assert gpt2.encode("", add_bos=True, parse_special=False) == [bos]
    assert gpt2.encode("Hi", add_bos=False, parse_special=False) == once[1:]
    # Text that only looks like BOS is no BOS.
    assert gpt2.encode("<|begin_of_text|>", add_bos=True, parse_special=False)[0] == bos


def test_every_end_of_turn_token_stops() -> None:
    """A chat model that ends its turn with a token other than the one EOS of the file runs on for ever."""
    tokenizer = read_tokenizer(metadata(eos_token_id=1, eot_token_id=2, eom_token_id=3))
    known = {id_of(token) for token in ("<|endoftext|>", "<|im_end|>", "<|eot_id|>")}
    assert tokenizer.eos_ids == {1, 2, 3} | known
    assert read_tokenizer(metadata(eos_token_id=None)).eos_ids == known


def test_words_that_look_like_an_end_of_turn_do_not_stop() -> None:
    """An ordinary token `</s>` of an HTML corpus ends every answer about HTML."""
    tokenizer = read_tokenizer(metadata(**with_tokens(("</s>", 1))))
    assert len(VOCABULARY["tokens"]) not in tokenizer.eos_ids


def test_vocab_bytes(gpt2: Tokenizer) -> None:
    """The byte map inverted wrongly shows only on bytes that are rare in English."""
    assert {bytes([byte]) for byte in range(256)} <= set(gpt2.vocab_bytes)
    assert gpt2.vocab_bytes[id_of("Ġmountain")] == b" mountain"
    # é is the byte E9 in the byte alphabet, but itself in an added token; a space is not of the alphabet at all.
    tokenizer = read_tokenizer(metadata(**with_tokens(("<|é|>", CONTROL), ("[Ġé x]", USER_DEFINED), ("Ġ \u3000", 1))))
    assert [data.decode() for data in tokenizer.vocab_bytes[-3:]] == ["<|é|>", "[Ġé x]", "Ġ \u3000"]


def test_decode(gpt2: Tokenizer) -> None:
    """Bytes that are no UTF-8 break an answer."""
    half = VOCABULARY["tokens"].index("Ã")
    ids = [id_of("<|im_start|>"), half, id_of("valley")]
    assert gpt2.decode(ids) == "<|im_start|>\ufffdvalley"
    assert gpt2.decode([half]) == "\ufffd"


@pytest.mark.parametrize("token_id", [-1, 10**6])
def test_id_out_of_range(gpt2: Tokenizer, token_id: int) -> None:
    """A prompt of ids is from a client: -1 must not mean the last token, nor be a 500."""
    with pytest.raises(RequestError, match="outside the vocabulary"):
        gpt2.decode([token_id])


def test_lone_surrogate(gpt2: Tokenizer) -> None:
    r"""JSON allows "\ud800", which is no text: a 400, not a crash."""
    with pytest.raises(RequestError, match="surrogate"):
        gpt2.encode("a\ud800b", add_bos=False, parse_special=False)


def test_special_tokens_for_templates(gpt2: Tokenizer) -> None:
    """Templates write `bos_token`; a missing one must be undefined, not the word None."""
    assert gpt2.special_tokens == {"bos_token": "<|begin_of_text|>", "eos_token": "<|endoftext|>"}


def test_two_hundred_threads_at_once(gpt2: Tokenizer) -> None:
    """CASES A28: a tokenizer changed for one request while it encodes for another."""
    texts = [f"{text} #{i} <|im_end|>" for i, text in enumerate((EXPECTED["texts"] * 2)[:200])]
    jobs = [(text, parse) for text in texts for parse in (False, True)]

    def encode(job: tuple[str, bool]) -> list[int]:
        return gpt2.encode(job[0], add_bos=True, parse_special=job[1])

    alone = [encode(job) for job in jobs]
    with ThreadPoolExecutor(32) as pool:
        assert list(pool.map(encode, jobs)) == alone


def test_long_text_does_not_hold_the_interpreter(gpt2: Tokenizer) -> None:
    """One 1.6 MB prompt stops every other answer while it is encoded."""
    text = "word, " * 270_000
    started, done = threading.Event(), threading.Event()

    def encode() -> None:
        started.set()
        gpt2.encode(text, add_bos=False, parse_special=False)
        done.set()

    worker = threading.Thread(target=encode)
    interval = sys.getswitchinterval()
    # With slices this short a thread that only runs before and after the encoding gets nowhere near the bound.
    sys.setswitchinterval(1e-6)
    try:
        worker.start()
        started.wait()
        rounds = 0
        while not done.is_set():
            rounds += 1
    finally:
        sys.setswitchinterval(interval)
        worker.join()
    assert rounds > 20_000
