"""The real server process: a signal drains it, a second one stops it, the books stay right."""

import asyncio
import json
import os
import signal
import sqlite3
import sys
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest

from tests.gateway_kit import MODEL

PROGRAM = """
import asyncio, logging, sys, uvloop
from gateway.http_server import serve
from tests.gateway_kit import open_harness

async def main(url, drain_seconds):
    environ = {"HEADRACE_PORT": "0", "HEADRACE_DRAIN_SECONDS": drain_seconds}
    async with open_harness(url, environ=environ, step_seconds=0.02) as harness:
        secret = await harness.tenant("acme")

        async def started(gateway, url):
            print(url, secret, flush=True)

        return await serve(harness.gateway, on_started=started)

logging.basicConfig(level="INFO")
sys.exit(0 if uvloop.run(main(*sys.argv[1:])) else 7)
"""


@asynccontextmanager
async def running(url, drain_seconds):
    """A server process; (process, client with a key)."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", PROGRAM, url, drain_seconds),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        cwd=Path(__file__).parents[2],
        env=os.environ | {"PYTHONPATH": "."},
    )
    try:
        base, secret = (await process.stdout.readline()).decode().split()
        headers = {"authorization": f"Bearer {secret}"}
        async with httpx.AsyncClient(base_url=base, headers=headers, timeout=20) as client:
            yield process, client
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()
        process._transport.close()


def rows(url):
    with sqlite3.connect(url.removeprefix("sqlite:///")) as connection:
        found = connection.execute("SELECT status, tokens_out FROM usage_ledger").fetchall()
        left = connection.execute("SELECT count(*) FROM reservations").fetchone()
    connection.close()
    return found, left[0]


def completion(**fields):
    return {"model": MODEL, "prompt": "x", "stream": True, **fields}


async def test_a_signal_lets_streams_finish_and_refuses_new_work(sqlite_url):
    async with (
        running(sqlite_url, "20") as (process, client),
        client.stream("POST", "/v1/completions", json=completion(max_tokens=40)) as stream,
    ):
        lines = stream.aiter_lines()
        await anext(lines)
        process.send_signal(signal.SIGTERM)
        await asyncio.sleep(0.1)

        assert (await client.get("/readyz")).status_code == 503
        assert (await client.get("/healthz")).status_code == 200
        refused = await client.post("/v1/completions", json=completion())
        assert refused.status_code == 503
        assert refused.headers["retry-after"] == "5"
        rest = [line async for line in lines if line]
        assert rest[-1] == "data: [DONE]"
        assert json.loads(rest[-2].removeprefix("data: "))["choices"][0]["finish_reason"] == (
            "length"
        )
        async with asyncio.timeout(5):
            assert await process.wait() == 0

    assert rows(sqlite_url) == ([("completed", 40)], 0)


async def test_what_does_not_finish_in_time_ends_with_an_error_event(sqlite_url):
    async with (
        running(sqlite_url, "0.3") as (process, client),
        client.stream("POST", "/v1/completions", json=completion(max_tokens=2000)) as stream,
    ):
        lines = stream.aiter_lines()
        await anext(lines)
        process.send_signal(signal.SIGTERM)
        rest = [line async for line in lines if line]
        async with asyncio.timeout(5):
            assert await process.wait() == 0

    assert rest[-1] == "data: [DONE]"
    assert json.loads(rest[-2].removeprefix("data: "))["error"]["code"] == "server_is_overloaded"
    [(status, tokens)], left = rows(sqlite_url)
    assert (status, left) == ("aborted", 0)
    assert 5 < tokens < 100


@pytest.mark.parametrize("second", [signal.SIGTERM, signal.SIGINT])
async def test_a_second_signal_stops_at_once(sqlite_url, second):
    async with (
        running(sqlite_url, "60") as (process, client),
        client.stream("POST", "/v1/completions", json=completion(max_tokens=2000)) as stream,
    ):
        await anext(stream.aiter_lines())
        process.send_signal(signal.SIGTERM)
        await asyncio.sleep(0.1)
        process.send_signal(second)
        async with asyncio.timeout(3):
            assert await process.wait() == 7
        log = (await process.stderr.read()).decode()

    assert "Traceback" not in log, log
    [(status, _)], left = rows(sqlite_url)
    assert (status, left) == ("aborted", 0)


async def test_an_idle_server_stops_at_the_first_signal(sqlite_url):
    async with running(sqlite_url, "60") as (process, client):
        assert (await client.get("/healthz")).status_code == 200
        process.send_signal(signal.SIGINT)
        async with asyncio.timeout(3):
            assert await process.wait() == 0
