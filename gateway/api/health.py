"""GET /healthz and /readyz: is the engine's loop alive, and does it take work?"""

from starlette.requests import Request
from starlette.responses import JSONResponse

from engine.client import EngineClient
from gateway.errors import RETRY_SECONDS


class Health:
    """Answers from the engine alone: with the policy store away, known requests still run."""

    def __init__(self, engine: EngineClient) -> None:
        self._engine = engine

    async def live(self, request: Request) -> JSONResponse:
        """503 means: restart this process."""
        health = self._engine.health()
        return _answer(health.alive, health.reason)

    async def ready(self, request: Request) -> JSONResponse:
        """503 means: send new requests elsewhere."""
        health = self._engine.health()
        return _answer(health.ready, health.reason)


def _answer(good: bool, reason: str) -> JSONResponse:
    if good:
        return JSONResponse({"status": "ok"})
    headers = {"retry-after": str(RETRY_SECONDS)}
    return JSONResponse({"status": "unavailable", "reason": reason}, 503, headers)
