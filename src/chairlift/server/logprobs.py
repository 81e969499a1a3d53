"""Log-probabilities as the two endpoints write them: natural logs, with the raw bytes of every token."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from chairlift.engine.request import TokenLogprob
from chairlift.models.tokenizer import Tokenizer
from chairlift.text import utf8_decoder

Entries = Sequence[TokenLogprob | None]
"""One per token; None for a prompt's first token, which nothing predicts."""


def token_name(tokenizer: Tokenizer, token: int) -> str:
    """The token's text; `bytes:\\xf0\\x9f` for one that is only part of a character, as OpenAI writes it."""
    raw = _bytes_of(tokenizer, token)
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def _bytes_of(tokenizer: Tokenizer, token: int) -> bytes:
    """None for an id beyond the vocabulary: model files pad their output head, and such an id may rank."""
    return tokenizer.vocab_bytes[token] if token < tokenizer.vocab_size else b""


def chat_logprobs(tokenizer: Tokenizer, entries: Iterable[TokenLogprob]) -> dict[str, Any]:
    """`choices[].logprobs` of a chat completion."""

    def item(token: int, logprob: float) -> dict[str, Any]:
        raw = _bytes_of(tokenizer, token)
        return {"token": token_name(tokenizer, token), "logprob": logprob, "bytes": list(raw)}

    content = [
        {**item(entry.token, entry.logprob), "top_logprobs": [item(token, logprob) for token, logprob in entry.top]}
        for entry in entries
    ]
    return {"content": content, "refusal": None}


class CompletionLogprobs:
    """`choices[].logprobs` of one completion, piece by piece: it remembers where in the text it stands."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._decoder = utf8_decoder()
        self._num_chars = 0

    def piece(self, entries: Sequence[TokenLogprob]) -> dict[str, Any]:
        """The next output tokens' entries. Control tokens have no text there."""
        tokens = [entry.token for entry in entries]
        return self._piece(tokens, entries, [token in self._tokenizer.special_ids for token in tokens])

    def echo(self, text: str, tokens: Sequence[int], entries: Entries) -> dict[str, Any]:
        """A prompt's entries. Control tokens are part of its text, but for one that the server put first."""
        first = token_name(self._tokenizer, tokens[0])
        is_added = tokens[0] in self._tokenizer.special_ids and not text.startswith(first)
        made = self._piece(tokens, entries, [is_added, *[False] * (len(tokens) - 1)])
        self._decoder.reset()
        self._num_chars = len(text)
        return made

    def _piece(self, tokens: Sequence[int], entries: Entries, silent: Sequence[bool]) -> dict[str, Any]:
        """Entries of tokens, some of which have no text."""
        return {
            "tokens": [token_name(self._tokenizer, token) for token in tokens],
            "token_logprobs": [None if entry is None else entry.logprob for entry in entries],
            "top_logprobs": [None if entry is None else self._top(entry) for entry in entries],
            "text_offset": [self._offset(token, is_silent) for token, is_silent in zip(tokens, silent, strict=True)],
        }

    def _offset(self, token: int, is_silent: bool) -> int:
        """Where the token's text begins, in characters."""
        offset = self._num_chars
        if not is_silent:
            self._num_chars += len(self._decoder.decode(_bytes_of(self._tokenizer, token)))
        return offset

    def _top(self, entry: TokenLogprob) -> dict[str, float]:
        """The likeliest tokens and the chosen one. Two tokens of one spelling share a key; the likelier keeps it."""
        top: dict[str, float] = {}
        for token, logprob in (*entry.top, (entry.token, entry.logprob)):
            top.setdefault(token_name(self._tokenizer, token), logprob)
        return top


def prompt_logprobs(tokenizer: Tokenizer, entries: Entries) -> list[dict[str, Any] | None]:
    """vLLM's `prompt_logprobs`: for each prompt token a map from token id to its log-probability, rank and text."""
    return [None if entry is None else _ranked(tokenizer, entry) for entry in entries]


def _ranked(tokenizer: Tokenizer, entry: TokenLogprob) -> dict[str, Any]:
    ranks = {token: rank for rank, (token, _) in enumerate(entry.top, start=1)}
    both = dict([(entry.token, entry.logprob), *entry.top])
    return {
        str(token): {"logprob": logprob, "rank": ranks.get(token), "decoded_token": token_name(tokenizer, token)}
        for token, logprob in both.items()
    }
