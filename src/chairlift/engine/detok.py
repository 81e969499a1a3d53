"""Token ids to text, one token at a time. Text that was returned is never taken back.

Owns the bytes of a character that is not complete yet. Knows neither stop strings nor when a request ends.
"""

from __future__ import annotations

from collections.abc import Sequence

from chairlift.text import utf8_decoder


class Detokenizer:
    """Incremental UTF-8 over the bytes that tokens stand for.

    All returned texts, joined, equal `b"".join(bytes of the tokens).decode("utf-8", errors="replace")`. Only an
    incomplete tail (at most 3 bytes) is held back; bytes that cannot become a character give U+FFFD at once.
    """

    def __init__(self, vocab_bytes: Sequence[bytes], skip: frozenset[int]) -> None:
        """`vocab_bytes[id]` are the bytes of token `id`; those in `skip` (control tokens) give no text."""
        self._vocab_bytes = vocab_bytes
        self._skip = skip
        self._decoder = utf8_decoder()
        self._has_tail = False  # whether the decoder holds bytes back

    def push(self, token: int) -> str:
        """The text that `token` completes, most often all of its own.

        An id beyond the vocabulary has no text. It can be sampled, since model files pad their output head.
        """
        if token in self._skip or not 0 <= token < len(self._vocab_bytes):
            return ""
        data = self._vocab_bytes[token]
        if not self._has_tail:
            try:
                return data.decode()  # nearly always; the decoder takes several times as long
            except UnicodeDecodeError:
                pass
        text = self._decoder.decode(data)
        self._has_tail = self._decoder.getstate()[0] != b""
        return text

    def flush(self) -> str:
        """The bytes that were held back, as U+FFFD, since nothing follows that could complete them."""
        return self._decoder.decode(b"", final=True)
