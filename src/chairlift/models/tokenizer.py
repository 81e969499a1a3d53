"""Text to token ids and back, from GGUF metadata: byte-level BPE on the `tokenizers` library.

Owns the pre-tokeniser variants, special tokens, BOS and end-of-turn rules. Knows nothing of chat templates, requests or
streaming. Every field of the metadata is untrusted: what cannot be honoured is a `ModelError` that names the field.

    text ── added tokens cut out ── normalise ── pre-tokenise (variant) ── bytes as printable characters ── BPE ── ids
             user-defined: always
             control: only where parse_special is set (a rendered chat template), plain text elsewhere

Bytes that the vocabulary has no token for produce no id, as in the original tokenizers (SmolLM2 lacks 21 of the 256,
all of them control characters or bytes that UTF-8 never holds).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tokenizers import AddedToken, Regex, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Encoder
from tokenizers.models import BPE

from chairlift.errors import EngineError, ModelError, RequestError

_PREFIX = "tokenizer.ggml."

# Values of tokenizer.ggml.token_type, from the GGUF specification.
_CONTROL, _USER_DEFINED, _LAST_TYPE = 3, 4, 6

# Control tokens that end a turn or a text in the model families we know: whichever of them a vocabulary has, stops.
_END_OF_TURN = frozenset(
    {
        "<|im_end|>",
        "<|endoftext|>",
        "<|eot_id|>",
        "<|eom_id|>",
        "<|end_of_text|>",
        "<|end_of_turn|>",
        "<|end|>",
        "<end_of_turn>",
        "<eos>",
        "</s>",
        "<EOT>",
        "<|EOT|>",
        "<｜end▁of▁sentence｜>",
    }
)

_LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2_SPLIT = _LLAMA3_SPLIT.replace(r"\p{N}{1,3}", r"\p{N}")


@dataclass(frozen=True)
class _Variant:
    """How one `tokenizer.ggml.pre` cuts text before BPE, as the original model's tokenizer does."""

    pre_tokenizer: Callable[[], Any]
    normalizer: Callable[[], Any] | None = None
    # A piece that is a vocabulary entry as a whole is that token, whether or not the merges lead there.
    ignore_merges: bool = False
    # Applies where the metadata has no add_bos_token.
    add_bos: bool = False


def _byte_level(*, use_regex: bool) -> Any:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=use_regex)


def _gpt2() -> Any:
    return _byte_level(use_regex=True)


def _smollm() -> Any:
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _byte_level(use_regex=True)])


def _split(pattern: str) -> Any:
    pieces = pre_tokenizers.Split(Regex(pattern), behavior="isolated", invert=False)
    return pre_tokenizers.Sequence([pieces, _byte_level(use_regex=False)])


_LLAMA3 = _Variant(lambda: _split(_LLAMA3_SPLIT), ignore_merges=True, add_bos=True)
_GPT2 = _Variant(_gpt2)
_VARIANTS: Mapping[str, _Variant] = {
    "smollm": _Variant(_smollm),
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "qwen2": _Variant(lambda: _split(_QWEN2_SPLIT), normalizer=normalizers.NFC),
    "gpt-2": _GPT2,
    "gpt2": _GPT2,
}


class Tokenizer:
    """One model's tokenizer; immutable once built, so any number of threads may use it at once.

    `vocab_bytes[id]` are the bytes an id stands for; `special_ids` are control tokens, which give no text to a reader;
    `eos_ids` end a generation; `bos_id` is None where the model names none; `add_bos` says whether its prompts begin
    with it; `special_tokens` maps the names that chat templates use (`bos_token`, `eos_token`, ...) to their text.
    """

    def __init__(self, fields: _Fields) -> None:
        self.vocab_bytes: tuple[bytes, ...] = tuple(map(_token_bytes, fields.tokens, fields.types))
        self.vocab_size: int = len(fields.tokens)
        self.special_ids: frozenset[int] = frozenset(fields.of_type(_CONTROL))
        self.eos_ids: frozenset[int] = fields.eos_ids()
        self.bos_id: int | None = fields.token_id("bos_token_id")
        self.add_bos: bool = fields.add_bos()
        self.special_tokens: dict[str, str] = fields.special_tokens()
        self._parsing, self._plain = _encoders(fields)

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, Any]) -> Tokenizer:
        """Builds the tokenizer that a GGUF file describes.

        Raises ModelError naming the field when the metadata is of a kind that is not supported, or contradicts itself.
        """
        return cls(_Fields(metadata))

    def encode(self, text: str, *, add_bos: bool, parse_special: bool) -> list[int]:
        """The token ids of `text`.

        `parse_special` reads control tokens written in the text as such (for rendered chat templates; never for text
        that a user typed). `add_bos` puts BOS in front unless the text already begins with it. Long texts are encoded
        without holding the interpreter lock. Raises RequestError for text that is not Unicode (a lone surrogate).
        """
        encoder = self._parsing if parse_special else self._plain
        try:
            # Only the batch call releases the interpreter lock while it works.
            ids = encoder.encode_batch_fast([text], add_special_tokens=False)[0].ids
        except TypeError as error:
            raise RequestError("the text holds a lone surrogate, which no encoding of Unicode can carry") from error
        except BaseException as error:
            raise _ours(error, EngineError("the tokenizer failed on this text")) from None
        if add_bos and self.bos_id is not None and ids[:1] != [self.bos_id]:
            ids.insert(0, self.bos_id)
        return ids

    def decode(self, ids: Sequence[int], *, skip_special: bool = False) -> str:
        """The text of `ids`; bytes that are no UTF-8 become U+FFFD. Raises RequestError for an id out of range."""
        skipped = self.special_ids if skip_special else frozenset()
        return b"".join(self.vocab_bytes[self._checked(i)] for i in ids if i not in skipped).decode("utf-8", "replace")

    def token_text(self, token_id: int) -> str:
        """The text of one token, with U+FFFD where its bytes are only part of a character."""
        return self.vocab_bytes[self._checked(token_id)].decode("utf-8", "replace")

    def _checked(self, token_id: int) -> int:
        if not 0 <= token_id < self.vocab_size:
            raise RequestError(f"token id {token_id} is outside the vocabulary of {self.vocab_size}")
        return token_id


class _Fields:
    """The `tokenizer.ggml.*` fields of one file, checked as they are read."""

    def __init__(self, metadata: Mapping[str, Any]) -> None:
        self._metadata = metadata
        self._require_model()
        self.variant = self._read_variant()
        self.tokens: list[str] = self._array("tokens", str)
        self.types: list[int] = self._array("token_type", int)
        self.vocab: dict[str, int] = {token: i for i, token in enumerate(self.tokens)}
        self._check_tokens()
        self.merges: list[tuple[str, str]] = [_merge(i, text) for i, text in enumerate(self._array("merges", str))]

    def of_type(self, token_type: int) -> list[int]:
        return [i for i, kind in enumerate(self.types) if kind == token_type]

    def token_id(self, name: str) -> int | None:
        """The id that a field such as `bos_token_id` holds; None where the file has no such field."""
        value = self._metadata.get(_PREFIX + name)
        if value is None:
            return None
        if type(value) is not int or not 0 <= value < len(self.tokens):
            raise _wrong(name, f"{_short(value)} is no id of this vocabulary of {len(self.tokens)} tokens")
        return value

    def add_bos(self) -> bool:
        value = self._metadata.get(_PREFIX + "add_bos_token", self.variant.add_bos)
        if type(value) is not bool:
            raise _wrong("add_bos_token", f"{_short(value)} is neither true nor false")
        if value and self.token_id("bos_token_id") is None:
            raise _wrong("bos_token_id", "missing, though prompts of this model begin with that token")
        return value

    def eos_ids(self) -> frozenset[int]:
        named = (self.token_id(name) for name in ("eos_token_id", "eot_token_id", "eom_token_id"))
        marked = self.of_type(_CONTROL) + self.of_type(_USER_DEFINED)
        known = (i for i in marked if self.tokens[i] in _END_OF_TURN)
        return frozenset(i for i in (*named, *known) if i is not None)

    def special_tokens(self) -> dict[str, str]:
        fields = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
        ids = {name: self.token_id(f"{field}_token_id") for name, field in fields.items()}
        return {f"{name}_token": self.tokens[i] for name, i in ids.items() if i is not None}

    def _require_model(self) -> None:
        model = self._metadata.get(_PREFIX + "model")
        if model != "gpt2":
            what = "missing" if model is None else f"{_short(model)} is not supported"
            raise _wrong("model", what, hint="supported: gpt2, which is byte-level BPE")

    def _read_variant(self) -> _Variant:
        name = self._metadata.get(_PREFIX + "pre")
        variant = _VARIANTS.get(name) if isinstance(name, str) else None
        if variant is None:
            what = "missing" if name is None else f"{_short(name)} is not supported"
            raise _wrong("pre", f"{what}; a guess could cut text wrongly", hint=f"supported: {', '.join(_VARIANTS)}")
        return variant

    def _array(self, name: str, kind: type) -> list[Any]:
        value = self._metadata.get(_PREFIX + name)
        if value is None:
            raise _wrong(name, "missing")
        if not isinstance(value, list) or not set(map(type, value)) <= {kind}:
            raise _wrong(name, f"not an array of {kind.__name__}")
        return value

    def _check_tokens(self) -> None:
        tokens, types = self.tokens, self.types
        if not tokens:
            raise _wrong("tokens", "empty")
        if len(types) != len(tokens):
            raise _wrong("token_type", f"{len(types)} entries for {len(tokens)} tokens")
        if len(self.vocab) != len(tokens):
            twice = next(token for i, token in enumerate(tokens) if self.vocab[token] != i)
            raise _wrong("tokens", f"{_short(twice)} is there twice")
        bad = next((i for i, kind in enumerate(types) if not 0 <= kind <= _LAST_TYPE), None)
        if bad is not None:
            raise _wrong("token_type", f"entry {bad} is {types[bad]}, which is no token type")


def _merge(index: int, text: str) -> tuple[str, str]:
    left, space, right = text.partition(" ")
    if not (left and space and right) or " " in right:
        raise _wrong("merges", f"entry {index} is {_short(text)}, not two tokens with a space between")
    return left, right


def _encoders(fields: _Fields) -> tuple[Encoder, Encoder]:
    """Two encoders: the first reads control tokens in text, the second takes them for plain text.

    One encoder switched to and fro would race between threads.
    """
    control = fields.of_type(_CONTROL)
    spelt = _spelt_by_text(fields, [fields.tokens[i] for i in control])
    try:
        model = _bpe(fields, without=frozenset())
        plain_model = _bpe(fields, without=spelt) if spelt else model
        return _encoder(fields, model, control), _encoder(fields, plain_model, [])
    except BaseException as error:
        # The library's own words name the merge or token that it could not take.
        raise _ours(error, _wrong("merges", f"do not belong to these tokens: {_short(error)}")) from None


def _bpe(fields: _Fields, *, without: frozenset[str]) -> BPE:
    vocab, merges = fields.vocab, fields.merges
    if without:
        vocab = {token: i for token, i in vocab.items() if token not in without}
        merges = [(a, b) for a, b in merges if not without & {a, b, a + b}]
    return BPE(vocab=vocab, merges=merges, ignore_merges=fields.variant.ignore_merges)


def _encoder(fields: _Fields, model: BPE, control: Sequence[int]) -> Encoder:
    encoder = Encoder(model)
    encoder.pre_tokenizer = fields.variant.pre_tokenizer()
    if fields.variant.normalizer is not None:
        encoder.normalizer = fields.variant.normalizer()
    # An added token whose text the model's vocabulary holds gets its id from there. One call each: the library builds
    # its search automaton anew in every call.
    encoder.add_special_tokens(_added(fields, control, special=True))
    encoder.add_tokens(_added(fields, fields.of_type(_USER_DEFINED), special=False))
    return encoder


def _added(fields: _Fields, ids: Iterable[int], *, special: bool) -> list[AddedToken]:
    texts = (fields.tokens[i] for i in ids)
    return [AddedToken(text, special=special, normalized=False) for text in texts if text]


def _spelt_by_text(fields: _Fields, control: Sequence[str]) -> frozenset[str]:
    """The control tokens that BPE would make from ordinary text, which must never gain the power of a control token."""
    byte = next((text for text in control if len(text) == 1 and text in _BYTE_OF), None)
    if byte is not None:
        raise _wrong("token_type", f"{_short(byte)} is a control token and also one byte of ordinary text")
    merged = {left + right for left, right in fields.merges}
    whole = fields.variant.ignore_merges
    return frozenset(text for text in control if text in merged or (whole and _is_one_piece(fields.variant, text)))


def _is_one_piece(variant: _Variant, token: str) -> bool:
    """Whether the pre-tokeniser makes `token` of the text that BPE would have to find there."""
    try:
        text = bytes(_BYTE_OF[char] for char in token).decode("utf-8")
    except (KeyError, UnicodeDecodeError):
        return False
    return [piece for piece, _ in variant.pre_tokenizer().pre_tokenize_str(text)] == [token]


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's printable character for each byte, inverted: printable Latin-1 is itself, the rest is U+0100 onwards."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


_BYTE_OF = _byte_alphabet()
# Latin-1 characters outside the alphabet go where encoding to Latin-1 fails, so that such a token is seen.
_TO_LATIN1 = dict.fromkeys(range(256), 0xFFFF) | {ord(char): byte for char, byte in _BYTE_OF.items()}


def _token_bytes(token: str, token_type: int) -> bytes:
    """The bytes of one token: an added token's own UTF-8, else through the byte alphabet where the text is of it."""
    if token_type in (_CONTROL, _USER_DEFINED):
        return token.encode("utf-8", "replace")
    try:
        return token.translate(_TO_LATIN1).encode("latin-1")
    except UnicodeEncodeError:
        return token.encode("utf-8", "replace")


def _ours(error: BaseException, replacement: Exception) -> BaseException:
    """`replacement` for an error or a panic of the library; anything else (an interrupt) stays itself."""
    # The library's panics derive from BaseException, and their class cannot be imported.
    foreign = isinstance(error, Exception) or type(error).__name__ == "PanicException"
    return replacement if foreign else error


def _wrong(field: str, what: str, *, hint: str = "") -> ModelError:
    return ModelError(f"{_PREFIX}{field}: {what}", hint=hint)


def _short(value: object) -> str:
    """`value` for a one-line message: metadata may hold megabytes."""
    text = str(value) if isinstance(value, Exception) else repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
