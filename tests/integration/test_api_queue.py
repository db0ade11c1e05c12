"""How many requests may wait for the engine, how long, and what those read that may not."""

import asyncio
import time
from contextlib import asynccontextmanager

import pytest

from tenants.classes import set_class
from tenants.policy import Limit
from tests.gateway_kit import MODEL, open_harness, until

PATH = "/v1/completions"
REQUESTS = Limit(metric="requests", limit=100, window_seconds=3600)


def completion(prompt, **more):
    return {"model": MODEL, "prompt": prompt, "max_tokens": 8} | more


@pytest.fixture
async def harness(sqlite_url):
    """One sequence runs at a time; silence on a stream soon sends a comment."""
    environ = {"HEADRACE_KEEPALIVE_SECONDS": "0.02"}
    async with open_harness(sqlite_url, max_seqs=1, step_seconds=0.005, environ=environ) as harness:
        yield harness


async def change_class(harness, name, **changes):
    await set_class(harness.store.database, name, changes, actor="op", now=time.time())


async def limit_wait(harness, seconds):
    await change_class(harness, "standard", max_queue_seconds=seconds)


@asynccontextmanager
async def busy(harness, http):
    """The engine's only slot is taken."""
    task = asyncio.create_task(http.post(PATH, json=completion("x", max_tokens=2000)))
    await until(lambda: harness.gateway.engine.snapshot().num_running == 1)
    yield task
    task.cancel()
    await asyncio.wait({task})
    await harness.until_idle()


def num_waiting(harness):
    return harness.gateway.engine.snapshot().num_waiting


@pytest.mark.parametrize("stream", [False, True])
async def test_who_waits_longer_than_the_class_allows_reads_a_429(harness, stream):
    await limit_wait(harness, 0.2)
    zeta, acme = await harness.tenant("zeta"), await harness.tenant("acme", (REQUESTS,))
    async with harness.client(zeta) as other, harness.client(acme) as http:
        async with busy(harness, other) as running:
            began = time.monotonic()
            response = await http.post(PATH, json=completion("text:ok", stream=stream))
            waited = time.monotonic() - began
            assert not running.done()  # it began in time, and so is not cut short
            [row] = await harness.rows()
        metrics = (await http.get("/metrics")).text
        after = await http.post(PATH, json=completion("text:ok"))

    error = response.json()["error"]
    assert (response.status_code, error["type"]) == (429, "rate_limit_error")
    assert error["code"] == "rate_limit_exceeded"
    assert "0.2 s" in error["message"]
    assert int(response.headers["retry-after"]) >= 1
    assert 0.2 <= waited < 5
    assert (row["status"], row["error_code"]) == ("aborted", "rate_limit_exceeded")
    assert (row["tokens_in"], row["tokens_out"], row["admitted_at"]) == (0, 0, None)
    assert 'headrace_rate_limited_total{limit="queue_seconds",tenant="acme"} 1.0' in metrics
    assert after.status_code == 200
    # What was refused does not count.
    assert after.headers["x-ratelimit-remaining-requests"] == "99"


async def test_who_begins_in_time_may_run_longer(harness):
    await limit_wait(harness, 0.1)
    async with harness.client(await harness.tenant("acme")) as http:
        began = time.monotonic()
        response = await http.post(PATH, json=completion("x", max_tokens=60))
    assert time.monotonic() - began > 0.3
    assert response.json()["usage"]["completion_tokens"] == 60


async def test_a_short_wait_ends_well(harness):
    await limit_wait(harness, 8)
    secret = await harness.tenant("acme")
    async with harness.client(secret) as http:
        first = asyncio.create_task(http.post(PATH, json=completion("x", max_tokens=40)))
        await until(lambda: harness.gateway.engine.snapshot().num_running == 1)
        second = await http.post(PATH, json=completion("text:ok", stream=True))
        assert (await first).status_code == 200
    assert second.status_code == 200
    assert second.text.endswith("data: [DONE]\n\n")


async def test_a_limit_on_what_waits_refuses_the_next_and_no_other_tenant(harness):
    limits = (Limit(metric="queued", limit=1), REQUESTS)
    acme, zeta = await harness.tenant("acme", limits), await harness.tenant("zeta")
    async with harness.client(acme) as http, harness.client(zeta) as other:
        async with busy(harness, http) as running:  # begun, so it does not wait any more
            waiting = asyncio.create_task(http.post(PATH, json=completion("text:ok")))
            await until(lambda: num_waiting(harness) == 1)
            refused = await http.post(PATH, json=completion("text:no"))
            elsewhere = asyncio.create_task(other.post(PATH, json=completion("text:ok")))
            await until(lambda: num_waiting(harness) == 2)
            # Who leaves the queue makes room for the next.
            waiting.cancel()
            await until(lambda: num_waiting(harness) == 1)
            await until(lambda: len(harness.gateway.admission._live) == 2)
            next_one = asyncio.create_task(http.post(PATH, json=completion("text:ok")))
            await until(lambda: num_waiting(harness) == 2)
            assert not running.done()
        assert [(await one).status_code for one in (elsewhere, next_one)] == [200, 200]
        metrics = (await http.get("/metrics")).text

    error = refused.json()["error"]
    assert (refused.status_code, error["type"]) == (429, "rate_limit_error")
    assert error["code"] == "rate_limit_exceeded"
    assert "this tenant on queued at once: Limit 1, Used 1, Requested 1" in error["message"]
    assert int(refused.headers["retry-after"]) >= 1
    assert 'headrace_rate_limited_total{limit="queued",tenant="acme"} 1.0' in metrics
    assert len(await harness.rows()) == 4  # the refused one was never a request of the books


@pytest.mark.parametrize("stream", [False, True])
async def test_a_full_class_refuses_all_its_tenants_and_no_other_class(harness, stream):
    """`flex` is served by the class batch, which the tenants share."""
    await change_class(harness, "batch", max_queued=1)
    acme, zeta = await harness.tenant("acme", (REQUESTS,)), await harness.tenant("zeta")
    flex = {"service_tier": "flex", "stream": stream}
    async with harness.client(acme) as http, harness.client(zeta) as other:
        async with busy(harness, http):
            waiting = asyncio.create_task(other.post(PATH, json=completion("text:ok", **flex)))
            await until(lambda: num_waiting(harness) == 1)
            refused = await http.post(PATH, json=completion("text:no", **flex))
            standard = asyncio.create_task(http.post(PATH, json=completion("text:ok")))
            await until(lambda: num_waiting(harness) == 2)
        assert [(await one).status_code for one in (waiting, standard)] == [200, 200]
        after = await http.post(PATH, json=completion("text:ok", **flex))
        metrics = (await http.get("/metrics")).text

    error = refused.json()["error"]
    assert (refused.status_code, error["type"]) == (429, "rate_limit_error")
    assert (error["code"], error["param"]) == ("rate_limit_exceeded", None)
    assert error["message"] == (
        "Rate limit reached for the class batch on queued at once. Please try again as soon as "
        "another request ends."
    )
    assert "zeta" not in refused.text
    assert refused.headers["retry-after"] == "1"
    assert 1000 <= int(refused.headers["retry-after-ms"]) <= 1100
    assert after.status_code == 200
    assert 'headrace_rate_limited_total{limit="queued",tenant="acme"} 1.0' in metrics
    assert 'headrace_tenant_requests_total{outcome="rejected",tenant="acme"} 1.0' in metrics
    served = [row["priority_class"] for row in await harness.rows()]
    assert sorted(served) == ["batch", "batch", "standard", "standard"]
