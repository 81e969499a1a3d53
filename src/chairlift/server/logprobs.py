"""Log-probabilities as the two endpoints write them: natural logs, with the raw bytes of every token."""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence
from typing import Any

from chairlift.engine.request import TokenLogprob
from chairlift.models.tokenizer import Tokenizer

Entries = Sequence[TokenLogprob | None]
"""One per token; None for a prompt's first token, which nothing predicts."""


def token_name(tokenizer: Tokenizer, token: int) -> str:
    """The token's text; `bytes:\\xf0\\x9f` for one that is only part of a character, as OpenAI writes it."""
    raw = tokenizer.vocab_bytes[token]
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def chat_logprobs(tokenizer: Tokenizer, entries: Iterable[TokenLogprob]) -> dict[str, Any]:
    """`choices[].logprobs` of a chat completion."""

    def item(token: int, logprob: float) -> dict[str, Any]:
        raw = tokenizer.vocab_bytes[token]
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
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._num_chars = 0

    def piece(self, tokens: Sequence[int], entries: Entries) -> dict[str, Any]:
        """The next tokens' entries."""
        return {
            "tokens": [token_name(self._tokenizer, token) for token in tokens],
            "token_logprobs": [None if entry is None else entry.logprob for entry in entries],
            "top_logprobs": [None if entry is None else self._top(entry) for entry in entries],
            "text_offset": [self._offset(token) for token in tokens],
        }

    def _offset(self, token: int) -> int:
        """Where the token's text begins, in characters; control tokens have none."""
        offset = self._num_chars
        if token not in self._tokenizer.special_ids:
            self._num_chars += len(self._decoder.decode(self._tokenizer.vocab_bytes[token]))
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
