"""Text to token ids and back: byte-level BPE on the `tokenizers` library, from a vocabulary that any container gives.

Owns pre-tokenisers, special tokens and the control tokens that end a turn. Knows no container, no chat templates, no
requests and no streaming.

    text ── added tokens cut out ── normalise ── pre-tokenise ── bytes as printable characters ── BPE ── ids
             user-defined: always
             control: only where parse_special is set (a rendered chat template), plain text elsewhere

Bytes that the vocabulary has no token for produce no id, as in the original tokenizers (SmolLM2 lacks 21 of the 256,
all of them control characters or bytes that UTF-8 never holds).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from tokenizers import AddedToken, Regex, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Encoder
from tokenizers.models import BPE

from chairlift.errors import EngineError, ModelError, RequestError
from chairlift.text import clip, quoted

# Control tokens that end a turn or a text in the families we know. Any of them ends a generation.
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
class PreTokenizer:
    """How text is cut before BPE, as the original model's tokenizer does."""

    make: Callable[[], Any]
    make_normalizer: Callable[[], Any] | None = None
    # A piece that is a vocabulary entry as a whole is that token, whether or not the merges lead there.
    ignore_merges: bool = False


def _byte_level(*, use_regex: bool) -> Any:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=use_regex)


def _gpt2() -> Any:
    return _byte_level(use_regex=True)


def _smollm() -> Any:
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _byte_level(use_regex=True)])


def _split(pattern: str) -> Any:
    pieces = pre_tokenizers.Split(Regex(pattern), behavior="isolated", invert=False)
    return pre_tokenizers.Sequence([pieces, _byte_level(use_regex=False)])


GPT2 = PreTokenizer(_gpt2)
SMOLLM = PreTokenizer(_smollm)
LLAMA3 = PreTokenizer(lambda: _split(_LLAMA3_SPLIT), ignore_merges=True)
QWEN2 = PreTokenizer(lambda: _split(_QWEN2_SPLIT), normalizers.NFC)

VocabularyPart = Literal["tokens", "control", "merges", "bos_id"]


class VocabularyError(ModelError):
    """A vocabulary that contradicts itself. `part` is a field of `Vocabulary`, which a container's reader knows by
    another name."""

    def __init__(self, part: VocabularyPart, what: str) -> None:
        super().__init__(f"{part}: {what}")
        self.part = part
        self.what = what


@dataclass(frozen=True)
class Vocabulary:
    """A byte-level BPE vocabulary, as any container describes it. An id is an index into `tokens`."""

    tokens: Sequence[str]  # in GPT-2's byte alphabet; control and user-defined ones as they are written
    merges: Sequence[tuple[str, str]]  # best first
    pre_tokenizer: PreTokenizer
    control: Sequence[int] = ()  # ids that give no text, and that a user's text never turns into
    user_defined: Sequence[int] = ()  # ids that are found in any text, whole
    bos_id: int | None = None
    add_bos: bool = False  # prompts of the model begin with BOS
    eos_ids: frozenset[int] = frozenset()  # those that the container names; known end-of-turn tokens are added
    special_tokens: Mapping[str, str] = field(default_factory=dict)  # names in chat templates ("bos_token") -> text


class Tokenizer:
    """One model's tokenizer; immutable once built, so any number of threads may use it at once.

    `vocab_bytes[id]` are the bytes an id stands for; `special_ids` are control tokens, which give no text to a reader;
    `eos_ids` end a generation; `bos_id` is None where the model names none; `add_bos` says whether its prompts begin
    with it; `special_tokens` maps the names that chat templates use (`bos_token`, `eos_token`, ...) to their text.

    Raises VocabularyError for a vocabulary that contradicts itself.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        added = {*vocabulary.control, *vocabulary.user_defined}
        known = {i for i in added if vocabulary.tokens[i] in _END_OF_TURN}
        self.vocab_bytes: tuple[bytes, ...] = tuple(
            _token_bytes(token, is_added=i in added) for i, token in enumerate(vocabulary.tokens)
        )
        self.vocab_size: int = len(vocabulary.tokens)
        self.special_ids: frozenset[int] = frozenset(vocabulary.control)
        self.eos_ids: frozenset[int] = vocabulary.eos_ids | known
        self.bos_id: int | None = vocabulary.bos_id
        self.add_bos: bool = vocabulary.add_bos
        self.special_tokens: dict[str, str] = dict(vocabulary.special_tokens)
        if self.add_bos and self.bos_id is None:
            raise VocabularyError("bos_id", "missing, though prompts of this model begin with that token")
        self._parsing, self._plain = _encoders(vocabulary)

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

    def decode(self, ids: Sequence[int]) -> str:
        """The text of `ids`; bytes that are no UTF-8 become U+FFFD. Raises RequestError for an id out of range."""
        return b"".join(self.vocab_bytes[self._checked(i)] for i in ids).decode("utf-8", "replace")

    def _checked(self, token_id: int) -> int:
        if not 0 <= token_id < self.vocab_size:
            raise RequestError(f"token id {token_id} is outside the vocabulary of {self.vocab_size}")
        return token_id


def _encoders(vocabulary: Vocabulary) -> tuple[Encoder, Encoder]:
    """Two encoders: the first reads control tokens in text, the second takes them for plain text.

    One encoder that is switched to and fro would race between threads.
    """
    tokens, merges = vocabulary.tokens, vocabulary.merges
    ids = _ids(tokens)
    spelt = _spelt_by_text(vocabulary)
    try:
        model = _bpe(vocabulary, ids, merges)
        plain_model = model
        if spelt:
            plain_ids = {token: i for token, i in ids.items() if token not in spelt}
            plain_model = _bpe(vocabulary, plain_ids, [(a, b) for a, b in merges if not spelt & {a, b, a + b}])
        return _encoder(vocabulary, model, vocabulary.control), _encoder(vocabulary, plain_model, ())
    except BaseException as error:
        # The library's own words name the merge or token that it could not take.
        what = f"do not belong to these tokens: {clip(str(error), 80)}"
        raise _ours(error, VocabularyError("merges", what)) from None


def _ids(tokens: Sequence[str]) -> dict[str, int]:
    ids = {token: i for i, token in enumerate(tokens)}
    if len(ids) != len(tokens):
        twice = next(token for i, token in enumerate(tokens) if ids[token] != i)
        raise VocabularyError("tokens", f"{quoted(twice)} is there twice")
    return ids


def _bpe(vocabulary: Vocabulary, ids: dict[str, int], merges: Sequence[tuple[str, str]]) -> BPE:
    return BPE(vocab=ids, merges=list(merges), ignore_merges=vocabulary.pre_tokenizer.ignore_merges)


def _encoder(vocabulary: Vocabulary, model: BPE, control: Sequence[int]) -> Encoder:
    encoder = Encoder(model)
    encoder.pre_tokenizer = vocabulary.pre_tokenizer.make()
    if vocabulary.pre_tokenizer.make_normalizer is not None:
        encoder.normalizer = vocabulary.pre_tokenizer.make_normalizer()
    # An added token whose text the model's vocabulary holds gets its id from there. One call each: the library builds
    # its search automaton anew in every call.
    encoder.add_special_tokens(_added(vocabulary, control, special=True))
    encoder.add_tokens(_added(vocabulary, vocabulary.user_defined, special=False))
    return encoder


def _added(vocabulary: Vocabulary, ids: Iterable[int], *, special: bool) -> list[AddedToken]:
    texts = (vocabulary.tokens[i] for i in ids)
    return [AddedToken(text, special=special, normalized=False) for text in texts if text]


def _spelt_by_text(vocabulary: Vocabulary) -> frozenset[str]:
    """The control tokens that BPE would make from ordinary text: a user's text must never gain their power."""
    control = [vocabulary.tokens[i] for i in vocabulary.control]
    byte = next((text for text in control if len(text) == 1 and text in _BYTE_OF), None)
    if byte is not None:
        raise VocabularyError("control", f"{quoted(byte)} is a control token and also one byte of ordinary text")
    merged = {left + right for left, right in vocabulary.merges}
    cut = vocabulary.pre_tokenizer
    return frozenset(text for text in control if text in merged or (cut.ignore_merges and _is_one_piece(cut, text)))


def _is_one_piece(cut: PreTokenizer, token: str) -> bool:
    """Whether the pre-tokeniser makes `token` of the text that BPE would have to find there."""
    try:
        text = bytes(_BYTE_OF[char] for char in token).decode("utf-8")
    except (KeyError, UnicodeDecodeError):
        return False
    return [piece for piece, _ in cut.make().pre_tokenize_str(text)] == [token]


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's printable character for each byte, inverted: printable Latin-1 is itself, the rest is U+0100 onwards."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


_BYTE_OF = _byte_alphabet()
# Latin-1 characters outside the alphabet go where encoding to Latin-1 fails, so that such a token is seen.
_TO_LATIN1 = dict.fromkeys(range(256), 0xFFFF) | {ord(char): byte for char, byte in _BYTE_OF.items()}


def _token_bytes(token: str, *, is_added: bool) -> bytes:
    """The bytes of one token: an added token's own UTF-8, else through the byte alphabet where the text is of it."""
    if is_added:
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
