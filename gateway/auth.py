"""From a request's headers to the tenant, or the operator, that it speaks for."""

import base64
import hmac
from collections.abc import Callable

from starlette.requests import Request

from gateway.errors import InvalidKeyError
from tenants.keys import is_well_formed
from tenants.policy import Principal
from tenants.store import Store


class Authenticator:
    """Finds the principal of a key. The identity comes from the key alone, never from a field."""

    def __init__(self, store: Store, now: Callable[[], float]) -> None:
        self._store = store
        self._now = now

    async def principal(self, request: Request) -> Principal:
        """Raises InvalidKeyError or KeyRefusedError (one 401 for all), or StoreUnavailableError."""
        secret = presented_key(request)
        # Noise costs no database access.
        if not is_well_formed(secret):
            raise InvalidKeyError
        return await self._store.resolve_key(secret, now=self._now())


def presented_key(request: Request) -> str:
    """The key in Authorization: Bearer, else in x-api-key, else an empty string."""
    authorization = request.headers.get("authorization")
    if authorization is None:
        return request.headers.get("x-api-key", "")
    scheme, _, credentials = authorization.partition(" ")
    return credentials.strip() if scheme.lower() == "bearer" else ""


def is_operator(request: Request, token: str | None) -> bool:
    """Whether the request carries the operator's token, as a bearer token or as the password of
    Basic (what browsers can ask for). Without a token everybody who can connect is one."""
    if token is None:
        return True
    # Compared as bytes: headers are read as Latin-1, whatever the client meant.
    presented = presented_key(request).encode("latin-1") or _basic_password(request)
    return hmac.compare_digest(presented, token.encode(errors="surrogateescape"))


def _basic_password(request: Request) -> bytes:
    scheme, _, credentials = request.headers.get("authorization", "").partition(" ")
    if scheme.lower() != "basic":
        return b""
    try:
        pair = base64.b64decode(credentials, validate=True)
    except ValueError:  # not base64, or not even ASCII
        return b""
    return pair.partition(b":")[2]
