"""keys.py: how keys are given, and that no secret is ever shown."""

from __future__ import annotations

import hmac
import logging
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chairlift import keys
from chairlift.config import Config, load
from chairlift.errors import ConfigError
from chairlift.keys import ApiKey, Keyring, prefix_salt

SECRETS = ("hunter-2", "s3cr3t:with:colons", "#hash")


def parsed(*texts: str) -> list[ApiKey]:
    return [ApiKey.parse(text) for text in texts]


def test_names_and_places() -> None:
    """Fault: a key is called by something that a client sent, or two people by one name."""
    ring = Keyring(parsed("first", "bob:second", "third"))
    names = [ring.name_of(secret) for secret in (b"first", b"second", b"third", b"bob:second", b"", b"key-1")]
    assert names == ["key-1", "bob", "key-3", None, None, None]
    assert len(ring) == 3


def test_a_name_may_have_two_secrets_and_no_secret_two_names() -> None:
    """Fault: a key cannot be replaced without an outage; or whose request it is depends on luck."""
    ring = Keyring(parsed("bob:old", "bob:new"))
    assert [ring.name_of(secret) for secret in (b"old", b"new")] == ["bob", "bob"]
    with pytest.raises(ConfigError, match="bob and carol have the same secret"):
        Keyring(parsed("bob:hunter-2", "carol:hunter-2"))
    with pytest.raises(ConfigError, match="place 1 has no name"):
        Keyring(parsed("hunter-2", "key-1:other"))


@pytest.mark.parametrize(
    "text", ["", ":", "bob:", ":zebra", "a b:zebra", "bob:zebra crossing", "zebrä", "x" * 65 + ":zebra"]
)
def test_what_is_no_key_is_refused_without_being_shown(text: str) -> None:
    """Fault: a secret in an error because it was mistyped; or an empty one that lets everybody in."""
    with pytest.raises(ConfigError, match="SECRET or NAME:SECRET") as caught:
        load({"api_key": [text]}, {})
    assert "zebr" not in str(caught.value)


def test_every_key_is_compared_in_constant_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault: the time of an answer tells how many keys there are before the one that fits, or how much of it fits."""
    compared: list[tuple[bytes, bytes]] = []

    def compare(a: bytes, b: bytes) -> bool:
        compared.append((a, b))
        return a == b

    ring = Keyring(parsed("first", "second", "third"))
    monkeypatch.setattr(hmac, "compare_digest", compare)
    for secret in (b"first", b"third", b"none", b""):
        compared.clear()
        ring.name_of(secret)
        assert len(compared) == 3
        assert all(len(a) == len(b) == 32 for a, b in compared)


def test_no_secret_in_any_repr(tmp_path: Path) -> None:
    """Fault: a secret in a traceback, a dump of settings, or memory that outlives the start."""
    file = tmp_path / "keys"
    file.write_text("carol s3cr3t\n")
    file.chmod(0o600)
    config = load({"api_key": ["hunter-2", "bob:hunter-3"], "api_key_file": str(file)}, {})
    assert isinstance(config, Config)
    shown = repr(config) + repr(config.api_key) + repr(vars(config.keyring())) + repr(keys.read(file))
    assert "bob" in shown
    assert "carol" in shown
    for secret in ("hunter", "s3cr3t"):
        assert secret not in shown
    assert not any(isinstance(value, str) and "hunter" in value for key in config.api_key for value in key_values(key))


def key_values(key: ApiKey) -> list[object]:
    return [key.name, key.digest]


# -- files ------------------------------------------------------------------------------------------------------------


def key_file(tmp_path: Path, text: str, mode: int = 0o600) -> Path:
    path = tmp_path / "keys"
    path.write_text(text, encoding="utf-8")
    path.chmod(mode)
    return path


def test_a_file_of_keys(tmp_path: Path) -> None:
    """Fault: a comment taken for a key, a blank for a part of one, or one of the two forms not understood."""
    text = "# the team\n\n  alice   hunter-2  \nbob:s3cr3t:with:colons\ncarol #hash\n\tdave\tx:y\n"
    ring = Keyring(keys.read(key_file(tmp_path, text)))
    assert [ring.name_of(secret.encode()) for secret in (*SECRETS, "x:y")] == ["alice", "bob", "carol", "dave"]


@pytest.mark.parametrize(
    "line", ["hunter-2", "alice two words", ":hunter-2", "alice:", "a/b hunter-2", "alice schlüssel"]
)
def test_a_wrong_line_is_named_and_not_shown(line: str, tmp_path: Path) -> None:
    """Fault: a line that is skipped, so that its owner is locked out; or one that is printed."""
    with pytest.raises(ConfigError) as caught:
        keys.read(key_file(tmp_path, f"# fine\nbob fine\n{line}\n"))
    assert "line 3" in str(caught.value)
    assert "hunter-2" not in str(caught.value)
    assert "schlüssel" not in str(caught.value)


def test_a_file_without_keys_is_no_key(tmp_path: Path) -> None:
    """Fault: an empty file opens the server to everybody."""
    for text in ("", "# nobody yet\n"):
        with pytest.raises(ConfigError, match="holds no key"):
            Config(api_key_file=key_file(tmp_path, text)).keyring()
    with pytest.raises(ConfigError, match="No such file"):
        Config(api_key_file=tmp_path / "nowhere").keyring()
    with pytest.raises(ConfigError, match="Is a directory"):
        Config(api_key_file=tmp_path).keyring()


def test_who_else_may_read_or_write_it(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Fault: a file that every user can read, or worse add to, and nobody says so."""
    keys.read(key_file(tmp_path, "bob hunter-2\n", 0o640))
    assert caplog.text == ""
    with caplog.at_level(logging.WARNING, "chairlift"):
        keys.read(key_file(tmp_path, "bob hunter-2\n", 0o644))
    assert "chmod o-r" in caplog.text
    assert "hunter-2" not in caplog.text
    with pytest.raises(ConfigError, match="chmod o-w"):
        keys.read(key_file(tmp_path, "bob hunter-2\n", 0o602))


def test_settings_that_need_keys() -> None:
    """Fault: a server that isolates or limits by key, and has none."""
    for config in (Config(isolate_keys=True), Config(max_running_per_key=2)):
        with pytest.raises(ConfigError, match="no effect without API keys"):
            config.keyring()
    assert len(Config(isolate_keys=True, api_key=tuple(parsed("a"))).keyring()) == 1


# -- salts ------------------------------------------------------------------------------------------------------------

word = st.text(alphabet=":ab\x00", max_size=6)


@given(word, word, word, word)
def test_salts_of_two_keys_never_meet(key: str, salt: str, other_key: str, other_salt: str) -> None:
    """Fault: a client chooses its salt so that it ends where another's begins."""
    same = prefix_salt(b"secret", key, salt) == prefix_salt(b"secret", other_key, other_salt)
    assert same == ((key, salt) == (other_key, other_salt))


def test_salts_cannot_be_made_outside() -> None:
    """Fault: a salt that is a hash of public things alone."""
    assert prefix_salt(b"one", "bob", "") != prefix_salt(b"another", "bob", "")
