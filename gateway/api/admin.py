"""GET /admin: the operator's status page."""

from starlette.requests import Request
from starlette.responses import FileResponse, HTMLResponse, Response

from dashboards.status import CONTENT_SECURITY_POLICY, STYLE_SHEET, status_page
from engine.config import EngineConfig
from engine.service import EngineClient
from gateway.auth import is_operator

HEADERS = {
    "content-security-policy": CONTENT_SECURITY_POLICY,
    "cache-control": "no-store",
    "x-content-type-options": "nosniff",
    "referrer-policy": "same-origin",
}
ASK_FOR_TOKEN = {"www-authenticate": 'Basic realm="Headrace operator", charset="UTF-8"'}


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
            return Response("The password is HEADRACE_OPERATOR_TOKEN.", 401, ASK_FOR_TOKEN)
        page = status_page(
            model=self._model_name,
            policy=self._config.scheduler.policy,
            max_seqs=self._config.scheduler.max_seqs,
            health=self._engine.health(),
            snapshot=self._engine.snapshot(),
        )
        return HTMLResponse(page, headers=HEADERS)

    async def style(self, request: Request) -> FileResponse:
        return FileResponse(STYLE_SHEET, headers={"cache-control": "max-age=3600"})
