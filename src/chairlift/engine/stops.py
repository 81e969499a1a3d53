r"""Stop strings in a text that arrives in parts: what may be sent, and where the text ends.

    sent | held back                     held: the longest suffix that is a proper prefix of some stop
    "lazy|\nUs"      stop "\nUser:"      "\nUsual" would be sent whole; "\nUser:" never

The result depends on the text alone, never on how it was cut into parts. The stop that is complete first ends the text;
of several that are complete at the same character, the longest does, since it starts first.
"""

from __future__ import annotations

from collections.abc import Sequence


class StopMatcher:
    """Finds the first stop string. Returns no character of it, and holds back no more than it must."""

    def __init__(self, stops: Sequence[str]) -> None:
        """Raises ValueError for an empty stop, which would end every text at its start."""
        if not all(stops):
            raise ValueError("a stop string is empty")
        self._automata = [_Automaton(stop) for stop in stops]
        self._held = ""
        self.matched: str | None = None
        """The stop that ended the text, once one has."""

    def push(self, text: str) -> str:
        """The text that may be sent after `text` arrived; nothing once a stop has matched."""
        if self.matched is not None:
            return ""
        if not self._automata:
            return text
        seen = self._held + text
        for end, char in enumerate(text, start=len(self._held) + 1):
            stop = self._advance(char)
            if stop is not None:
                self.matched = stop
                self._held = ""
                return seen[: end - len(stop)]
        num_safe = len(seen) - max(automaton.num_matched for automaton in self._automata)
        self._held = seen[num_safe:]
        return seen[:num_safe]

    def flush(self) -> str:
        """The text that was held back, since nothing follows any more; nothing when a stop has matched."""
        held, self._held = self._held, ""
        return held

    def _advance(self, char: str) -> str | None:
        """Feeds one character to every automaton; the longest stop that it completes."""
        longest: str | None = None
        for automaton in self._automata:
            automaton.feed(char)
            if automaton.is_complete and (longest is None or len(automaton.stop) > len(longest)):
                longest = automaton.stop
        return longest


class _Automaton:
    """Knuth-Morris-Pratt for one stop: linear in the text, whatever the stop looks like."""

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self.num_matched = 0  # characters at the end of the text that equal the start of the stop
        self._fallback = _borders(stop)

    @property
    def is_complete(self) -> bool:
        """Whether the text ends with the whole stop."""
        return self.num_matched == len(self.stop)

    def feed(self, char: str) -> None:
        """One more character of the text. Not to be called once complete."""
        n = self.num_matched
        while n and self.stop[n] != char:
            n = self._fallback[n - 1]
        self.num_matched = n + 1 if self.stop[n] == char else 0


def _borders(stop: str) -> list[int]:
    """For each prefix of `stop`, the length of its longest proper prefix that is also its suffix."""
    borders = [0] * len(stop)
    n = 0
    for i in range(1, len(stop)):
        while n and stop[n] != stop[i]:
            n = borders[n - 1]
        if stop[n] == stop[i]:
            n += 1
        borders[i] = n
    return borders
