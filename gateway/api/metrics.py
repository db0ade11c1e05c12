"""GET /metrics."""

from prometheus_client import CONTENT_TYPE_LATEST
from starlette.requests import Request
from starlette.responses import Response

from engine.client import EngineClient
from gateway.auth import is_operator
from gateway.metrics import Metrics


class MetricsPage:
    """The Prometheus text. It names tenants: behind a token of its own, if one is set."""

    def __init__(self, metrics: Metrics, engine: EngineClient, token: str | None) -> None:
        self._metrics = metrics
        self._engine = engine
        self._token = token

    async def read(self, request: Request) -> Response:
        if not is_operator(request, self._token):
            return Response("This needs HEADRACE_OPERATOR_TOKEN as a bearer token.\n", 401)
        text = self._metrics.render(self._engine.snapshot())
        return Response(text, media_type=CONTENT_TYPE_LATEST)
