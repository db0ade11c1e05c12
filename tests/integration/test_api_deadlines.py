"""Deadlines and forecasts over HTTP: headers in, headers and 504 out, and what the ledger says."""

import asyncio
import json
import time
from dataclasses import replace

import pytest

from engine import forecaster
from engine.cost_model import LinearCost
from tests.gateway_kit import MODEL, open_harness, until

SLOW = LinearCost(step=0.03, prompt_token=0.0, decode=0.0, context_token=0.0)


@pytest.fixture
async def harness(sqlite_url):
    async with open_harness(sqlite_url) as harness:
        yield harness


@pytest.fixture
async def slow(sqlite_url):
    """30 ms a step, one sequence at a time."""
    async with open_harness(sqlite_url, step_seconds=0.03, max_seqs=1) as harness:
        yield harness


def body(text="hello", max_tokens=4, **fields):
    return {"model": MODEL, "prompt": text, "max_tokens": max_tokens, **fields}


async def complete(harness, key, *args, headers=None, **fields):
    async with harness.client(key, **(headers or {})) as client:
        return await client.post("/v1/completions", json=body(*args, **fields), timeout=20)


async def test_what_is_not_complete_at_its_deadline_is_a_504(slow):
    key = await slow.tenant("acme")
    started = time.monotonic()

    answer = await complete(slow, key, "long", 200, headers={"x-headrace-deadline-ms": "300"})

    assert answer.status_code == 504
    assert 0.3 <= time.monotonic() - started < 2
    assert answer.headers["x-should-retry"] == "false"
    error = answer.json()["error"]
    assert (error["type"], error["code"]) == ("timeout", "deadline_exceeded")
    assert "not complete 300 ms after" in error["message"]
    await slow.until_idle()
    (row,) = await slow.rows()
    assert (row["status"], row["finish_reason"]) == ("aborted", "deadline")
    assert row["error_code"] == "deadline_exceeded"
    assert row["tokens_in"] == 4
    assert 2 < row["tokens_out"] < 30


async def test_a_stream_ends_with_an_error_event_at_its_deadline(slow):
    key = await slow.tenant("acme")

    answer = await complete(
        slow, key, "long", 200, headers={"x-headrace-deadline-ms": "300"}, stream=True
    )

    assert answer.status_code == 200
    events = [line.removeprefix("data: ") for line in answer.text.splitlines() if line]
    assert events[-1] == "[DONE]"
    assert json.loads(events[-2])["error"]["code"] == "deadline_exceeded"
    assert len(events) > 4


async def test_what_still_waits_at_its_deadline_costs_nothing(slow):
    key = await slow.tenant("acme")
    first = asyncio.create_task(complete(slow, key, "long", 60))
    await asyncio.sleep(0.1)

    late = await complete(slow, key, "late", 4, headers={"x-headrace-deadline-ms": "200"})

    assert late.status_code == 504
    assert "had not begun 200 ms after" in late.json()["error"]["message"]
    assert (await first).status_code == 200
    await slow.until_idle()
    row = next(one for one in await slow.rows() if one["error_code"])
    assert (row["tokens_in"], row["tokens_out"], row["admitted_at"]) == (0, 0, None)


async def test_an_sdks_read_timeout_is_a_deadline_for_what_comes_in_one_piece(slow):
    key = await slow.tenant("acme")
    hint = {"x-stainless-read-timeout": "0.3"}

    whole = await complete(slow, key, "long", 200, headers=hint)
    stream = await complete(slow, key, "long", 20, headers=hint, stream=True)

    assert whole.status_code == 504
    assert '"finish_reason":"length"' in stream.text


@pytest.mark.parametrize("text", ["0", "-5", "1.5", "soon", "", "86400001"])
async def test_a_deadline_that_is_none_is_refused(harness, text):
    key = await harness.tenant("acme")

    answer = await complete(harness, key, headers={"x-headrace-deadline-ms": text})

    assert answer.status_code == 400
    assert "x-headrace-deadline-ms" in answer.json()["error"]["message"]


@pytest.mark.parametrize("text", ["NOT_GIVEN", "None", "nan", "-1", ""])
async def test_a_hint_that_is_none_means_nothing(harness, text):
    key = await harness.tenant("acme")

    answer = await complete(harness, key, headers={"x-stainless-read-timeout": text})

    assert answer.status_code == 200


async def test_the_first_token_is_foreseen(slow):
    """Behind a request that has up to 60 steps to go, at 30 ms each."""
    slow.core.scheduler.step_times.assume(SLOW)
    key = await slow.tenant("acme")
    first = asyncio.create_task(complete(slow, key, "long", 60))
    await asyncio.sleep(0.05)
    await until(lambda: not slow.gateway.engine._forecaster._is_busy)  # with the first's

    started = time.monotonic()
    async with (
        slow.client(key) as client,
        client.stream("POST", "/v1/completions", json=body(stream=True)) as answer,
    ):
        async for _ in answer.aiter_lines():
            break
        waited_ms = 1000 * (time.monotonic() - started)
    await first

    estimated_ms = int(answer.headers["x-headrace-estimated-ttft-ms"])
    assert 300 < estimated_ms < 1900
    assert estimated_ms == pytest.approx(waited_ms, rel=0.5)
    await slow.until_idle()
    async with slow.client() as client:
        metrics = (await client.get("/metrics")).text
    assert "headrace_ttft_estimate_ratio_count 2.0" in metrics


async def test_what_would_begin_too_late_can_be_refused_at_once(sqlite_url):
    environ = {"HEADRACE_FORECASTS": "refuse"}
    async with open_harness(sqlite_url, step_seconds=0.03, max_seqs=1, environ=environ) as harness:
        harness.core.scheduler.step_times.assume(SLOW)
        key = await harness.tenant("acme")
        first = asyncio.create_task(complete(harness, key, "long", 100))
        await asyncio.sleep(0.1)
        started = time.monotonic()

        late = await complete(harness, key, headers={"x-headrace-deadline-ms": "1500"})
        in_time = await complete(harness, key, headers={"x-headrace-deadline-ms": "60000"})

        assert late.status_code == 504
        assert "cannot be expected before its deadline, 1500 ms" in late.json()["error"]["message"]
        assert "x-headrace-estimated-ttft-ms" not in late.headers
        assert in_time.status_code == 200
        assert (await first).status_code == 200
        assert time.monotonic() - started > 1.5
        await harness.until_idle()
        row = next(one for one in await harness.rows() if one["error_code"])
        assert (row["status"], row["tokens_in"]) == ("aborted", 0)
        assert row["finished_at"] - row["arrived_at"] < 1.0


async def test_forecasts_can_be_switched_off(sqlite_url):
    async with open_harness(sqlite_url, environ={"HEADRACE_FORECASTS": "off"}) as harness:
        harness.core.scheduler.step_times.assume(SLOW)
        key = await harness.tenant("acme")
        answer = await complete(harness, key)
        assert "x-headrace-estimated-ttft-ms" not in answer.headers


async def test_a_deadline_in_a_stream_is_in_the_books_as_in_one_piece(slow):
    key = await slow.tenant("acme")
    hint = {"x-headrace-deadline-ms": "300"}

    await complete(slow, key, "long", 200, headers=hint)
    await complete(slow, key, "long", 200, headers=hint, stream=True)

    await slow.until_idle()
    books = [(one["status"], one["finish_reason"], one["error_code"]) for one in await slow.rows()]
    assert books == [("aborted", "deadline", "deadline_exceeded")] * 2
    assert await metric(slow, 'headrace_deadline_exceeded_total{tenant="acme"}') == 2


async def test_a_deadline_that_passes_before_the_engine_is_asked_costs_nothing(slow, monkeypatch):
    key = await slow.tenant("acme")
    reserve = slow.ledger.reserve

    async def take_long(*args, **kwargs):
        await asyncio.sleep(0.3)
        return await reserve(*args, **kwargs)

    monkeypatch.setattr(slow.ledger, "reserve", take_long)
    during = await complete(slow, key, headers={"x-headrace-deadline-ms": "200"})
    monkeypatch.undo()
    encode = slow.gateway.model.encode

    def think(text):
        time.sleep(0.3)
        return encode(text)

    object.__setattr__(slow.gateway.model, "encode", think)
    before = await complete(slow, key, headers={"x-headrace-deadline-ms": "200"})

    assert (during.status_code, before.status_code) == (504, 504)
    await slow.until_idle()
    (row,) = await slow.rows()  # the other held nothing yet
    assert (row["status"], row["finish_reason"], row["tokens_in"]) == ("aborted", "deadline", 0)
    assert slow.runner.num_steps == 0
    assert await metric(slow, 'headrace_deadline_exceeded_total{tenant="acme"}') == 2
    rejected = 'headrace_tenant_requests_total{outcome="rejected",tenant="acme"}'
    assert await metric(slow, rejected) == 1


async def metric(harness, series):
    async with harness.client() as client:
        text = (await client.get("/metrics")).text
    (line,) = [one for one in text.splitlines() if one.startswith(series)]
    return float(line.rpartition(" ")[2])


async def test_what_has_begun_is_not_refused_for_a_forecast(sqlite_url, monkeypatch):
    """The run takes longer than the first token did."""
    run_forward = forecaster.run_forward

    def slowly(outlook):
        time.sleep(0.2)
        found = run_forward(outlook)
        return replace(found, first_tokens={}, horizon=60.0)

    monkeypatch.setattr(forecaster, "run_forward", slowly)
    environ = {"HEADRACE_FORECASTS": "refuse"}
    async with open_harness(sqlite_url, step_seconds=0.02, environ=environ) as harness:
        harness.core.scheduler.step_times.assume(SLOW)
        key = await harness.tenant("acme")

        hint = {"x-headrace-deadline-ms": "5000"}
        answer = await complete(harness, key, "hello", 20, headers=hint)

        assert answer.status_code == 200
