"""GET /v1/queue: how long the line is, and where in it everybody stands.

Expected waits are the engine's (engine/forecast.py): from measured speed, and no promise.
"""

from __future__ import annotations

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from chairlift.engine.door import Place
from chairlift.server.http_errors import JsonResponse
from chairlift.server.middleware import caller
from chairlift.server.service import Service


async def queue(request: HttpRequest) -> Response:
    """GET /v1/queue: how many wait and run, and each that waits. With keys, ids are shown to their own key only."""
    service: Service = request.app.state.service
    plan = service.serving.loaded.plan
    key_name = caller(request.scope).key_name
    view = service.serving.engine.queue(key_name)
    return JsonResponse(
        {
            "object": "queue",
            "max_queue": plan.max_queue,
            "max_queue_wait_s": plan.max_queue_wait_s,
            "max_num_seqs": plan.max_num_seqs,
            "num_waiting": len(view.places),
            "num_running": view.num_running,
            "num_preempted": view.num_preempted,
            "expected_wait_s": round(view.expected_wait_s, 1),
            "waiting": [_shown(place, key_name) for place in view.places],
        }
    )


def _shown(place: Place, key_name: str) -> dict[str, object]:
    is_own = place.request.key_name == key_name
    return {
        "position": place.position,
        "waited_s": round(place.waited_s, 1),
        "expected_wait_s": round(place.expected_wait_s, 1),
        "id": place.request.id.rpartition("#")[0] if is_own else None,
    }
