"""Every way to get a request wrong has its status and the four keys; none harms the next one."""

import asyncio
import time

import pytest

from engine.errors import TemplateError
from tenants.keys import mint
from tests.gateway_kit import MODEL, open_harness

CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "text:ok"}]}
INVALID = "invalid_request_error"


@pytest.fixture
async def harness(sqlite_url):
    async with open_harness(sqlite_url) as harness:
        yield harness


@pytest.fixture
async def http(harness):
    async with harness.client(await harness.tenant("acme")) as client:
        yield client


def check(response, status, kind, code, param=None):
    error = response.json()["error"]
    assert response.status_code == status, error
    assert set(error) == {"message", "type", "param", "code"}
    assert (error["type"], error["code"], error["param"]) == (kind, code, param)
    assert error["message"]
    assert response.headers["x-request-id"].startswith("req_")


@pytest.mark.parametrize(
    ("request_", "status", "code", "param"),
    [
        ({"content": b"{"}, 400, None, None),
        ({"content": b"\xff\xfe"}, 400, None, None),
        ({"content": b""}, 400, None, None),
        ({"json": []}, 400, "invalid_value", None),
        ({"json": {"messages": CHAT["messages"]}}, 400, "invalid_value", "model"),
        ({"json": {"model": MODEL}}, 400, "invalid_value", "messages"),
        ({"json": CHAT | {"temperature": 9}}, 400, "invalid_value", "temperature"),
        ({"json": CHAT | {"suffix": "x"}}, 400, "unsupported_parameter", "suffix"),
        ({"json": CHAT | {"n": 9}}, 400, "invalid_value", "n"),  # more than run at once
        ({"json": CHAT | {"stop": ["x"] * 500}}, 400, "invalid_value", "stop"),
        ({"json": CHAT | {"logit_bias": {"257": 1}}}, 400, "invalid_value", "logit_bias"),
        ({"json": CHAT | {"stop_token_ids": [257]}}, 400, "invalid_value", "stop_token_ids"),
        ({"json": CHAT | {"min_tokens": 600}}, 400, "invalid_value", "min_tokens"),
        ({"json": CHAT | {"model": "gpt-4"}}, 404, "model_not_found", None),
        ({"data": {"model": MODEL}}, 415, "unsupported_media_type", None),
        ({"content": b"x" * (4 * 2**20 + 1)}, 413, "request_too_large", None),
        (
            {"json": CHAT | {"messages": [{"role": "user", "content": "x" * 3000}]}},
            400,
            "context_length_exceeded",
            "messages",
        ),
        ({"json": CHAT | {"max_tokens": 3000}}, 400, "context_length_exceeded", "messages"),
    ],
)
async def test_a_wrong_chat_request(harness, http, request_, status, code, param):
    check(await http.post("/v1/chat/completions", **request_), status, INVALID, code, param)

    # Nothing was reserved, counted or broken by it.
    assert await harness.rows() == []
    assert await harness.num_reserved() == 0
    assert (await http.post("/v1/chat/completions", json=CHAT)).status_code == 200


@pytest.mark.parametrize(
    ("prompt", "code"),
    [
        ([[]], "invalid_value"),
        ([0, 257], "invalid_value"),
        ([-1], "invalid_value"),
        ([2**70], "invalid_value"),
        ("", "invalid_value"),
        (["a", ""], "invalid_value"),
        ("x" * 2048, "context_length_exceeded"),
        ([1] * 2048, "context_length_exceeded"),
        ([2**70] * 2048, "context_length_exceeded"),  # its length is known before its ids
        (["a", "x" * 5000], "context_length_exceeded"),
    ],
)
async def test_a_wrong_prompt(http, prompt, code):
    response = await http.post("/v1/completions", json={"model": MODEL, "prompt": prompt})

    check(response, 400, INVALID, code, "prompt")


async def test_the_wording_of_context_errors(http):
    async def message(**fields):
        response = await http.post("/v1/completions", json={"model": MODEL, **fields})
        return response.json()["error"]["message"]

    assert await message(prompt="x" * 2000, max_tokens=100) == (
        "This model's maximum context length is 2048 tokens. However, you requested 2100 tokens "
        "(2000 in the prompt, 100 in the completion). Please reduce the length of the prompt or "
        "completion."
    )
    assert await message(prompt="x" * 2048) == (
        "This model's maximum context length is 2048 tokens. However, your prompt resulted in "
        "2048 tokens, and at least one is needed for the completion. Please reduce the length of "
        "the prompt."
    )


async def test_a_text_that_cannot_fit_is_refused_before_its_tokens_are_sought(sqlite_url):
    def never(messages, **_):
        raise AssertionError("tokenised")

    content = "x" * (4 * 2048 + 1)  # the longest token has 4 bytes
    async with open_harness(sqlite_url, encode_chat=never) as harness:
        secret = await harness.tenant("acme")
        async with harness.client(secret) as http:
            messages = [{"role": "user", "content": content}]
            response = await http.post("/v1/chat/completions", json=CHAT | {"messages": messages})

    check(response, 400, INVALID, "context_length_exceeded", "messages")
    assert "at least 2049 tokens" in response.json()["error"]["message"]


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/v1/nothing", 404, "unknown_url"),
        ("GET", "/v1/chat/completions", 405, "method_not_supported"),
        ("POST", "/v1/models", 405, "method_not_supported"),
        ("GET", "/v1/models/gpt-4", 404, "model_not_found"),
        ("GET", "/v1/models/a/b", 404, "model_not_found"),
        ("GET", "/healthz/", 404, "unknown_url"),
    ],
)
async def test_a_wrong_url(http, method, path, status, code):
    check(await http.request(method, path), status, INVALID, code)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/models"])
@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"authorization": "Bearer"},
        {"authorization": "Bearer "},
        {"authorization": "Basic aHI6aHI="},
        {"authorization": "Bearer hr_short"},
        {"authorization": "Bearer ' OR '1'='1"},
        {"authorization": "Bearer sk-0123456789"},
        {"x-api-key": "nonsense"},
    ],
)
async def test_no_key_or_nonsense_is_401_before_the_database(harness, path, headers, monkeypatch):
    monkeypatch.setattr(harness.store, "resolve_key", None)

    async with harness.client(**headers) as http:
        method = "GET" if path == "/v1/models" else "POST"
        response = await http.request(method, path)

    check(response, 401, INVALID, "invalid_api_key")


async def test_unknown_revoked_expired_and_suspended_keys_get_one_answer(harness):
    store, now = harness.store, time.time()
    bodies = []

    async def refused(secret):
        async with harness.client(secret) as http:
            response = await http.post("/v1/chat/completions", json=CHAT)
        check(response, 401, INVALID, "invalid_api_key")
        bodies.append(response.text)

    await refused(mint())
    await harness.tenant("acme")
    key, revoked = await store.create_key("acme", "revoked", actor="test", now=now)
    await store.revoke_key(key.id, actor="test", now=now)
    await refused(revoked)
    _, expired = await store.create_key(
        "acme", "expired", actor="test", now=now - 10, expires_at=now - 5
    )
    await refused(expired)
    _, suspended = await store.create_key("acme", "suspended", actor="test", now=now)
    await store.set_tenant_status("acme", "suspended", actor="test", now=now)
    await refused(suspended)
    assert len(set(bodies)) == 1


async def test_either_header_carries_the_key(harness):
    secret = await harness.tenant("acme")
    for headers in ({"authorization": f"bearer {secret}"}, {"x-api-key": secret}):
        async with harness.client(**headers) as http:
            assert (await http.get("/v1/models")).status_code == 200


async def test_with_the_store_away_it_is_503_and_heals(harness, http, tmp_path):
    path = tmp_path / "headrace.db"
    harness_key = http.headers["authorization"].removeprefix("Bearer ")
    await harness.store.close()
    path.rename(tmp_path / "away.db")
    path.mkdir()  # nothing can be opened here

    check(
        await http.post("/v1/chat/completions", json=CHAT),
        503,
        "service_unavailable_error",
        "policy_store_unavailable",
    )
    assert (await http.get("/readyz")).status_code == 200  # the engine is well

    await harness.store.close()
    path.rmdir()
    (tmp_path / "away.db").rename(path)
    async with harness.client(harness_key) as again:
        assert (await again.post("/v1/chat/completions", json=CHAT)).status_code == 200


async def test_one_failing_sequence_harms_only_its_request(harness, http):
    failing = CHAT | {"messages": [{"role": "user", "content": "fail:1"}]}

    bad, good = await asyncio.gather(
        http.post("/v1/chat/completions", json=failing),
        http.post("/v1/chat/completions", json=CHAT),
    )

    check(bad, 500, "server_error", "engine_error")
    assert good.status_code == 200
    rows = {row["request_id"]: row for row in await harness.rows()}
    row = rows[bad.headers["x-request-id"]]
    assert (row["status"], row["finish_reason"], row["error_code"]) == (
        "failed",
        "error",
        "engine_error",
    )


async def test_a_failure_in_the_middle_of_a_stream_is_an_event(http):
    failing = CHAT | {"messages": [{"role": "user", "content": "fail:3"}], "stream": True}

    response = await http.post("/v1/chat/completions", json=failing)

    assert response.status_code == 200
    assert response.text.endswith(
        'data: {"error":{"message":"The engine failed on this request.","type":"server_error",'
        '"param":null,"code":"engine_error"}}\n\ndata: [DONE]\n\n'
    )


async def test_a_failure_before_the_first_token_of_a_stream_has_a_real_status(http):
    failing = CHAT | {"messages": [{"role": "user", "content": "fail:1"}], "stream": True}

    check(
        await http.post("/v1/chat/completions", json=failing), 500, "server_error", "engine_error"
    )


async def test_a_device_that_dies_fails_what_ran(harness, http):
    harness.runner.explode = True

    check(await http.post("/v1/chat/completions", json=CHAT), 500, "server_error", "engine_error")
    harness.runner.explode = False
    assert (await http.post("/v1/chat/completions", json=CHAT)).status_code == 200


async def test_a_draining_engine_refuses_before_any_work(harness, http):
    await harness.gateway.engine.drain(1)

    response = await http.post("/v1/chat/completions", json=CHAT)

    check(response, 503, "service_unavailable_error", "server_is_overloaded")
    assert response.headers["retry-after"] == "5"
    ready = await http.get("/readyz")
    assert (ready.status_code, ready.json()["reason"]) == (503, "draining")
    assert (await http.get("/healthz")).status_code == 200


async def test_a_stopped_engine_is_not_alive(harness, http):
    await harness.gateway.engine.stop()

    assert (await http.get("/healthz")).status_code == 503
    assert (await http.get("/readyz")).status_code == 503


async def test_messages_that_the_template_refuses_are_the_clients_error(sqlite_url):
    def refuse(messages, **_):
        raise TemplateError("roles must alternate")

    async with open_harness(sqlite_url, encode_chat=refuse) as harness:
        secret = await harness.tenant("acme")
        async with harness.client(secret) as http:
            response = await http.post("/v1/chat/completions", json=CHAT)

    check(response, 400, INVALID, "invalid_value", "messages")
