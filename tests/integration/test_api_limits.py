"""Limits at the gate: refusals change nothing, every exit settles once."""

import asyncio
import time
from dataclasses import replace

import pytest

from engine.client import GenerationRequest
from engine.sequence import SamplingParams
from gateway.app import create_app
from gateway.choices import Prompt
from gateway.client import Client
from gateway.deadlines import Arrival
from gateway.errors import ClientGoneError
from tenants.errors import StoreUnavailableError
from tenants.ledger import Ledger
from tenants.policy import Limit
from tests.gateway_kit import MODEL, encode, open_harness, until

YEAR = 366 * 86_400


@pytest.fixture
async def harness(sqlite_url):
    async with open_harness(sqlite_url) as harness:
        yield harness


def completion(prompt, **fields):
    return {"model": MODEL, "prompt": prompt, **fields}


async def test_a_token_limit_counts_prompt_and_output(harness):
    secret = await harness.tenant(
        "acme", (Limit(metric="tokens_total", limit=100, window_seconds=YEAR),)
    )
    async with harness.client(secret) as http:
        first = await http.post("/v1/completions", json=completion("text:ab", max_tokens=50))
        assert first.headers["x-ratelimit-remaining-tokens"] == "43"  # 100 - 7 - 50, reserved
        second = await http.post("/v1/completions", json=completion("text:ab", max_tokens=83))
        assert second.status_code == 200  # 7 + 3 were used, the rest came back
        third = await http.post("/v1/completions", json=completion("text:ab", max_tokens=80))

    assert third.status_code == 429
    assert third.json()["error"]["type"] == "tokens"
    assert "Limit 100, Used 20, Requested 87" in third.json()["error"]["message"]


async def test_what_never_fits_says_so(harness):
    secret = await harness.tenant(
        "acme", (Limit(metric="tokens_total", limit=50, window_seconds=60),)
    )
    async with harness.client(secret) as http:
        response = await http.post("/v1/completions", json=completion("x" * 60))

    assert response.status_code == 429
    assert response.json()["error"]["code"] == "request_too_large_for_limit"
    assert response.headers["x-should-retry"] == "false"
    assert response.headers["x-ratelimit-remaining-tokens"] == "50"
    assert "retry-after" not in response.headers


async def test_a_context_limit_is_a_400(harness):
    secret = await harness.tenant("acme", (Limit(metric="context_tokens", limit=50),))
    async with harness.client(secret) as http:
        response = await http.post("/v1/completions", json=completion("x" * 60))

    assert response.status_code == 400
    assert response.json()["error"]["code"] == "context_length_exceeded"


async def test_slots_bound_what_runs_and_come_back(harness):
    secret = await harness.tenant("acme", (Limit(metric="concurrent", limit=3),))
    harness.runner.open.clear()
    async with harness.client(secret) as http:
        requests = [
            asyncio.create_task(http.post("/v1/completions", json=completion("text:a")))
            for _ in range(8)
        ]
        done, pending = await asyncio.wait(requests, timeout=2)
        assert sorted(task.result().status_code for task in done) == [429] * 5
        assert len(pending) == 3
        harness.runner.open.set()
        await asyncio.wait(pending)
        assert [task.result().status_code for task in pending] == [200] * 3
        assert (await http.post("/v1/completions", json=completion("text:a"))).status_code == 200

    assert len(await harness.rows()) == 4
    assert await harness.ledger.find_imbalances() == {}


async def test_a_refused_request_changes_no_counter(harness):
    limits = (
        Limit(metric="requests", limit=10, window_seconds=YEAR),
        Limit(metric="tokens_total", limit=1000, window_seconds=YEAR),
        Limit(metric="concurrent", limit=1),
    )
    secret = await harness.tenant("acme", limits)
    harness.runner.open.clear()
    async with harness.client(secret) as http:
        running = asyncio.create_task(http.post("/v1/completions", json=completion("text:a")))
        await until(harness.num_reserved)
        for _ in range(3):
            refused = await http.post("/v1/completions", json=completion("text:a"))
            assert refused.json()["error"]["type"] == "rate_limit_error"
            assert refused.headers["retry-after"] == "1"
            assert refused.headers["x-headrace-remaining-concurrent"] == "0"
        harness.runner.open.set()
        await running
        last = await http.post("/v1/completions", json=completion("text:a"))

    assert last.headers["x-ratelimit-remaining-requests"] == "8"


async def test_settling_waits_out_a_store_that_is_away(harness, monkeypatch):
    """The answer arrives; the row follows when the store is back, once."""
    real, calls = harness.ledger.settle, []

    async def flaky(request_id, settlement, *, now):
        calls.append(request_id)
        if len(calls) <= 3:
            raise StoreUnavailableError("away")
        return await real(request_id, settlement, now=now)

    monkeypatch.setattr(harness.ledger, "settle", flaky)
    async with harness.client(await harness.tenant("acme")) as http:
        response = await http.post("/v1/completions", json=completion("text:ab"))

    assert response.status_code == 200
    await harness.until_idle()
    assert len(calls) == 4
    assert [row["tokens_out"] for row in await harness.rows()] == [3]


async def test_a_cancelled_request_is_settled(harness):
    """The task itself is cancelled, as a server does that stops at once."""
    harness.runner.step_seconds = 0.02
    secret = await harness.tenant("acme", (Limit(metric="concurrent", limit=1),))
    async with harness.client(secret) as http:
        request = completion("x", max_tokens=1000)
        task = asyncio.create_task(http.post("/v1/completions", json=request))
        await until(lambda: harness.runner.num_steps >= 3)
        task.cancel()
        await asyncio.wait({task})
        await harness.until_idle()

        [row] = await harness.rows()
        assert (row["status"], row["tokens_in"]) == ("aborted", 1)
        assert row["tokens_out"] >= 3
        assert (await http.post("/v1/completions", json=completion("text:a"))).status_code == 200


async def test_a_settlement_survives_a_second_cancellation(harness, monkeypatch):
    real, begun, go_on = harness.ledger.settle, asyncio.Event(), asyncio.Event()

    async def slow(request_id, settlement, *, now):
        begun.set()
        await go_on.wait()
        return await real(request_id, settlement, now=now)

    monkeypatch.setattr(harness.ledger, "settle", slow)
    async with harness.client(await harness.tenant("acme")) as http:
        task = asyncio.create_task(http.post("/v1/completions", json=completion("text:ab")))
        await begun.wait()
        for _ in range(2):
            task.cancel()
            await asyncio.sleep(0.01)
        await asyncio.wait({task})
        go_on.set()

    await harness.until_idle()
    assert [row["status"] for row in await harness.rows()] == ["completed"]


class Engine:
    """Passes everything on to the real engine, but for what a test breaks."""

    def __init__(self, engine):
        self._engine = engine
        self.refuse_after = None
        self.break_stream = False
        self.open = asyncio.Event()
        self.open.set()

    def __getattr__(self, name):
        return getattr(self._engine, name)

    async def submit(self, request: GenerationRequest):
        await self.open.wait()
        if self.refuse_after == 0:
            raise RuntimeError("no")
        if self.refuse_after is not None:
            self.refuse_after -= 1
        stream = await self._engine.submit(request)
        return self._broken(stream) if self.break_stream else stream

    async def _broken(self, stream):
        seen = 0
        async for event in stream:
            yield event
            seen += 1
            if seen == 4:
                raise ConnectionError("the engine's process is gone")


async def test_a_client_that_leaves_during_submission_is_aborted(sqlite_url):
    """As with an engine in another process, which cannot abort what has not reached it."""
    async with open_harness(sqlite_url, wrap_engine=Engine, step_seconds=0.01) as harness:
        engine, client = harness.gateway.engine, Client()
        secret = await harness.tenant("acme")
        principal = await harness.store.resolve_key(secret, now=time.time())
        prompt = Prompt((1,), SamplingParams(max_tokens=1000))
        engine.open.clear()

        async def generate():
            admitted = harness.gateway.admission.admit(
                principal, "req_1", [prompt], client, Arrival(0.0)
            )
            async with admitted as generation:
                async for _ in generation.events(None):
                    pass

        task = asyncio.create_task(generate())
        await until(harness.num_reserved)
        client.leave()
        engine.open.set()

        with pytest.raises(ClientGoneError):
            await task
        await harness.until_idle()
        [row] = await harness.rows()
        assert row["status"] == "aborted"
        assert row["tokens_out"] <= 2  # a step may have been under way


async def test_when_one_of_several_prompts_is_refused_the_others_are_ended(sqlite_url, caplog):
    async with open_harness(sqlite_url, wrap_engine=Engine) as harness:
        harness.gateway.engine.refuse_after = 2
        harness.runner.step_seconds = 0.01
        async with harness.client(await harness.tenant("acme")) as http:
            request = completion(["a", "b", "c"], max_tokens=500)
            response = await http.post("/v1/completions", json=request)

        assert response.status_code == 500
        await harness.until_idle()
        [row] = await harness.rows()
        assert (row["status"], row["error_code"]) == ("failed", "internal_error")


async def test_an_engine_that_breaks_off_is_an_error_and_settled_by_what_arrived(
    sqlite_url, caplog
):
    async with open_harness(sqlite_url, wrap_engine=Engine) as harness:
        harness.gateway.engine.break_stream = True
        async with harness.client(await harness.tenant("acme")) as http:
            request = completion("x", max_tokens=500)
            response = await http.post("/v1/completions", json=request)

        assert response.json()["error"]["code"] == "engine_error"
        await harness.until_idle()
        [row] = await harness.rows()
        assert (row["status"], row["tokens_in"], row["tokens_out"]) == ("failed", 1, 3)


async def test_leases_of_running_requests_are_renewed_and_of_crashed_ones_released(sqlite_url):
    clock = [1000.0]
    options = {"environ": {"HEADRACE_LEASE_SECONDS": "10"}, "now": lambda: clock[0]}
    async with open_harness(sqlite_url, **options) as harness:
        admission = harness.gateway.admission
        secret = await harness.tenant("acme", (Limit(metric="concurrent", limit=2),))
        principal = await harness.store.resolve_key(secret, now=clock[0])
        crashed = {"prompt_tokens": 1, "max_output_tokens": 1, "now": clock[0]}
        await harness.ledger.reserve(principal, "req_crashed", **crashed)
        harness.runner.open.clear()
        prompt = Prompt((1,), SamplingParams(max_tokens=1))

        async with admission.admit(
            principal, "req_alive", [prompt], Client(), Arrival(0.0)
        ) as generation:
            clock[0] += 9
            await admission.renew_leases()
            clock[0] += 9
            await admission.release_crashed()
            assert [row["request_id"] for row in await harness.rows()] == ["req_crashed"]
            harness.runner.open.set()
            events = [event async for _, event in generation.events(None)]
            assert events[-1].reason == "length"

        assert [row["status"] for row in await harness.rows()] == ["lost", "completed"]
        assert await harness.ledger.find_imbalances() == {}


async def test_a_gateway_that_stalled_longer_than_its_leases_keeps_what_it_runs(sqlite_url, caplog):
    clock = [1000.0]
    async with open_harness(sqlite_url, now=lambda: clock[0]) as harness:
        harness.runner.open.clear()
        async with harness.client(await harness.tenant("acme")) as http:
            request = completion("text:ab")
            task = asyncio.create_task(http.post("/v1/completions", json=request))
            await until(harness.num_reserved)
            clock[0] += 3600
            await harness.gateway.admission.release_crashed()
            await harness.gateway.admission.tend_leases()
            harness.runner.open.set()
            await task

        assert [(row["status"], row["tokens_out"]) for row in await harness.rows()] == [
            ("completed", 3)
        ]
        assert caplog.records == []


async def test_own_leases_are_renewed_before_others_are_released(sqlite_url):
    """So that no other gateway takes them between the two."""
    clock = [1000.0]
    async with open_harness(sqlite_url, now=lambda: clock[0]) as harness:
        secret = await harness.tenant("acme")
        principal = await harness.store.resolve_key(secret, now=clock[0])
        other = Ledger(harness.store.database, instance_id="gw_other", lease_seconds=60)
        prompt = Prompt((1,), SamplingParams(max_tokens=1))
        harness.runner.open.clear()
        async with harness.gateway.admission.admit(
            principal, "req_1", [prompt], Client(), Arrival(0.0)
        ):
            clock[0] += 3600
            await harness.gateway.admission.tend_leases()
            assert await other.expire(now=clock[0]) == []
            harness.runner.open.set()


async def test_usage_that_another_gateway_has_entered_as_lost_is_logged(sqlite_url, caplog):
    clock = [1000.0]
    async with open_harness(sqlite_url, now=lambda: clock[0]) as harness:
        other = Ledger(harness.store.database, instance_id="gw_other", lease_seconds=60)
        harness.runner.open.clear()
        async with harness.client(await harness.tenant("acme")) as http:
            request = completion("text:ab")
            task = asyncio.create_task(http.post("/v1/completions", json=request))
            await until(harness.num_reserved)
            [request_id] = await other.expire(now=clock[0] + 3600)
            harness.runner.open.set()
            await task

    [record] = caplog.records
    assert record.levelname == "ERROR"
    assert record.getMessage().startswith(f"{request_id}: was taken for crashed")
    assert "10 tokens" in record.getMessage()  # 7 in, 3 out


async def test_a_tenants_flood_of_prompts_does_not_hold_up_anothers(sqlite_url):
    """Tokenising comes before the limits, so it has turns of its own."""

    def slow(messages, **_):
        time.sleep(0.05 if len(messages) > 1 else 0)
        return encode("text:a")

    async with open_harness(sqlite_url, encode_chat=slow) as harness:
        noisy, quiet = await harness.tenant("noisy"), await harness.tenant("quiet")
        chat = {"model": MODEL, "messages": [{"role": "user", "content": "x"}]}
        flood = chat | {"messages": chat["messages"] * 2}
        async with harness.client(noisy) as http, harness.client(quiet) as other:
            many = [
                asyncio.create_task(http.post("/v1/chat/completions", json=flood))
                for _ in range(20)
            ]
            await asyncio.sleep(0.1)  # all of them have come so far
            assert (await other.post("/v1/chat/completions", json=chat)).status_code == 200
            assert sum(task.done() for task in many) <= 8
            await asyncio.wait(many)


async def test_many_prompts_in_one_request_leave_room_between_them(sqlite_url, monkeypatch):
    async with open_harness(sqlite_url) as harness:
        gateway, done = harness.gateway, []

        def slow(text):
            time.sleep(0.02)
            done.append(text)
            return encode(text)

        monkeypatch.setattr(
            harness, "app", create_app(replace(gateway, model=replace(gateway.model, encode=slow)))
        )
        first, second = await harness.tenant("a"), await harness.tenant("b")
        third = await harness.tenant("c")
        long = completion([f"text:{n}" for n in range(30)], max_tokens=1)
        async with (
            harness.client(first) as a,
            harness.client(second) as b,
            harness.client(third) as c,
        ):
            many = [asyncio.create_task(http.post("/v1/completions", json=long)) for http in (a, b)]
            await until(lambda: len(done) > 2)
            assert (await c.post("/v1/completions", json=completion("text:c"))).status_code == 200
            assert len(done) < 20
            await asyncio.wait(many)
            assert {task.result().status_code for task in many} == {200}


async def test_the_prompts_of_one_request_enter_the_engine_together(harness):
    async with harness.client(await harness.tenant("acme")) as http:
        request = completion([f"text:{n}" for n in range(8)], max_tokens=1)
        assert (await http.post("/v1/completions", json=request)).status_code == 200

    # All in the first step, or in the second where one was under way.
    assert harness.runner.num_steps <= 2
