"""What is asked for: prompts and answers of given lengths, from a seed, or the requests of a trace. Pure.

Two sources of chance are kept apart. The *seed* decides lengths and arrivals, so that two runs ask for the same work.
The *salt* decides the words and is new in every run, so that no prompt begins like one that a server's cache may hold.
Only the shared prefix that a workload asks for repeats.

No tokenizer is known here: how many tokens a word has is measured on the server (`TokenCalibration.fit`).
"""

from __future__ import annotations

import json
import math
import random
import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from chairlift.errors import ConfigError

_WORDS = (
    "area baby back ball bank base bird blue boat body book born both card care case city club cold cost "
    "dark date deal deep door down east edge else even ever face fact farm fast fear fire fish five food foot "
    "form four free full game girl gold good half hand hard have head hear help here high hill home hope hour "
    "idea into just keep kind king land last late lead left less life line list live long look lost love main "
    "make many mind moon more most much must name near need next nice note once only open over page part past "
    "plan play poor rain read real rest rich ring road rock role room rule safe sale same save seat seem send "
    "ship shop show side sign size skin snow some song soon star stay step stop sure take talk task team tell "
    "test text that then they thin this time town tree trip true turn unit upon very view vote wait walk wall "
    "want warm wave week well west what when wide wife will wind wish with wood word work year zero"
)
WORDS = tuple(_WORDS.split())
"""Words of four letters, each one token in nearly every vocabulary, so that a text's length depends on their number."""

NUM_SALT_WORDS = 8
"""Words of salt in front of a trace's prompt: about 60 bits."""
MAX_TOKENS = 2**24


_LENGTH_FORMS = {
    "fixed": r"N",
    "uniform": r"uniform:N-N",
    "lognormal": r"lognormal:N,N",
    "exponential": r"exponential:N",
}


@dataclass(frozen=True, slots=True)
class Lengths:
    """Lengths of prompts or answers in tokens: a fixed number or a distribution."""

    kind: str  # a key of _LENGTH_FORMS
    a: float
    b: float = 0.0

    @classmethod
    def parse(cls, text: str, name: str = "length") -> Lengths:
        """`200`, `uniform:100-300`, `lognormal:200,0.5` (median, sigma of the logarithm), `exponential:200` (mean)."""
        for kind, form in _LENGTH_FORMS.items():
            if match := re.fullmatch(form.replace("N", r"(\d+(?:\.\d+)?)"), text.strip()):
                a, b = (*map(float, match.groups()), 0.0)[:2]
                if 1 <= a <= MAX_TOKENS and not (kind == "uniform" and b < a) and not (kind == "lognormal" and b > 4):
                    return cls(kind, a, b)
        raise ConfigError(
            f"{name}: {text!r} is not a number of tokens",
            hint="200, uniform:100-300, lognormal:200,0.5 (median, sigma) or exponential:200 (mean)",
        )

    def draw(self, rng: random.Random) -> int:
        """One length, at least 1."""
        match self.kind:
            case "uniform":
                drawn = float(rng.randint(round(self.a), round(self.b)))
            case "lognormal":
                drawn = self.a * math.exp(rng.gauss(0.0, self.b))
            case "exponential":
                drawn = rng.expovariate(1 / self.a)
            case _:
                drawn = self.a
        return max(1, min(MAX_TOKENS, round(drawn)))

    @property
    def mean(self) -> float:
        """Tokens, before rounding."""
        if self.kind == "lognormal":
            return self.a * math.exp(self.b**2 / 2)
        return (self.a + self.b) / 2 if self.kind == "uniform" else self.a

    def __str__(self) -> str:
        figures = iter((f"{self.a:g}", f"{self.b:g}"))
        return re.sub("N", lambda _: next(figures), _LENGTH_FORMS[self.kind])


@dataclass(frozen=True, slots=True)
class TokenCalibration:
    """Tokens of a prompt = overhead + tokens_per_word x words, as the server counts them."""

    tokens_per_word: float = 1.0
    overhead: float = 0.0  # tokens of the chat template, which is in every prompt
    is_measured: bool = False

    @classmethod
    def fit(cls, short: tuple[int, int | None], long: tuple[int, int | None]) -> TokenCalibration:
        """From two prompts, each (words, prompt tokens by usage). Without usage a word is taken for one token."""
        (words_1, tokens_1), (words_2, tokens_2) = short, long
        if tokens_1 is None or tokens_2 is None or tokens_2 <= tokens_1 or words_2 <= words_1:
            return cls()
        slope = (tokens_2 - tokens_1) / (words_2 - words_1)
        return cls(slope, max(0.0, tokens_1 - slope * words_1), True)

    def words(self, tokens: float) -> int:
        """Words of a prompt that has so many tokens, at least 1."""
        return max(1, round((tokens - self.overhead) / self.tokens_per_word))


@dataclass(frozen=True, slots=True)
class SharedPrefix:
    """A beginning that many prompts have in common, such as a system prompt."""

    share: float  # share of the requests, 0 to 1
    tokens: int

    def __post_init__(self) -> None:
        if not 0 <= self.share <= 1 or not 1 <= self.tokens <= MAX_TOKENS:
            raise ConfigError("a shared prefix has a share from 0 to 1 and a length of at least 1 token")

    @classmethod
    def parse(cls, text: str) -> SharedPrefix:
        """`0.8:500`: 80 % of the requests begin with the same 500 tokens."""
        match = re.fullmatch(r"(\d*\.?\d+):(\d+)", text.strip())
        if match is None:
            raise ConfigError(f"--shared-prefix: {text!r} is not SHARE:TOKENS", hint="0.8:500 for example")
        return cls(float(match[1]), int(match[2]))


@dataclass(frozen=True, slots=True)
class PlannedRequest:
    """One request of a workload."""

    index: int
    prompt: str
    prompt_tokens: int | None  # None if a trace gives the text
    output_tokens: int
    at_s: float | None = None  # when a trace says that it is due, in seconds from the start; None without a trace


@dataclass(frozen=True, slots=True)
class TraceRow:
    """One line of a trace file."""

    at_s: float
    prompt: str | None
    prompt_tokens: int | None
    output_tokens: int


@dataclass(frozen=True, slots=True)
class Workload:
    """All requests of a run. Equal workloads have equal requests, whatever the order in which they are asked for."""

    prompt: Lengths
    output: Lengths
    seed: int = 0
    salt: str = ""  # new in every run; without salt ("") all runs have the same words
    prefix: SharedPrefix | None = None
    calibration: TokenCalibration = TokenCalibration()
    trace: tuple[TraceRow, ...] = ()

    def request(self, index: int) -> PlannedRequest:
        """Request number `index`, from 0. A trace raises IndexError past its end."""
        if self.trace:
            row = self.trace[index]
            if row.prompt is None:
                text = self.text(str(index), self.calibration.words(row.prompt_tokens or 0))
            else:
                text = f"{self.text('trace', NUM_SALT_WORDS)}\n{row.prompt}" if self.salt else row.prompt
            return PlannedRequest(index, text, row.prompt_tokens, row.output_tokens, row.at_s)
        rng = random.Random(f"{self.seed}/{index}")
        length, output, begin = self.prompt.draw(rng), self.output.draw(rng), ""
        if self.prefix is not None and rng.random() < self.prefix.share:
            begin = self.text("prefix", max(1, round(self.prefix.tokens / self.calibration.tokens_per_word))) + " "
        rest = self.calibration.words(length - len(begin.split()) * self.calibration.tokens_per_word)
        return PlannedRequest(index, begin + self.text(str(index), rest), length, output)

    def text(self, what: str, num_words: int) -> str:
        """So many words. The salt and `what`, the purpose of the text, decide which."""
        rng = random.Random(f"{self.salt}/{what}")
        return " ".join(rng.choices(WORDS, k=num_words))

    @property
    def shared_share(self) -> float:
        """Share of all prompt tokens that the workload itself repeats, which a prefix cache may rightly have."""
        if self.trace:
            return 1.0  # a trace may repeat anything within itself
        prefix = self.prefix.share * self.prefix.tokens if self.prefix else 0.0
        return min(1.0, (self.calibration.overhead + prefix) / max(1.0, self.prompt.mean, prefix))

    def describe(self) -> dict[str, Any]:
        """What was asked for, for the JSON."""
        return {
            "prompt_tokens": str(self.prompt),
            "output_tokens": str(self.output),
            "seed": self.seed,
            "salt": self.salt,
            "shared_prefix": None if self.prefix is None else asdict(self.prefix),
            "tokens_per_word": round(self.calibration.tokens_per_word, 4),
            "prompt_overhead_tokens": round(self.calibration.overhead, 1),
            "lengths_calibrated": self.calibration.is_measured,
            "trace_requests": len(self.trace) or None,
        }


def read_trace(path: Path) -> tuple[TraceRow, ...]:
    """Reads JSONL with at_s, prompt or prompt_tokens, and output_tokens; sorted by time. Raises ConfigError."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the trace {path}: {error}") from None
    rows = [_row(line, f"{path}, line {number}") for number, line in enumerate(lines, 1) if line.strip()]
    if not rows:
        raise ConfigError(f"the trace {path} has no requests")
    return tuple(sorted(rows, key=lambda row: row.at_s))


def _row(line: str, where: str) -> TraceRow:
    try:
        said = json.loads(line)
        at_s, output = float(said["at_s"]), int(said["output_tokens"])
        prompt, tokens = said.get("prompt"), said.get("prompt_tokens")
        tokens = None if tokens is None else int(tokens)
        is_right = at_s >= 0 and math.isfinite(at_s) and 1 <= output <= MAX_TOKENS
        is_right &= isinstance(prompt, str) if prompt is not None else tokens is not None and 1 <= tokens <= MAX_TOKENS
    except (ValueError, TypeError, KeyError, AttributeError):
        is_right = False
    if not is_right:
        raise ConfigError(f"{where} is no request", hint='{"at_s": 0.5, "prompt_tokens": 200, "output_tokens": 100}')
    return TraceRow(at_s, prompt, tokens, output)
