"""GET /v1/models and /v1/models/{id}."""

from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse

from gateway.auth import Authenticator
from gateway.errors import ModelNotFoundError
from gateway.served_model import ServedModel


class Models:
    """The one model that is served, for whoever has a key."""

    def __init__(self, model: ServedModel, auth: Authenticator) -> None:
        self._model = model
        self._auth = auth

    async def list(self, request: Request) -> JSONResponse:
        await self._auth.principal(request)
        return JSONResponse({"object": "list", "data": [self._object()]})

    async def retrieve(self, request: Request) -> JSONResponse:
        await self._auth.principal(request)
        name = request.path_params["model"]
        if name != self._model.name:
            raise ModelNotFoundError(f"The model '{name}' does not exist.")
        return JSONResponse(self._object())

    def _object(self) -> dict[str, Any]:
        return {
            "id": self._model.name,
            "object": "model",
            "created": self._model.created,
            "owned_by": "headrace",
            "max_model_len": self._model.max_model_len,
        }
