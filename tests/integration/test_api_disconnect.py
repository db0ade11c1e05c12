"""A client that leaves, at any stage: its work stops at once, its reservation is settled."""

import asyncio
import json

import httpx
import pytest

from tenants.policy import Limit
from tests.gateway_kit import MODEL, open_harness, until

SLOTS = (Limit(metric="concurrent", limit=8),)


@pytest.fixture
async def harness(sqlite_url):
    environ = {"HEADRACE_KEEPALIVE_SECONDS": "0.05"}
    options = {"max_seqs": 1, "step_seconds": 0.02, "environ": environ}
    async with open_harness(sqlite_url, **options) as harness:
        yield harness


@pytest.fixture
async def url(harness):
    async with harness.listening() as url:
        yield url


class Leaver:
    """A client over a bare socket, so that leaving is one close."""

    def __init__(self, url, secret):
        self._url, self._secret = httpx.URL(url), secret

    async def send(self, **fields):
        body = json.dumps({"model": MODEL, **fields}).encode()
        self.reader, self.writer = await asyncio.open_connection(self._url.host, self._url.port)
        self.writer.write(
            b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
            b"authorization: Bearer %s\r\ncontent-length: %d\r\n\r\n%s"
            % (self._secret.encode(), len(body), body)
        )
        await self.writer.drain()
        return self

    async def leave(self):
        self.writer.close()
        await self.writer.wait_closed()


def running(harness):
    return harness.gateway.engine.snapshot().num_running


def waiting(harness):
    return harness.gateway.engine.snapshot().num_waiting


@pytest.mark.parametrize("stream", [True, False])
async def test_while_decoding(harness, url, stream):
    client = Leaver(url, await harness.tenant("acme", SLOTS))
    await client.send(prompt="x", max_tokens=2000, stream=stream)
    await until(lambda: harness.runner.num_steps > 5)

    await client.leave()
    await harness.until_idle()

    [row] = await harness.rows()
    assert (row["status"], row["finish_reason"]) == ("aborted", "abort")
    assert row["tokens_in"] == 1
    assert 5 <= row["tokens_out"] < 100
    # One step may be under way when the client leaves, no more.
    assert row["tokens_out"] == harness.runner.num_steps


@pytest.mark.parametrize("stream", [True, False])
async def test_while_prefilling(harness, url, stream):
    client = Leaver(url, await harness.tenant("acme", SLOTS))
    await client.send(prompt="x" * 2000, stream=stream)  # 8 chunks of 256
    await until(lambda: harness.runner.num_steps == 2)

    await client.leave()
    await harness.until_idle()

    [row] = await harness.rows()
    assert (row["status"], row["tokens_out"]) == ("aborted", 0)
    assert row["tokens_in"] == 256 * harness.runner.num_steps
    assert 2 <= harness.runner.num_steps <= 5


@pytest.mark.parametrize("stream", [True, False])
async def test_while_queued(harness, url, stream):
    secret = await harness.tenant("acme", SLOTS)
    first = await Leaver(url, secret).send(prompt="x", max_tokens=2000)
    await until(lambda: running(harness) == 1)
    second = await Leaver(url, secret).send(prompt="y", max_tokens=2000, stream=stream)
    await until(lambda: waiting(harness) == 1)

    await second.leave()
    await until(lambda: waiting(harness) == 0)
    await until(harness.rows)
    rows = await harness.rows()

    # It cost nothing, and the one before it runs on.
    assert [(r["status"], r["tokens_in"], r["tokens_out"]) for r in rows] == [("aborted", 0, 0)]
    assert running(harness) == 1
    await first.leave()
    await harness.until_idle()


async def test_while_silence_is_bridged_by_keep_alives(harness, url):
    secret = await harness.tenant("acme", SLOTS)
    first = await Leaver(url, secret).send(prompt="x", max_tokens=2000)
    await until(lambda: running(harness) == 1)
    second = await Leaver(url, secret).send(prompt="y", stream=True)

    head = await second.reader.readuntil(b"\r\n\r\n")
    assert b"200 OK" in head
    assert b"content-type: text/event-stream" in head
    assert b": keep-alive\n\n" in await second.reader.readuntil(b": keep-alive\n\n")

    await second.leave()
    await first.leave()
    await harness.until_idle()
    assert {row["status"] for row in await harness.rows()} == {"aborted"}


async def test_while_the_body_is_on_its_way(harness, url):
    client = Leaver(url, await harness.tenant("acme", SLOTS))
    parts = httpx.URL(url)
    _, writer = await asyncio.open_connection(parts.host, parts.port)
    writer.write(
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        b"authorization: Bearer %s\r\ncontent-length: 100\r\n\r\n{" % client._secret.encode()
    )
    await writer.drain()
    await asyncio.sleep(0.05)

    writer.close()
    await writer.wait_closed()
    await harness.until_idle()

    assert await harness.rows() == []


async def test_a_storm_of_leaving_clients_leaves_nothing_behind(harness, url):
    secret = await harness.tenant("acme", (Limit(metric="concurrent", limit=50),))
    clients = [Leaver(url, secret) for _ in range(20)]
    for number, client in enumerate(clients):
        await client.send(prompt=f"{number}", max_tokens=500, stream=number % 2 == 0)
    for number, client in enumerate(clients):
        await asyncio.sleep(0.003 * (number % 5))
        await client.leave()

    await harness.until_idle()

    rows = await harness.rows()
    assert len(rows) == len({row["request_id"] for row in rows}) <= 20
    assert await harness.ledger.find_imbalances() == {}
    harness.core.scheduler.check()
