"""/admin: the operator's status page, and what the operator may do to a running engine."""

import asyncio
import logging
import re
from collections.abc import AsyncIterator
from dataclasses import asdict
from typing import Any

from pydantic import ConfigDict
from starlette.requests import Request
from starlette.responses import (
    FileResponse,
    HTMLResponse,
    JSONResponse,
    Response,
    StreamingResponse,
)

from dashboards.status import CONTENT_SECURITY_POLICY, STYLE_SHEET, status_page
from engine.client import EngineClient
from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.scheduling.journal import MAX_STEPS
from engine.waits import StepRecord
from gateway.auth import is_operator
from gateway.errors import InvalidRequestError, UnsupportedMediaTypeError
from gateway.schemas.parsing import Body, BodyT, parse
from gateway.streaming import KEEP_ALIVE, event

logger = logging.getLogger("headrace.gateway")

DEFAULT_STEPS = 32
STREAM_PAUSE_SECONDS = 0.25

HEADERS = {
    "content-security-policy": CONTENT_SECURITY_POLICY,
    "cache-control": "no-store",
    "x-content-type-options": "nosniff",
    "referrer-policy": "same-origin",
}
ASK_FOR_TOKEN = {"www-authenticate": 'Basic realm="Headrace operator", charset="UTF-8"'}


class CacheReset(Body):
    """Whose cached prefixes to forget: one tenant's, by slug, or everybody's."""

    # A misspelt name must not mean everybody.
    model_config = ConfigDict(extra="forbid")

    tenant: str | None = None


class PolicySwitch(Body):
    """By which policy to schedule from now on."""

    model_config = ConfigDict(extra="forbid")

    name: str


class AdminPages:
    """Names tenants, as /metrics does, and is guarded by the same token."""

    def __init__(
        self, model_name: str, config: EngineConfig, engine: EngineClient, token: str | None
    ) -> None:
        self._model_name = model_name
        self._config = config
        self._engine = engine
        self._token = token

    async def status(self, request: Request) -> Response:
        if not is_operator(request, self._token):
            return _ask_for_token()
        page = status_page(
            model=self._model_name,
            max_seqs=self._config.scheduler.max_seqs,
            health=self._engine.health(),
            snapshot=self._engine.snapshot(),
        )
        return HTMLResponse(page, headers=HEADERS)

    async def style(self, request: Request) -> FileResponse:
        return FileResponse(STYLE_SHEET, headers={"cache-control": "max-age=3600"})

    async def reset_prefix_cache(self, request: Request) -> Response:
        """POST {"tenant": slug} or {}. Blocks in use stay, but nobody finds them any more."""
        if not is_operator(request, self._token):
            return _ask_for_token()
        body = await _read(CacheReset, request)
        # Shielded: the engine goes on with it, whoever leaves meanwhile.
        freed_blocks = await self._engine.reset_prefix_cache(body.tenant)
        return JSONResponse({"freed_blocks": freed_blocks})

    async def switch_policy(self, request: Request) -> Response:
        """POST {"name": policy}. Until the next start, when the settings count again."""
        if not is_operator(request, self._token):
            return _ask_for_token()
        body = await _read(PolicySwitch, request)
        try:
            await self._engine.switch_policy(body.name)
        except ConfigError as error:
            raise InvalidRequestError(str(error), param="name") from error
        logger.warning("the policy is %s from now on, by /admin/policy", body.name)
        return JSONResponse({"policy": body.name})

    async def steps(self, request: Request) -> Response:
        """The last steps, oldest first; as events, for ever, to who accepts text/event-stream."""
        if not is_operator(request, self._token):
            return _ask_for_token()
        limit = _limit(request)
        headers = {"cache-control": "no-store"}
        if "text/event-stream" in request.headers.get("accept", ""):
            stream = self._stream_steps(limit)
            return StreamingResponse(stream, headers=headers, media_type="text/event-stream")
        steps = await self._engine.recent_steps(limit)
        return JSONResponse({"steps": [_step(one) for one in steps]}, headers=headers)

    async def _stream_steps(self, limit: int) -> AsyncIterator[bytes]:
        """The last steps and then new ones; those beyond `limit` at once are left out."""
        seen: dict[str, int] = {}  # by stage
        while self._engine.health().ready:
            for one in await self._engine.recent_steps(limit):
                if one.step > seen.get(one.stage, 0):
                    seen[one.stage] = one.step
                    yield event(_step(one))
            yield KEEP_ALIVE
            await asyncio.sleep(STREAM_PAUSE_SECONDS)


async def _read(schema: type[BodyT], request: Request) -> BodyT:
    # Required: a page of another origin cannot send it without asking first (CORS).
    media_type = request.headers.get("content-type", "").partition(";")[0]
    if media_type.strip().lower() != "application/json":
        raise UnsupportedMediaTypeError("Send the header 'Content-Type: application/json'.")
    return parse(schema, await request.body())


def _limit(request: Request) -> int:
    """?limit=N. Raises InvalidRequestError."""
    text = request.query_params.get("limit", str(DEFAULT_STEPS))
    if not re.fullmatch("[0-9]{1,4}", text) or not 1 <= int(text) <= MAX_STEPS:
        raise InvalidRequestError(f"limit must be from 1 to {MAX_STEPS}.", param="limit")
    return int(text)


def _step(record: StepRecord) -> dict[str, Any]:
    """Rows as objects: what a column means stands beside it."""
    return asdict(record) | {
        "prompts": [one._asdict() for one in record.prompts],
        "heads": [one._asdict() for one in record.heads],
    }


def _ask_for_token() -> Response:
    return Response("The password is HEADRACE_OPERATOR_TOKEN.", 401, ASK_FOR_TOKEN)
