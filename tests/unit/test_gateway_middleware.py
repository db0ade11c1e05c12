"""Body limit counted on the stream, body deadline, request ids, the last catch."""

import asyncio
import logging

import httpx
import pytest
from prometheus_client import CollectorRegistry
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from gateway.errors import exception_handlers
from gateway.metrics import HttpMetrics
from gateway.middleware import BodyLimitMiddleware, RequestContextMiddleware


async def read_size(request: Request) -> PlainTextResponse:
    return PlainTextResponse(str(len(await request.body())))


async def fail(request: Request) -> PlainTextResponse:
    raise RuntimeError("secret detail")


@pytest.fixture
def registry():
    return CollectorRegistry()


@pytest.fixture
def app(registry):
    return Starlette(
        routes=[Route("/size", read_size, methods=["POST"]), Route("/fail/{x}", fail)],
        middleware=[
            Middleware(RequestContextMiddleware, metrics=HttpMetrics(registry)),
            Middleware(BodyLimitMiddleware, max_bytes=100, timeout_seconds=0.05),
        ],
        exception_handlers=exception_handlers(),
    )


def client(app):
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://x")


async def chunks(*sizes, delay=0.0):
    for size in sizes:
        await asyncio.sleep(delay)
        yield b"x" * size


async def test_a_body_within_the_limit_is_read(app):
    async with client(app) as http:
        assert (await http.post("/size", content=b"x" * 100)).text == "100"
        assert (await http.post("/size", content=chunks(50, 50))).text == "100"
        assert (await http.post("/size")).text == "0"


async def test_a_declared_length_over_the_limit_is_refused(app):
    async with client(app) as http:
        response = await http.post("/size", content=b"x" * 101)

    assert response.status_code == 413
    assert response.json()["error"] == {
        "message": "The body is larger than 100 bytes, the most this server reads.",
        "type": "invalid_request_error",
        "param": None,
        "code": "request_too_large",
    }


async def test_a_body_that_is_declared_too_large_is_not_read(app):
    async def untouched():
        raise AssertionError("read")
        yield b""

    async with client(app) as http:
        headers = {"content-length": "101"}
        response = await http.post("/size", content=untouched(), headers=headers)

    assert response.status_code == 413


async def test_a_chunked_body_is_counted_while_it_arrives(app):
    async with client(app) as http:
        response = await http.post("/size", content=chunks(60, 41))

    assert response.status_code == 413


async def test_a_body_that_does_not_arrive_is_given_up(app):
    async def receive():
        await asyncio.sleep(60)

    sent = []

    async def send(message):
        sent.append(message)

    scope = {
        "type": "http",
        "method": "POST",
        "path": "/size",
        "query_string": b"",
        "headers": [(b"content-length", b"10")],
    }
    await app(scope, receive, send)

    assert sent[0]["status"] == 408


async def test_every_response_has_a_request_id_of_our_own_and_the_time_it_took(app):
    async with client(app) as http:
        ids = set()
        for path in ("/size", "/nowhere", "/fail/1"):
            response = await http.get(path, headers={"x-request-id": "mine"})
            ids.add(response.headers["x-request-id"])
            assert response.headers["openai-processing-ms"].isdecimal()

    assert len(ids) == 3
    assert all(one.startswith("req_") and len(one) == 36 for one in ids)


async def test_an_unhandled_error_is_logged_and_says_nothing(app, caplog):
    async with client(app) as http:
        response = await http.get("/fail/1")

    assert response.status_code == 500
    assert response.json()["error"]["code"] == "internal_error"
    assert "secret" not in response.text
    assert response.headers["x-request-id"] in caplog.text
    assert "secret detail" in caplog.text


async def test_requests_are_counted_by_route_not_by_path(app, registry, caplog):
    caplog.set_level(logging.CRITICAL)
    async with client(app) as http:
        for number in range(3):
            await http.get(f"/fail/{number}")
        await http.request("BREW", "/size")

    def count(**labels):
        return registry.get_sample_value("http_requests_total", labels)

    assert count(handler="/fail/{x}", method="GET", status="5xx") == 3
    assert count(handler="/size", method="other", status="4xx") == 1
