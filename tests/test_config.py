"""Every source of settings, and that nothing is accepted and then ignored."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chairlift import config
from chairlift.config import SETTINGS, Config, load
from chairlift.errors import ConfigError
from chairlift.keys import ApiKey


def refused(flags: dict[str, object] | None = None, environ: dict[str, str] | None = None) -> str:
    with pytest.raises(ConfigError) as caught:
        load(flags, environ or {})
    return str(caught.value)


def toml(tmp_path: Path, text: str) -> str:
    path = tmp_path / "chairlift.toml"
    path.write_text(text)
    return str(path)


def test_defaults_are_the_dataclass() -> None:
    """A parser that changes a value nobody gave."""
    assert load({}, {}) == Config()


def test_flags_beat_environment_beats_file(tmp_path: Path) -> None:
    """Sources merged in the wrong order: an operator's flag overruled by a forgotten file."""
    file = toml(tmp_path, 'port = 1\nhost = "10.0.0.1"\nseed = 7\n')
    environ = {"CHAIRLIFT_CONFIG": file, "CHAIRLIFT_PORT": "2", "CHAIRLIFT_HOST": "10.0.0.2"}
    got = load({"port": "3"}, environ)
    assert (got.port, got.host, got.seed) == (3, "10.0.0.2", 7)


def test_config_flag_beats_config_variable(tmp_path: Path) -> None:
    """--config read beside, or after, the file that the environment names."""
    file = toml(tmp_path, "port = 5\n")
    assert load({"config": file}, {"CHAIRLIFT_CONFIG": "/nowhere"}).port == 5


def test_flags_not_given_are_no_flags(tmp_path: Path) -> None:
    """None from the command line hiding what the environment says."""
    assert load({"port": None, "api_key": []}, {"CHAIRLIFT_PORT": "9", "CHAIRLIFT_API_KEY": "a,b"}) == Config(
        port=9, api_key=(ApiKey.parse("a"), ApiKey.parse("b"))
    )


@pytest.mark.parametrize("name", SETTINGS)
def test_every_setting_is_read_from_every_source(name: str, tmp_path: Path) -> None:
    """A setting that one source forgets, or that is parsed into the wrong field."""
    samples = {
        "cache_dir": "/x", "kv_cache_dtype": "int8", "batching": "static", "backend": "reference", "isa": "avx2",
            "activation_dtype": "int16",
        "cors_origin": "https://example.org", "body_limit_bytes": "8MiB", "kv_memory": "2GiB",
        "memory_utilization": "0.5", "prefix_caching": "false",
    }  # fmt: skip
    sample = samples.get(name, "true" if SETTINGS[name].default is False else "99")
    want = getattr(load({name: sample}, {}), name)
    assert want != getattr(Config(), name)
    assert getattr(load({}, {SETTINGS[name].variable: sample}), name) == want
    raw = sample if sample in ("true", "false", "0.5") or (sample == "99" and isinstance(want, int | float)) else None
    file = toml(tmp_path, f"{name.replace('_', '-')} = {raw or repr(sample)}\n")
    assert getattr(load({"config": file}, {}), name) == want


def test_unknown_names_are_refused_with_the_nearest(tmp_path: Path) -> None:
    """A misspelt setting ignored, so that the server runs with a default the operator did not choose."""
    assert "did you mean max_num_seqs?" in refused({"config": toml(tmp_path, "max_num_seq = 4\n")})
    message = refused({}, {"CHAIRLIFT_MAX_NUM_SEQ": "4"})
    assert "CHAIRLIFT_MAX_NUM_SEQ" in message
    assert "did you mean CHAIRLIFT_MAX_NUM_SEQS?" in message
    assert "nothing_like_it" in refused({"config": toml(tmp_path, "nothing_like_it = 4\n")})


def test_a_key_given_in_both_spellings_is_refused(tmp_path: Path) -> None:
    """One of two contradicting lines of a file silently winning."""
    assert "set twice" in refused({"config": toml(tmp_path, "max-queue = 1\nmax_queue = 2\n")})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("port", "65536"), ("port", "-1"), ("port", "8000.0"), ("port", ""), ("port", "http"),
        ("memory_utilization", "nan"), ("memory_utilization", "inf"), ("memory_utilization", "0"),
        ("memory_utilization", "0.96"),
        ("watchdog_s", "-inf"), ("max_gap_ms", "1e999"), ("max_num_seqs", "0"), ("max_num_seqs", "true"),
        ("kv_memory", "2 GiBs"), ("kv_memory", "-1GiB"), ("kv_memory", "GiB"), ("kv_memory", "1e9"), ("kv_memory", "0"),
        ("kv_cache_dtype", "fp8"), ("batching", "Continuous"), ("isa", "avx9"), ("host", ""), ("host", "a\nb"),
        ("api_key", "with space"), ("api_key", "schlüssel"), ("cors_origin", "example.org"),
        ("served_model_name", "a b"),
        ("strict", "maybe"), ("strict", "2"), ("cache_dir", ""), ("seed", "-1"), ("seed", str(2**63)),
    ],
)  # fmt: skip
def test_values_outside_the_limits_are_refused(name: str, value: str) -> None:
    """NaN passing a range check, a size without a unit taken for something else, an empty word taken for a value."""
    assert SETTINGS[name].kind.limits in refused({name: value})
    message = refused({}, {SETTINGS[name].variable: value})
    assert SETTINGS[name].variable in message
    assert SETTINGS[name].kind.limits in message


def test_a_choice_that_is_gone_leads_to_its_successor() -> None:
    """A server of last month's settings that does not start, and says only that a word is wrong."""
    with pytest.raises(ConfigError) as caught:
        load({}, {"CHAIRLIFT_KV_CACHE_DTYPE": "f16"})
    assert "bf16" in caught.value.hint


@pytest.mark.parametrize(
    "line",
    ["port = true", "port = 8000.0", 'max-num-seqs = "many"', "strict = 1", "memory-utilization = nan", "host = 1",
     "api-key = [1]", "kv-memory = 1.5", "batching = []", "cors-origin = [[]]", "model = {}"],
)  # fmt: skip
def test_toml_values_of_the_wrong_type_are_refused(line: str, tmp_path: Path) -> None:
    """TOML's own types slipping past checks that were written for text (True is 1)."""
    assert line.split(" = ")[0] in refused({"config": toml(tmp_path, line + "\n")})


def test_a_broken_or_missing_file_is_named(tmp_path: Path) -> None:
    """A config file that cannot be read treated as an empty one."""
    assert "not valid TOML" in refused({"config": toml(tmp_path, "port = \n")})
    assert "/nowhere/x.toml" in refused({}, {"CHAIRLIFT_CONFIG": "/nowhere/x.toml"})
    (tmp_path / "latin.toml").write_bytes(b'host = "\xff"')
    assert "latin.toml" in refused({"config": str(tmp_path / "latin.toml")})


def test_keys_never_appear_in_errors() -> None:
    """A secret in a log because its value was refused."""
    assert "hunter 2" not in refused({"api_key": ["hunter 2"]})


@given(st.integers(0, 2**50), st.sampled_from(["", "B", "KB", "MB", "GB", "TB", "KiB", "MiB", "GiB", "TiB"]))
def test_sizes_are_exact(number: int, unit: str) -> None:
    """Decimal and binary units mixed up, or large sizes rounded through a float."""
    base = 1024 if "i" in unit else 1000
    power = 0 if unit in ("", "B") else "KMGT".index(unit[0]) + 1
    assert config.size(0).parse(f"{number}{unit}") == number * base**power


def test_fractional_sizes() -> None:
    """ "1.5GiB" refused, or its fraction dropped."""
    assert config.size(0).parse("1.5GiB") == 3 * 512 * 1024**2


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.9.1", "::1", "[::1]", "localhost"])
def test_loopback_needs_no_key(host: str) -> None:
    """A laptop user forced to invent a key."""
    Config(host=host).require_safe_host()


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.4", "example.org", "localhost.example.org", "127.evil"])
def test_other_hosts_need_a_key_or_plain_words(host: str) -> None:
    """A server open to the network because of one flag."""
    with pytest.raises(ConfigError, match="--allow-open"):
        Config(host=host).require_safe_host()
    Config(host=host, api_key=(ApiKey.parse("secret"),)).require_safe_host()
    Config(host=host, api_key_file=Path("keys")).require_safe_host()
    Config(host=host, allow_open=True).require_safe_host()


def test_config_is_frozen() -> None:
    """A setting patched after the plan was made from it."""
    with pytest.raises(dataclasses.FrozenInstanceError):
        Config().port = 1  # type: ignore[misc]
