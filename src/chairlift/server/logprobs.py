"""Log-probabilities as the two endpoints write them: natural logs, with the raw bytes of every token."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from chairlift.engine.sampling_params import TokenLogprob
from chairlift.models.tokenizer import Tokenizer
from chairlift.server.responses import ChatLogprobs, PromptLogprobs, RankedToken, TextLogprobs, TopLogprob
from chairlift.text import utf8_decoder

Entries = Sequence[TokenLogprob | None]
"""One per token; None for a prompt's first token, which nothing predicts."""


def token_name(tokenizer: Tokenizer, token: int) -> str:
    """The token's text, or `bytes:\\xf0\\x9f` for a part of a character, as OpenAI writes it."""
    raw = _bytes_of(tokenizer, token)
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def _bytes_of(tokenizer: Tokenizer, token: int) -> bytes:
    """Empty for an id beyond the vocabulary: model files pad their output head, and such an id may rank."""
    return tokenizer.vocab_bytes[token] if token < tokenizer.vocab_size else b""


def chat_logprobs(tokenizer: Tokenizer, entries: Iterable[TokenLogprob]) -> ChatLogprobs:
    """`choices[].logprobs` of a chat."""

    def item(token: int, logprob: float) -> TopLogprob:
        raw = _bytes_of(tokenizer, token)
        return {"token": token_name(tokenizer, token), "logprob": logprob, "bytes": list(raw)}

    return {
        "content": [
            {**item(entry.token, entry.logprob), "top_logprobs": [item(token, logprob) for token, logprob in entry.top]}
            for entry in entries
        ],
        "refusal": None,
    }


class TextLogprobsBuilder:
    """`choices[].logprobs` of one text, part by part. Remembers its place in the text, for `text_offset`."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._decoder = utf8_decoder()
        self._num_chars = 0

    def output(self, entries: Sequence[TokenLogprob]) -> TextLogprobs:
        """The entries of the next output tokens. Control tokens have no text there."""
        tokens = [entry.token for entry in entries]
        return self._part(tokens, entries, [token in self._tokenizer.special_ids for token in tokens])

    def prompt(self, text: str, tokens: Sequence[int], entries: Entries) -> TextLogprobs:
        """The entries of an echoed prompt. Its control tokens have text, except a first token that the server added."""
        first = token_name(self._tokenizer, tokens[0])
        is_added = tokens[0] in self._tokenizer.special_ids and not text.startswith(first)
        made = self._part(tokens, entries, [is_added, *[False] * (len(tokens) - 1)])
        self._decoder.reset()
        self._num_chars = len(text)
        return made

    def _part(self, tokens: Sequence[int], entries: Entries, silent: Sequence[bool]) -> TextLogprobs:
        """`silent[i]` says that token i has no text."""
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
        """The likeliest tokens and the chosen one. Where two tokens have one spelling, the likelier is kept."""
        top: dict[str, float] = {}
        for token, logprob in (*entry.top, (entry.token, entry.logprob)):
            top.setdefault(token_name(self._tokenizer, token), logprob)
        return top


def joined(a: TextLogprobs, b: TextLogprobs) -> TextLogprobs:
    """The entries of `a`, then those of `b`."""
    return {
        "tokens": a["tokens"] + b["tokens"],
        "token_logprobs": a["token_logprobs"] + b["token_logprobs"],
        "top_logprobs": a["top_logprobs"] + b["top_logprobs"],
        "text_offset": a["text_offset"] + b["text_offset"],
    }


def prompt_logprobs(tokenizer: Tokenizer, entries: Entries) -> PromptLogprobs:
    """vLLM's `prompt_logprobs`: for each prompt token, log-probability, rank and text of it and of likely others."""
    return [None if entry is None else _ranked(tokenizer, entry) for entry in entries]


def _ranked(tokenizer: Tokenizer, entry: TokenLogprob) -> dict[str, RankedToken]:
    """By token id."""
    ranks = {token: rank for rank, (token, _) in enumerate(entry.top, start=1)}
    both = dict([(entry.token, entry.logprob), *entry.top])
    return {
        str(token): {"logprob": logprob, "rank": ranks.get(token), "decoded_token": token_name(tokenizer, token)}
        for token, logprob in both.items()
    }
