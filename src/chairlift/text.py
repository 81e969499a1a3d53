"""Text for one-line messages: cut to a length, and lists of names that may be long or hostile."""

from __future__ import annotations

from collections.abc import Sequence


def shorten(text: str, most: int) -> str:
    """The text in at most `most` characters; one that is cut ends in "..."."""
    return text if len(text) <= most else text[: most - 3] + "..."


def quoted(value: object, most: int = 80) -> str:
    """The `repr` of a foreign value in at most `most` characters: line breaks are escaped, megabytes are cut."""
    return shorten(repr(value), most)


def quoted_list(names: Sequence[str], most: int = 3) -> str:
    """`most` names, quoted and escaped, and how many more there are: "'a', 'b', 'c' and 2 more"."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(map(repr, names[:most])) + more
