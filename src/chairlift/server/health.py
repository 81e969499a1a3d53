"""What the server says of itself: health, liveness, the queue, metrics, its version. Never waits for the engine."""

from __future__ import annotations

import time

from starlette.requests import Request

from chairlift import __version__
from chairlift.server import metrics
from chairlift.server.middleware import caller
from chairlift.server.responses import Health, JsonResponse, Liveness, Queue, Root, TypedResponse, Version
from chairlift.server.service import service_of


async def health(request: Request) -> JsonResponse[Health]:
    """GET /health: 200 when requests are taken and make progress, else 503 with the state that says why."""
    service = service_of(request.scope)
    body: Health = {"status": service.state, "uptime_s": round(time.time() - service.started_s, 3)}
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


async def live(request: Request) -> JsonResponse[Liveness]:
    """GET /live: 200 as long as a restart would not help."""
    state = service_of(request.scope).state
    return JsonResponse({"status": state}, 503 if state == "dead" else 200)


async def queue(request: Request) -> JsonResponse[Queue]:
    """GET /v1/queue; 503 while loading. With API keys, a request's id is shown to its own key only."""
    serving = service_of(request.scope).serving
    return JsonResponse(serving.queue_status.view(caller(request.scope).key_name))


async def exposition(request: Request) -> TypedResponse[str]:
    """GET /metrics; 503 while loading."""
    text = service_of(request.scope).serving.metrics.exposition()
    return TypedResponse(text, headers={"content-type": metrics.CONTENT_TYPE})


async def version(_: Request) -> JsonResponse[Version]:
    """GET /version."""
    return JsonResponse({"version": __version__})


async def root(request: Request) -> JsonResponse[Root]:
    """GET /: the paths that there are."""
    paths = [route.path for route in request.app.routes]
    return JsonResponse({"server": "chairlift", "version": __version__, "paths": paths})
