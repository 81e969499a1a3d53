"""The server's log: a line per finished request, and one per ten seconds of work. It never holds text of a prompt."""

from __future__ import annotations

import json
import logging
import logging.handlers
import queue
import sys
import time
from collections.abc import Sequence
from typing import Any

from chairlift.engine.observer import EngineSnapshot, Observer, StepStats
from chairlift.engine.request import FinishReason, Request

log = logging.getLogger(__name__)


class JsonFormatter(logging.Formatter):
    """One JSON object per line. A record's `fields` become fields of the object."""

    def format(self, record: logging.LogRecord) -> str:
        """The line of one record."""
        line: dict[str, Any] = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


def set_up(*, as_json: bool) -> logging.handlers.QueueListener:
    """Sends the process's log to standard error from a thread of its own. The caller stops that thread at the end.

    A full pipe then stops neither the event loop nor the engine.
    """
    handler = logging.StreamHandler(sys.stderr)
    text = "%(asctime)s.%(msecs)03d %(levelname)s %(message)s"
    handler.setFormatter(JsonFormatter() if as_json else logging.Formatter(text, "%Y-%m-%d %H:%M:%S"))
    lines: queue.SimpleQueue[logging.LogRecord] = queue.SimpleQueue()
    root = logging.getLogger()
    root.handlers = [_UnformattedHandler(lines)]
    root.setLevel(logging.INFO)
    for name in ("uvicorn", "uvicorn.error"):
        # uvicorn's lines about start and stop repeat ours.
        logging.getLogger(name).setLevel(logging.WARNING)
    listener = logging.handlers.QueueListener(lines, handler)
    listener.start()
    return listener


class _UnformattedHandler(logging.handlers.QueueHandler):
    """Leaves formatting to the thread that writes. The base class formats first, to reach other processes."""

    def prepare(self, record: logging.LogRecord) -> logging.LogRecord:
        return record


def write(event: str, fields: dict[str, Any]) -> None:
    """Writes one line of named figures."""
    text = " ".join(f"{name}={_show(value)}" for name, value in fields.items())
    log.info("%s %s", event, text, extra={"fields": {"event": event, **fields}})


def _show(value: object) -> str:
    return f"{value:.3f}" if isinstance(value, float) else str(value)


class RequestLog(Observer):
    """Writes the line of each finished request."""

    def finished(self, request: Request) -> None:
        """Writes the line."""
        timing = request.timing
        # A request that ended early lacks some time stamps. The time of its end stands in for them.
        scheduled_s = timing.scheduled_s or timing.finished_s
        first_s = timing.first_token_s or timing.finished_s
        end = str(request.finish_reason)
        fields: dict[str, Any] = {
            "id": request.id,
            "key": request.key_name or "-",
            "stream": request.stream,
            "prompt_tokens": request.num_prompt,
            "cached_tokens": request.num_cached or 0,
            "output_tokens": len(request.output),
            "queue_s": scheduled_s - timing.arrival_s,
            "prefill_s": first_s - scheduled_s,
            "ttft_s": first_s - timing.arrival_s,
            "e2e_s": timing.finished_s - timing.arrival_s,
            "preemptions": request.num_preemptions,
            "end": end if request.finish_reason is not FinishReason.CANCELLED else f"{end} {phase(request)}",
        }
        if request.error is not None:
            fields["error"] = request.error.code
        write("request", fields)


def phase(request: Request) -> str:
    """The phase that a request was in: queued, prefill or decode."""
    if not request.timing.scheduled_s:
        return "queued"
    return "decode" if request.timing.first_token_s else "prefill"


class WorkLog(Observer):
    """Adds up the engine's work between two lines. The engine thread adds, and the event loop reads."""

    def __init__(self) -> None:
        self._total = [0, 0, 0, 0, 0]  # steps, prompt tokens, output tokens, queried and hit prompt tokens
        self._told = [0, 0, 0, 0, 0]

    def step_done(self, stats: StepStats) -> None:
        """Counts a step and its prompt tokens."""
        self._total[0] += 1
        self._total[1] += stats.num_prompt_tokens

    def first_token(self, request: Request) -> None:
        """Counts an output token, and the request's prefix hits, which are final now."""
        self._total[2] += 1
        self._total[3] += request.num_prompt
        self._total[4] += request.num_cached or 0

    def next_tokens(self, gaps: Sequence[tuple[Request, float]]) -> None:
        """Counts output tokens."""
        self._total[2] += len(gaps)

    def write(self, snapshot: EngineSnapshot, seconds: float) -> None:
        """Writes the line for the last `seconds`, unless they had no step."""
        now = list(self._total)
        steps, prompt, output, queried, hit = (a - b for a, b in zip(now, self._told, strict=True))
        self._told = now
        if steps == 0:
            return
        write(
            "work",
            {
                "running": snapshot.num_running,
                "waiting": snapshot.num_waiting,
                "kv_percent": round(100 * snapshot.num_used_blocks / snapshot.num_blocks),
                "steps": steps,
                "in_tok_s": round(prompt / seconds, 1),
                "out_tok_s": round(output / seconds, 1),
                "hit_percent": round(100 * hit / queried) if queried else 0,
                "preemptions": snapshot.num_preemptions,
            },
        )
