"""API keys: names that may be told, and secrets of which only digests are kept.

Given as `NAME:SECRET` or `SECRET`, by setting or in a file. Two secrets of one name are one key, so that one can
replace the other while both are in use. Nothing here ever shows a secret: not an error, not a repr.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import os
import re
import stat
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from chairlift.errors import ConfigError

log = logging.getLogger(__name__)

LIMITS = "SECRET or NAME:SECRET, where NAME has at most 64 letters, digits and ._- and SECRET visible ASCII characters"

_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
_SECRET = re.compile(r"[!-~]{1,1024}")


@dataclass(frozen=True, slots=True)
class ApiKey:
    """One key. Without a name it is called by its place among all."""

    name: str
    digest: bytes = field(repr=False)  # SHA-256 of the secret

    @classmethod
    def parse(cls, text: str) -> ApiKey:
        """From `SECRET` or `NAME:SECRET`. Raises ValueError, without the text."""
        name, colon, secret = text.partition(":")
        return cls.of(name, secret) if colon else cls("", _digest(_checked(text)))

    @classmethod
    def of(cls, name: str, secret: str) -> ApiKey:
        """A named key. Raises ValueError, without the secret."""
        if _NAME.fullmatch(name) is None:
            raise ValueError("not a name")
        return cls(name, _digest(_checked(secret)))


def _checked(secret: str) -> bytes:
    if _SECRET.fullmatch(secret) is None:
        raise ValueError("not a secret")
    return secret.encode("ascii")


def _digest(secret: bytes) -> bytes:
    return hashlib.sha256(secret).digest()


def read(file: Path) -> list[ApiKey]:
    """The keys of a file: a line `NAME SECRET` or `NAME:SECRET` for each; empty lines and `# ...` are comments.

    Raises ConfigError, which names the line but shows nothing of it. A file that others may read is warned of, since
    mounted secrets often are; one that others may write is refused: they could let themselves in.
    """
    try:
        with file.open(encoding="utf-8") as opened:
            mode = os.fstat(opened.fileno()).st_mode
            lines = opened.read().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise ConfigError(f"--api-key-file: cannot read {file}: {reason}") from None
    if mode & stat.S_IWOTH:
        raise ConfigError(f"--api-key-file: everybody may write {file}", hint=f"chmod o-w {file}")
    if mode & stat.S_IROTH:
        log.warning("every user of this machine may read the API keys in %s: chmod o-r %s", file, file)
    keys = []
    for number, line in enumerate(lines, start=1):
        text = line.strip()
        if text and not text.startswith("#"):
            try:
                keys.append(ApiKey.of(*_split(text)))
            except ValueError:
                raise ConfigError(f"{file} line {number}: not NAME SECRET or NAME:SECRET") from None
    if not keys:
        raise ConfigError(f"--api-key-file: {file} holds no key")
    return keys


def _split(text: str) -> tuple[str, str]:
    """Name and secret: apart by blanks if there are any, else by the first colon."""
    words = text.split(maxsplit=1)
    if len(words) == 2:
        return words[0], words[1]
    name, _, secret = text.partition(":")
    return name, secret


class Keyring:
    """All keys of a server. Those without a name are called key-1, key-2, ... by their place."""

    def __init__(self, keys: Sequence[ApiKey]) -> None:
        """Raises ConfigError when it would not be clear whose a secret or a name is."""
        self._names: dict[bytes, str] = {}
        given = {key.name for key in keys}
        for place, key in enumerate(keys, start=1):
            name = key.name or f"key-{place}"
            if not key.name and name in given:
                raise ConfigError(f"the API key at place {place} has no name, and another is called {name}")
            if key.digest in self._names:
                raise ConfigError(f"the API keys {self._names[key.digest]} and {name} have the same secret")
            self._names[key.digest] = name

    def __len__(self) -> int:
        return len(self._names)

    def name_of(self, secret: bytes) -> str | None:
        """The name of a key; None for one that is not ours. Compares with all of them, each in constant time."""
        digest, found = _digest(secret), None
        for known, name in self._names.items():
            if hmac.compare_digest(known, digest):
                found = name
        return found


def prefix_salt(server_secret: bytes, key_name: str, client_salt: str) -> str:
    """Under what the prefix cache keeps the prompts of one key.

    Made here, of a secret that no client knows; the client's own salt only divides what its key has.
    """
    own = hmac.new(server_secret, key_name.encode(), "sha256").hexdigest()
    return f"{own}:{client_salt}"
