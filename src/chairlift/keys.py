"""API keys: names that logs and errors may show, and secrets of which only digests are kept.

A setting or a file gives keys as `NAME:SECRET` or `SECRET`. Two secrets of one name are one key: a new secret can
replace an old one while both are in use. No error and no repr in this module shows a secret.
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
    """One key. `name` is "" where none was given; the Keyring then names the key by its position."""

    name: str
    digest: bytes = field(repr=False)  # SHA-256 of the secret

    @classmethod
    def parse(cls, text: str) -> ApiKey:
        """From `SECRET` or `NAME:SECRET`. The ValueError for anything else does not repeat the text."""
        name, colon, secret = text.partition(":")
        return cls.of(name, secret) if colon else cls("", _digest(_checked(text)))

    @classmethod
    def of(cls, name: str, secret: str) -> ApiKey:
        """A named key. The ValueError for a malformed one does not repeat the secret."""
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
    """The keys of a file that has a line `NAME SECRET` or `NAME:SECRET` for each, empty lines, and `# comments`.

    Raises ConfigError, which gives the line's number and nothing of its text. A file that every user may write is
    refused, since any of them could add a key. A file that every user may read gets a warning only, since mounted
    secrets often have that mode.
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
    """Name and secret, separated by blanks if the line has any, else by its first colon."""
    words = text.split(maxsplit=1)
    if len(words) == 2:
        return words[0], words[1]
    name, _, secret = text.partition(":")
    return name, secret


class Keyring:
    """All keys of a server. Keys without a name are called key-1, key-2, ... by their position."""

    def __init__(self, keys: Sequence[ApiKey]) -> None:
        """Raises ConfigError when two keys share a secret, or when a given name equals one made from a position."""
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
        """The name of the key with that secret, None if there is none. Compares with every key, in constant time."""
        digest, found = _digest(secret), None
        for known, name in self._names.items():
            if hmac.compare_digest(known, digest):
                found = name
        return found


def prefix_salt(server_secret: bytes, key_name: str, client_salt: str) -> str:
    """The salt under which the prefix cache keeps the prompts of one key.

    `server_secret` keeps clients from making another key's salt. `client_salt` divides the prompts of one key further.
    """
    own = hmac.new(server_secret, key_name.encode(), "sha256").hexdigest()
    return f"{own}:{client_salt}"
