"""GET /v1/requests/{id}/explain: where a request's time went, for the tenant that made it."""

import asyncio
import re
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse

from engine.client import EngineClient
from engine.waits import Explanation, SequenceExplanation
from gateway.auth import Authenticator
from gateway.errors import RequestNotFoundError
from gateway.schemas.completions import MAX_PROMPTS

REQUEST_ID = re.compile(r"req_[0-9a-f]{32}", re.ASCII)


class Requests:
    """What the engine remembers of requests, each for its own tenant."""

    def __init__(self, engine: EngineClient, auth: Authenticator) -> None:
        self._engine = engine
        self._auth = auth

    async def explain(self, request: Request) -> JSONResponse:
        principal = await self._auth.principal(request)
        request_id = request.path_params["id"]
        found: list[Explanation] = []
        if REQUEST_ID.fullmatch(request_id):
            # Asked at once: the engine's thread answers all of them between the same two steps.
            ids = [f"{request_id}-{prompt}" for prompt in range(MAX_PROMPTS)]
            answers = await asyncio.gather(*map(self._engine.explain, ids))
            found = [one for one in answers if one is not None]
        if not found or any(one.tenant != principal.tenant for one in found):
            raise RequestNotFoundError(
                f"There is no request '{request_id}' of yours, or it ended too long ago. "
                "The id is in the x-request-id header of each response."
            )
        sequences = [
            {"prompt": int(one.request_id.rpartition("-")[2])} | _sequence(sequence)
            for one in found
            for sequence in one.sequences
        ]
        return JSONResponse(
            {"id": request_id, "object": "request.explanation", "sequences": sequences},
            headers={"cache-control": "no-store"},
        )


def _sequence(sequence: SequenceExplanation) -> dict[str, Any]:
    """Times in whole microseconds since the arrival, so that parts add up exactly."""
    arrived = sequence.intervals[0].start if sequence.intervals else 0.0

    def since(time: float) -> int:
        return round((time - arrived) * 1e6)

    return {
        "index": sequence.index,
        "is_finished": sequence.is_finished,
        "waited_us": sum(
            since(one.end) - since(one.start) for one in sequence.intervals if one.cause is not None
        ),
        "intervals": [
            {
                "cause": one.cause,  # None: it ran
                "start_us": since(one.start),
                "end_us": since(one.end),
                "detail": one.detail,
            }
            for one in sequence.intervals
        ],
    }
