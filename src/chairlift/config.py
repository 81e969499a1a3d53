"""What the user asked for: one frozen Config, read from flags, CHAIRLIFT_* variables and a TOML file.

Owns the names, limits, defaults and help of every setting. The parsers, `--help` and docs/configuration.md (printed by
`python -m chairlift.config`) all come from one table, the dataclass Config. The only reader of the environment. Knows
nothing of the machine or the model: the Plan decides what they can honour.

    flags  >  environment  >  file  >  defaults       a value that cannot be honoured is a ConfigError, never ignored
"""

from __future__ import annotations

import difflib
import ipaddress
import os
import re
import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

from chairlift import keys
from chairlift.errors import ConfigError
from chairlift.kernels.backends import BACKENDS
from chairlift.keys import ApiKey, Keyring

ENV_PREFIX = "CHAIRLIFT_"
MAX_MEMORY_UTILIZATION = 0.95
CONFIG_VARIABLE = ENV_PREFIX + "CONFIG"

_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12} | {
    f"{prefix}iB": 1024**power for power, prefix in enumerate("KMGT", start=1)
}


@dataclass(frozen=True, slots=True)
class Kind:
    """How a setting is read. `parse` takes text or a TOML value and raises ValueError when it is outside `limits`."""

    parse: Callable[[object], Any]
    limits: str
    metavar: str
    choices: tuple[str, ...] = ()
    hint: str = ""


def whole(low: int, high: int) -> Kind:
    """A whole number in [low, high]."""

    def parse(value: object) -> int:
        if isinstance(value, bool) or not isinstance(value, int | str):
            raise ValueError
        number = int(value)
        if not low <= number <= high:
            raise ValueError
        return number

    return Kind(parse, f"a whole number from {low} to {high}", "N")


def real(low: float, high: float) -> Kind:
    """A number in [low, high]; NaN is in no interval."""

    def parse(value: object) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float | str):
            raise ValueError
        number = float(value)
        if not low <= number <= high:
            raise ValueError
        return number

    return Kind(parse, f"a number from {low:g} to {high:g}", "X")


def size(low: int) -> Kind:
    """Bytes: a whole number, or a number with one of the units B, KB, MB, GB, TB, KiB, MiB, GiB, TiB."""

    def parse(value: object) -> int:
        if isinstance(value, bool) or not isinstance(value, int | str):
            raise ValueError
        found = re.fullmatch(r"(\d+(?:\.\d+)?) ?([KMGT]i?B|B|)", str(value).strip())
        if found is None:
            raise ValueError
        number = int(float(found[1]) * _UNITS[found[2]]) if "." in found[1] else int(found[1]) * _UNITS[found[2]]
        if number < low:
            raise ValueError
        return number

    return Kind(parse, f'a size like "2GiB", "512MB" or plain bytes, at least {low}', "SIZE")


def text(limits: str = "text that is not empty", pattern: str = r"[^\x00-\x1f\x7f]+") -> Kind:
    """Text of one line that matches the pattern."""

    def parse(value: object) -> str:
        if not isinstance(value, str) or re.fullmatch(pattern, value) is None:
            raise ValueError
        return value

    return Kind(parse, limits, "TEXT")


def one_of(*choices: str, hint: str = "") -> Kind:
    """One of these words. The error for any other word carries the hint."""

    def parse(value: object) -> str:
        if value not in choices:
            raise ValueError
        return str(value)

    return Kind(parse, "one of " + ", ".join(choices), "WORD", choices, hint)


def path() -> Kind:
    """A path; a leading ~ is the home directory."""

    def parse(value: object) -> Path:
        if not isinstance(value, str | Path) or not str(value):
            raise ValueError
        try:
            return Path(value).expanduser()
        except RuntimeError:  # no such home
            raise ValueError from None

    return Kind(parse, "a path", "PATH")


def key() -> Kind:
    """An API key, of which only a digest is kept."""

    def parse(value: object) -> ApiKey:
        if not isinstance(value, str):
            raise ValueError
        return ApiKey.parse(value)

    return Kind(parse, keys.LIMITS, "KEY")


def switch() -> Kind:
    """On or off."""
    words = {"true": True, "on": True, "yes": True, "1": True, "false": False, "off": False, "no": False, "0": False}

    def parse(value: object) -> bool:
        if isinstance(value, bool):
            return value
        if not isinstance(value, str) or value.lower() not in words:
            raise ValueError
        return words[value.lower()]

    return Kind(parse, "true or false", "")


@dataclass(frozen=True, slots=True)
class Setting:
    """One row of the table: everything that help, docs and parsers say about one field."""

    name: str
    group: str
    kind: Kind
    help: str
    default: Any
    default_text: str
    repeat: bool  # a flag that may be given again; a list in TOML, commas in the environment
    secret: bool  # its value never appears in an error

    @property
    def flag(self) -> str:
        """How it is written on the command line."""
        dashed = self.name.replace("_", "-")
        return f"--no-{dashed}" if self.default is True else f"--{dashed}"

    @property
    def variable(self) -> str:
        """Its environment variable."""
        return ENV_PREFIX + self.name.upper()

    def parse(self, value: object, source: str) -> Any:
        """The value as Config holds it; ConfigError names the source, the value and the limits."""
        try:
            if not self.repeat:
                return self.kind.parse(value)
            items = value if isinstance(value, list | tuple) else [value]
            return tuple(self.kind.parse(item) for item in items)
        except (ValueError, OverflowError):
            shown = "its value" if self.secret else repr(value)
            raise ConfigError(f"{source}: {shown} is not {self.kind.limits}", hint=self.kind.hint) from None


def _setting(group: str) -> Callable[..., Any]:
    """A maker of rows for one group of settings."""

    def row(
        default: object, kind: Kind, help: str, shown: str = "", *, repeat: bool = False, secret: bool = False
    ) -> object:
        facts = {"kind": kind, "group": group, "help": help, "default_text": shown, "repeat": repeat, "secret": secret}
        return field(default=default, metadata=facts)

    return row


_model, _server, _memory, _scheduling, _machine = map(
    _setting, ("Model", "Server", "Context and memory", "Scheduling", "Machine")
)

_NAME = text("text without spaces", r"[^\s\x00-\x1f\x7f]+")
_ORIGIN = text("* or an origin like https://example.org", r"\*|https?://[^\s/,]+")


def _cache() -> Path:
    """The default folder of fetched models. The user of a service may have no home."""
    try:
        return Path("~/.cache/chairlift").expanduser()
    except RuntimeError:
        return Path("/var/cache/chairlift")


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """Every setting, as asked for. None leaves the choice to the Plan."""

    model: str = _model("smollm2", text(), "A packaged model (`chairlift models`) or the path of a GGUF file.")
    cache_dir: Path = _model(_cache(), path(), "Where fetched models lie.", "~/.cache/chairlift")  # noqa: RUF009
    seed: int | None = _model(
        None, whole(0, 2**63 - 1), "Seed of requests that bring none.", "each such request draws its own"
    )

    host: str = _server("127.0.0.1", text(), "Address to listen on; beyond loopback an API key is required.")
    port: int = _server(8000, whole(0, 65535), "Port to listen on; 0 picks a free one.")
    served_model_name: tuple[str, ...] = _server(
        (), _NAME, "Name that clients ask for; give it again for aliases.", "the model's own", repeat=True
    )
    api_key: tuple[ApiKey, ...] = _server(
        (), key(), "Key that clients must send; give it again for more keys.", "none", repeat=True, secret=True
    )
    api_key_file: Path | None = _server(  # noqa: RUF009
        None, path(), "File of more keys, a line `NAME SECRET` for each: unlike a flag, others cannot see it.", "none"
    )
    max_running_per_key: int | None = _server(
        None,
        whole(1, 1024),
        "Most requests of one API key that run at once. Further ones wait, and other keys go before them.",
        "all slots",
    )
    isolate_keys: bool = _server(
        False,
        switch(),
        "Never reuse the KV of one API key's prompts for another's, so that no key can find out what another asked.",
    )
    allow_open: bool = _server(False, switch(), "Listen beyond loopback without any API key.")
    cors_origin: tuple[str, ...] = _server(
        (), _ORIGIN, "Origin of web pages that may call the API; give it again for more.", "none", repeat=True
    )
    strict: bool = _server(False, switch(), "Refuse requests with unknown fields, instead of naming these.")
    body_limit_bytes: int = _server(4 * 1024**2, size(1024), "Largest request body.", "4MiB")
    watchdog_s: float = _server(
        30.0, real(0.1, 86400), "Seconds with work but no finished step until /health says stalled."
    )
    drain_seconds: float = _server(30.0, real(0, 86400), "Seconds that running requests get to finish after SIGTERM.")
    log_json: bool = _server(False, switch(), "Write log lines as JSON.")

    max_model_len: int | None = _memory(
        None,
        whole(16, 2**24),
        "Most tokens of one request, prompt and answer together.",
        "the model's, at most 8192, at most what memory holds",
    )
    kv_memory: int | None = _memory(
        None, size(1), "Size of the KV pool.", "1,024 tokens a slot, at least one full context"
    )
    memory_utilization: float = _memory(
        0.6,
        real(0.01, MAX_MEMORY_UTILIZATION),
        "Largest share of the memory left after the weights that the KV pool may take.",
    )
    kv_cache_dtype: Literal["auto", "bf16", "int8"] = _memory(
        "auto",
        one_of("auto", "bf16", "int8", hint="bf16 has taken the place of f16: as many bytes, and faster"),
        "Type of cached keys and values. auto is bf16; int8 takes half the memory.",
    )
    prefix_caching: bool = _memory(
        True, switch(), "Never reuse the KV of equal prompt beginnings; in TOML `prefix-caching = false`.", "reuse"
    )

    max_num_seqs: int | None = _scheduling(
        None, whole(1, 1024), "Slots: requests that run at once.", "20, or what memory carries at full context"
    )
    max_num_batched_tokens: int | None = _scheduling(
        None,
        whole(1, 65536),
        "Most tokens of one step; below the number of slots it lowers the slots.",
        "64 a thread, from 128 to 1,024; at least the slots",
    )
    max_queue: int | None = _scheduling(
        None, whole(0, 100_000), "Requests that may wait; one more gets a 503.", "2 x slots"
    )
    max_queue_wait: float | None = _scheduling(
        None, real(0.1, 86400), "Seconds after which a request that still waits gets that 503.", "no limit"
    )
    batching: Literal["continuous", "static", "serial"] = _scheduling(
        "continuous",
        one_of("continuous", "static", "serial"),
        "How requests share steps; the last two exist to be measured against.",
    )
    max_gap_ms: float | None = _scheduling(
        None,
        real(1, 60_000),
        "Longest step in ms while a request generates: the longest gap in a stream.",
        "the larger of 100 and twice a step without prompts",
    )

    threads: int | None = _machine(
        None, whole(1, 1024), "Compute threads.", "cores that affinity and cgroup quota leave"
    )
    backend: str = _machine(
        "native", one_of(*BACKENDS), "The compiled kernels, or their specification in numpy, which is slow."
    )
    isa: str | None = _machine(
        None,
        one_of("portable", "avx2", "avx2_vnni", "avx512", "avx512_bf16"),
        "Instruction set to use.",
        "the fastest this processor has",
    )
    activation_dtype: Literal["int8", "int16"] = _machine(
        "int8",
        one_of("int8", "int16"),
        "Rounding of what quantised weights multiply: int8, with 16 bits where most would be lost; int16 is as good as "
        "float32, at up to twice the time.",
    )

    def require_safe_host(self) -> None:
        """Raises ConfigError for a server without keys that other machines can reach, unless that was asked for."""
        if self.api_key or self.api_key_file or self.allow_open or _is_loopback(self.host):
            return
        raise ConfigError(
            f"--host {self.host} lets other machines in, and no API key is set",
            hint="add --api-key KEY, or --allow-open if anybody who reaches this address may use it",
        )

    def keyring(self) -> Keyring:
        """All API keys, those of the file too.

        Raises ConfigError when the file cannot be used, and for a setting that has no effect without keys.
        """
        ring = Keyring([*self.api_key, *(keys.read(self.api_key_file) if self.api_key_file else ())])
        for name in ("max_running_per_key", "isolate_keys"):
            if getattr(self, name) and not ring:
                raise ConfigError(f"{SETTINGS[name].flag} has no effect without API keys", hint="add --api-key KEY")
        return ring


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def _rows() -> Iterator[Setting]:
    for row in fields(Config):
        assert row.default is not MISSING
        shown = row.metadata["default_text"] or _show(row.default)
        yield Setting(name=row.name, default=row.default, **{**row.metadata, "default_text": shown})


def _show(value: object) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return f"{value:g}" if isinstance(value, float) else str(value)


SETTINGS: dict[str, Setting] = {row.name: row for row in _rows()}
"""Every setting by field name, in the order of the table."""


def load(flags: Mapping[str, object] | None = None, environ: Mapping[str, str] | None = None) -> Config:
    """The Config from all sources.

    `flags` is keyed by field name; a value of None or an empty list was not given. It may hold `config`, the TOML file.
    `environ` stands in for the process's environment in tests. Raises ConfigError.
    """
    given = {name: value for name, value in (flags or {}).items() if value is not None and value not in ([], ())}
    env = os.environ if environ is None else environ
    file, source = given.pop("config", None), "--config"
    if file is None:
        file, source = env.get(CONFIG_VARIABLE), CONFIG_VARIABLE
    values = {} if file is None else _from_file(str(file), source)
    values |= _from_environment(env)
    values |= {name: _known(name, "flag").parse(value, SETTINGS[name].flag) for name, value in given.items()}
    return Config(**values)


def environment_without_settings(environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment without our variables: for a server that takes its settings from its command line alone."""
    env = os.environ if environ is None else environ
    ours = ("NOTIFY_SOCKET", *(name for name in env if name.startswith(ENV_PREFIX)))
    return {name: value for name, value in env.items() if name not in ours}


def notify_socket(environ: Mapping[str, str] | None = None) -> str | None:
    """The socket on which a service manager waits for readiness (sd_notify(3)); None when there is none."""
    return (os.environ if environ is None else environ).get("NOTIFY_SOCKET")


def _from_file(file: str, source: str) -> dict[str, Any]:
    try:
        table = tomllib.loads(Path(file).expanduser().read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{source}: cannot read {file}: {error}") from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{file} is not valid TOML: {error}") from None
    values: dict[str, Any] = {}
    for key, value in table.items():
        name = key.replace("-", "_")
        if name in values:
            raise ConfigError(f"{file}: {key} is set twice")
        values[name] = _known(name, file).parse(value, f"{file}: {key}")
    return values


def _from_environment(env: Mapping[str, str]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for variable, value in env.items():
        if not variable.startswith(ENV_PREFIX) or variable == CONFIG_VARIABLE:
            continue
        name = variable.removeprefix(ENV_PREFIX).lower()
        setting = _known(name, "environment")
        values[name] = setting.parse(value.split(",") if setting.repeat else value, variable)
    return values


def _known(name: str, source: str) -> Setting:
    """The setting of that name; ConfigError with the nearest name when there is none."""
    if name in SETTINGS:
        return SETTINGS[name]
    wrong = ENV_PREFIX + name.upper() if source == "environment" else name
    near = difflib.get_close_matches(name, SETTINGS, n=1)
    right = [ENV_PREFIX + n.upper() if source == "environment" else n for n in near]
    raise ConfigError(f"{source}: there is no setting {wrong}", hint=f"did you mean {right[0]}?" if right else "")


_DOCS_HEAD = """\
# Configuration

Made from `src/chairlift/config.py` by `python -m chairlift.config > docs/configuration.md`; a test keeps it true.

Every setting is a flag, an environment variable (`CHAIRLIFT_` and the name in capitals) and a key of a TOML file
(`--config FILE` or `CHAIRLIFT_CONFIG`). Flags win over the environment, the environment over the file. In the
environment, lists are separated by commas; in TOML they are arrays. A name or a value that cannot be honoured stops
the start with a line that says why; nothing is ignored.

```toml
model = "smollm2"
host = "0.0.0.0"
api-key = ["change-me-please"]
max-num-seqs = 8
kv-memory = "2GiB"
```"""


def markdown() -> str:
    """docs/configuration.md, from the table."""
    lines = [_DOCS_HEAD]
    for group in dict.fromkeys(setting.group for setting in SETTINGS.values()):
        lines += ["", f"## {group}", "", "| flag | what it does | limits | default |", "|---|---|---|---|"]
        for setting in SETTINGS.values():
            if setting.group == group:
                flag = "MODEL or `--model`" if setting.name == "model" else f"`{setting.flag}`"
                again = " (repeatable)" if setting.repeat else ""
                lines.append(f"| {flag} | {setting.help}{again} | {setting.kind.limits} | {setting.default_text} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(markdown(), end="")
