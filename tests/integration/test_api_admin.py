"""The status page and the prefix cache's reset: what they show and do, and for whom."""

import asyncio
import base64

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.gateway_kit import Harness, open_harness, until

RESET = "/admin/prefix-cache/reset"
POLICY = "/admin/policy"
JSON = {"content-type": "application/json"}


async def test_the_page_shows_engine_and_tenants(sqlite_url: str) -> None:
    async with open_harness(sqlite_url) as harness:
        secret = await harness.tenant("acme")
        async with harness.client(secret) as http:
            body = {"model": "bytes", "prompt": "text:hello|"}
            assert (await http.post("/v1/completions", json=body)).status_code == 200
            await harness.until_idle()
            response = await http.get("/admin")
            style = await http.get("/admin/status.css")

    assert response.status_code == 200
    assert "default-src 'none'" in response.headers["content-security-policy"]
    assert '<dd data-testid="model">bytes</dd>' in response.text
    assert "● serving" in response.text
    # 11 prompt tokens, 6 output tokens with the one that ends the text.
    assert '<th scope="row">acme</th><td>1</td><td>0</td><td>0</td><td>23</td>' in response.text
    assert style.headers["content-type"].startswith("text/css")


@pytest.mark.parametrize(
    ("authorization", "status"),
    [
        (None, 401),
        ("Bearer wrong", 401),
        ("Basic not-base64!", 401),
        ("Basic " + base64.b64encode(b"me:wrong").decode(), 401),
        ("Basic é".encode("latin-1"), 401),
        ("Bearer t0kén".encode("latin-1"), 401),
        ("Basic " + base64.b64encode("anyone:t0kén".encode()).decode(), 200),
        ("Bearer t0kén".encode(), 200),
    ],
)
async def test_a_token_guards_it(
    sqlite_url: str, authorization: str | bytes | None, status: int
) -> None:
    headers = {} if authorization is None else {"authorization": authorization}
    environ = {"HEADRACE_OPERATOR_TOKEN": "t0kén"}
    async with (
        open_harness(sqlite_url, environ=environ) as harness,
        harness.client(**headers) as http,
    ):
        response = await http.get("/admin")
        metrics = await http.get("/metrics")
        reset = await http.post(RESET, json={})
        switched = await http.post(POLICY, json={"name": "vtc"})

    assert [r.status_code for r in (response, metrics, reset, switched)] == [status] * 4
    if status == 401:
        assert response.headers["www-authenticate"].startswith("Basic")
        assert reset.headers["www-authenticate"].startswith("Basic")


async def cached_tokens(harness: Harness, secret: str) -> int:
    """Send the same prompt of 48 tokens, 3 blocks; how many of them were in the cache."""
    async with harness.client(secret) as http:
        body = {"model": "bytes", "prompt": "text:hello|".ljust(48, "."), "max_tokens": 8}
        response = await http.post("/v1/completions", json=body)
    assert response.status_code == 200
    await harness.until_idle()
    return response.json()["usage"]["prompt_tokens_details"]["cached_tokens"]


async def series(http: httpx.AsyncClient, name: str) -> dict[str, float]:
    """By its label values, in the order of the labels' names."""
    text = (await http.get("/metrics")).text
    return {
        " ".join(label for _, label in sorted(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == name
    }


async def test_the_prefix_cache_is_reset_for_one_tenant_or_for_all(sqlite_url: str) -> None:
    async with open_harness(sqlite_url) as harness, harness.client() as http:
        secrets = [await harness.tenant(slug) for slug in ("acme", "zeta")]

        async def hits() -> list[int]:
            return [await cached_tokens(harness, secret) for secret in secrets]

        async def freed(**body: str) -> int:
            response = await http.post(RESET, json=body)
            assert response.status_code == 200
            assert set(response.json()) == {"freed_blocks"}
            blocks: int = response.json()["freed_blocks"]
            return blocks

        assert await hits() == [0, 0]
        assert await hits() == [32, 32]  # all but the block whose logits are needed
        assert await freed(tenant="nobody") == 0
        assert await freed(tenant="acme") == 3
        assert await freed(tenant="acme") == 0
        assert await hits() == [0, 32]
        assert await freed() == 6
        assert await freed() == 0
        assert await hits() == [0, 0]

        # Cached blocks and what was looked up, as /metrics tells it.
        blocks = await series(http, "headrace_kv_blocks")
        assert blocks == {
            f"{state} {slug}": 3 * (state == "cached")
            for slug in ("acme", "zeta")
            for state in ("held", "cached", "host")
        }
        queried = await series(http, "headrace_prefix_cache_queried_tokens_total")
        assert queried == {"acme": 4 * 48, "zeta": 4 * 48}
        hit = await series(http, "headrace_prefix_cache_hit_tokens_total")
        assert hit == {"acme": 32, "zeta": 64}
        assert await series(http, "headrace_prefix_cache_evicted_blocks_total") == {
            "acme": 0,
            "zeta": 0,
        }
        assert await series(http, "vllm:prefix_cache_queries_total") == {"0 bytes": 8 * 48}
        assert await series(http, "vllm:prefix_cache_hits_total") == {"0 bytes": 96}


@pytest.mark.parametrize(
    ("content", "headers", "status"),
    [
        # What a form or a plain fetch of a foreign page can send.
        ("{}", {}, 415),
        ("{}", {"content-type": "text/plain"}, 415),
        ("{}", {"content-type": "application/x-www-form-urlencoded"}, 415),
        ("{}", {"content-type": "text/plain; application/json"}, 415),
        ("{}", {"content-type": "Application/JSON; charset=utf-8"}, 200),
        ("", JSON, 400),
        ("[]", JSON, 400),
        ("null", JSON, 400),
        ('{"tenant": 1}', JSON, 400),
        ('{"tenat": "acme"}', JSON, 400),  # misspelt: it is not everybody that is meant
    ],
)
async def test_a_wrong_reset_changes_nothing(
    sqlite_url: str, content: str, headers: dict[str, str], status: int
) -> None:
    async with open_harness(sqlite_url) as harness, harness.client() as http:
        secret = await harness.tenant("acme")
        await cached_tokens(harness, secret)
        response = await http.post(RESET, content=content, headers=headers)
        hit = await cached_tokens(harness, secret)

    assert response.status_code == status
    assert hit == (0 if status == 200 else 32)
    if status != 200:
        assert set(response.json()["error"]) == {"message", "type", "param", "code"}


async def test_a_reset_is_a_post_to_an_engine_that_runs(sqlite_url: str) -> None:
    async with open_harness(sqlite_url) as harness, harness.client() as http:
        got = await http.get(RESET)
        await harness.gateway.engine.drain(1)
        stopped = await http.post(RESET, json={})

    assert (got.status_code, got.headers["allow"]) == (405, "POST")
    assert stopped.status_code == 503
    assert stopped.json()["error"]["code"] == "server_is_overloaded"
    assert "retry-after" in stopped.headers


async def test_who_leaves_during_a_reset_does_the_engine_no_harm(sqlite_url: str) -> None:
    async with open_harness(sqlite_url) as harness, harness.client() as http:
        secret = await harness.tenant("acme")
        assert await cached_tokens(harness, secret) == 0
        harness.runner.open.clear()
        running = asyncio.create_task(cached_tokens(harness, secret))
        await until(lambda: harness.core.has_work)
        waiting = asyncio.create_task(http.post(RESET, json={}))
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(waiting, 0.1)
        harness.runner.open.set()

        assert await running == 32
        assert await cached_tokens(harness, secret) == 0  # it was done
        assert harness.gateway.engine.health().reason == "ok"


async def test_the_policy_is_switched_while_requests_run_and_wait(sqlite_url: str) -> None:
    async with (
        open_harness(sqlite_url, max_seqs=1, step_seconds=0.005) as harness,
        harness.client() as http,
        harness.client(await harness.tenant("acme")) as tenant,
    ):
        body = {"model": "bytes", "prompt": "x", "max_tokens": 40}
        sent = [asyncio.create_task(tenant.post("/v1/completions", json=body)) for _ in range(3)]
        await until(lambda: harness.gateway.engine.snapshot().num_waiting == 2)
        for name in ("drr", "vtc", "priority", "fcfs"):
            response = await http.post(POLICY, json={"name": name})
            assert (response.status_code, response.json()) == (200, {"policy": name})
            await until(lambda name=name: harness.gateway.engine.snapshot().policy == name)
        assert not all(task.done() for task in sent)
        assert await series(http, "headrace_scheduler_policy_info") == {"fcfs": 1}
        assert "<dt>Policy</dt><dd>fcfs</dd>" in (await http.get("/admin")).text
        answers = [await task for task in sent]

    assert [a.json()["usage"]["completion_tokens"] for a in answers] == [40] * 3


@pytest.mark.parametrize(
    ("content", "headers", "status"),
    [
        ('{"name": "vtc"}', {}, 415),
        ("{}", JSON, 400),
        ('{"name": null}', JSON, 400),
        ('{"name": "vtc", "for": "acme"}', JSON, 400),
        ('{"name": "best"}', JSON, 400),
    ],
)
async def test_a_policy_that_cannot_be_is_refused(
    sqlite_url: str, content: str, headers: dict[str, str], status: int
) -> None:
    async with open_harness(sqlite_url) as harness, harness.client() as http:
        response = await http.post(POLICY, content=content, headers=headers)
        assert harness.core.scheduler.policy.name == "wfq"
    assert response.status_code == status
    if "best" in content:
        error = response.json()["error"]
        assert (error["param"], error["code"]) == ("name", "invalid_value")
        assert "drf, drr, fcfs, priority, vtc, wfq" in error["message"]
