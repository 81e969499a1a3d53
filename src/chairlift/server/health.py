"""Readiness, liveness and numbers: small, and never waiting for the engine."""

from __future__ import annotations

import time
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from chairlift import __version__
from chairlift.server import metrics
from chairlift.server.http_errors import JsonResponse
from chairlift.server.service import Service


def _service(request: Request) -> Service:
    found: Service = request.app.state.service
    return found


async def health(request: Request) -> Response:
    """GET /health: 200 when requests are taken and make progress; else 503 and why."""
    service = _service(request)
    body: dict[str, Any] = {"status": service.state, "uptime_s": round(time.time() - service.started_s, 3)}
    snapshot = service.snapshot()
    if snapshot is not None:
        plan = service.serving.loaded.plan
        age_s = snapshot.last_step_age_s
        body |= {
            "model": plan.model_name,
            "num_running": snapshot.num_running,
            "num_waiting": snapshot.num_waiting,
            "max_num_seqs": plan.max_num_seqs,
            "max_queue": plan.max_queue,
            "kv_used": round(snapshot.num_used_blocks / snapshot.num_blocks, 4),
            "kv_full_conversations": round(plan.full_conversations, 2),
            "num_steps": snapshot.num_steps,
            "num_preemptions": snapshot.num_preemptions,
            "last_step_age_s": None if age_s is None else round(age_s, 3),
            "notes": list(plan.notes),
        }
    return JsonResponse(body, 200 if body["status"] == "ready" else 503)


async def live(request: Request) -> Response:
    """GET /live: 200 as long as a restart would not help."""
    state = _service(request).state
    return JsonResponse({"status": state}, 503 if state == "dead" else 200)


async def version(_: Request) -> Response:
    """GET /version."""
    return JsonResponse({"version": __version__})


async def exposition(request: Request) -> Response:
    """GET /metrics; 503 before there is a model."""
    text = _service(request).serving.metrics.exposition()
    return Response(text, headers={"content-type": metrics.CONTENT_TYPE})


async def root(request: Request) -> Response:
    """GET /: where to go from here."""
    paths = [route.path for route in request.app.routes]
    return JsonResponse({"server": "chairlift", "version": __version__, "paths": paths})
