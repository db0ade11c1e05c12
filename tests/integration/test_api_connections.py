"""Connections held open for nothing: silent, slow, endless or unread ones are cut."""

import asyncio
import json
import socket
import time

import httpx
import pytest

from gateway.http_server import listen
from tests import gateway_kit
from tests.gateway_kit import MODEL, open_harness, until

ENVIRON = {"HEADRACE_IDLE_CONNECTION_SECONDS": "1", "HEADRACE_WRITE_TIMEOUT_SECONDS": "1"}


@pytest.fixture
async def harness(sqlite_url):
    async with open_harness(sqlite_url, environ=ENVIRON, max_seqs=64) as harness:
        yield harness


@pytest.fixture
async def address(harness):
    async with harness.listening() as url:
        parts = httpx.URL(url)
        yield parts.host, parts.port


async def seconds_until_cut(reader):
    """How long the server keeps the connection; 5 s at most."""
    started = time.monotonic()
    try:
        async with asyncio.timeout(5):
            while await reader.read(65536):
                pass
    except ConnectionResetError:
        pass
    return time.monotonic() - started


async def drip(writer, data):
    """Send without end, a byte at a time."""
    try:
        while True:
            writer.write(data)
            await writer.drain()
            await asyncio.sleep(0.1)
    except ConnectionError:
        pass


@pytest.mark.parametrize("sent", [b"", b"GET /healthz HTTP/1.1\r\nhost: x\r\n"])
async def test_a_connection_without_a_whole_head_is_closed(address, sent):
    reader, writer = await asyncio.open_connection(*address)
    writer.write(sent)

    assert 0.9 < await seconds_until_cut(reader) < 2
    writer.close()


@pytest.mark.parametrize("first", [b"", b"GET /healthz HTTP/1.1\r\nhost: x\r\n\r\n"])
async def test_a_head_that_drips_is_as_idle_as_none(address, first):
    """The first of its connection and a later one."""
    reader, writer = await asyncio.open_connection(*address)
    writer.write(first + b"GET /healthz HTTP/1.1\r\nx-drip: ")
    dripping = asyncio.create_task(drip(writer, b"y"))

    assert 0.9 < await seconds_until_cut(reader) < 2
    dripping.cancel()
    writer.close()


async def test_a_body_that_drips_on_after_its_answer_is_cut(address):
    reader, writer = await asyncio.open_connection(*address)
    writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 999999\r\n\r\n")
    dripping = asyncio.create_task(drip(writer, b"y"))

    assert b"401 Unauthorized" in await reader.readuntil(b"\r\n")
    assert 0.9 < await seconds_until_cut(reader) < 2
    dripping.cancel()
    writer.close()


async def test_an_endless_head_is_cut_while_it_is_small(address):
    _, writer = await asyncio.open_connection(*address)
    writer.write(b"GET /healthz HTTP/1.1\r\n")
    num_sent = 0

    async def send_headers():
        nonlocal num_sent
        while num_sent < 20_000_000:
            writer.write(b"x-%d: %s\r\n" % (num_sent, b"y" * 1000))
            await writer.drain()
            num_sent += 1000

    with pytest.raises(ConnectionError):
        await send_headers()
    assert num_sent < 10_000_000  # 64 KiB in the server, the rest in the buffers between
    writer.close()


async def test_a_long_head_a_large_body_and_many_requests_are_no_offence(harness, address):
    body = json.dumps({"model": MODEL, "prompt": "text:ok", "user": "u" * 300_000}).encode()
    secret = await harness.tenant("acme")
    request = (
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        b"x-long: %s\r\nauthorization: Bearer %s\r\ncontent-length: %d\r\n\r\n%s"
        % (b"y" * 40_000, secret.encode(), len(body), body)
    )
    reader, writer = await asyncio.open_connection(*address)
    for _ in range(4):  # longer together than the idle time
        writer.write(request)
        head = await reader.readuntil(b"\r\n\r\n")
        assert b"200 OK" in head
        length = int(head.lower().partition(b"content-length:")[2].split()[0])
        await reader.readexactly(length)
        await asyncio.sleep(0.4)
    writer.close()


def unread(address, request):
    """A client that sends and then reads nothing."""
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
    client.connect(address)
    client.sendall(request)
    client.setblocking(False)
    return client


def num_connections(port):
    """Sockets of this port that carry a connection, also one that is being closed."""
    with open("/proc/net/tcp") as table:
        rows = [line.split() for line in table.readlines()[1:]]
    listening, time_wait = "0A", "06"
    return sum(
        row[1].endswith(f":{port:04X}") and row[3] not in (listening, time_wait) for row in rows
    )


@pytest.mark.parametrize("stream", [True, False])
async def test_a_reader_that_stops_loses_its_connection(harness, stream, monkeypatch):
    def listen_with_a_small_buffer(host, port):
        sock = listen(host, port)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        return sock

    monkeypatch.setattr(gateway_kit, "listen", listen_with_a_small_buffer)
    body = json.dumps(
        {"model": MODEL, "prompt": ["x"] * 64, "max_tokens": 1000, "stream": stream}
    ).encode()
    request = (
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        b"authorization: Bearer %s\r\ncontent-length: %d\r\n\r\n%s"
        % ((await harness.tenant("acme")).encode(), len(body), body)
    )
    async with harness.listening() as url:
        address = httpx.URL(url).host, httpx.URL(url).port
        client = unread(address, request)
        await until(harness.rows)
        await until(lambda: num_connections(address[1]) == 0)
        client.close()

    # A stream ends where nobody reads on; a whole answer was done before it was sent.
    assert [row["status"] for row in await harness.rows()] == ["aborted" if stream else "completed"]


@pytest.mark.parametrize("num_body_bytes", [66_000, 70_000, 120_000, 200_000])
async def test_a_body_that_comes_with_its_head_is_no_long_head(harness, address, num_body_bytes):
    """In one piece, twice on one connection: the bound is on heads alone."""
    secret = await harness.tenant("acme")
    body = {"model": MODEL, "prompt": "text:hi|", "user": ""}
    body["user"] = "x" * (num_body_bytes - len(json.dumps(body)))
    data = json.dumps(body).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {secret}\r\n"
        f"content-type: application/json\r\ncontent-length: {len(data)}\r\n\r\n"
    )
    reader, writer = await asyncio.open_connection(*address)
    for _ in range(2):
        writer.write(head.encode() + data)
        assert await reader.readuntil(b"\r\n") == b"HTTP/1.1 200 OK\r\n"
        headers = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        length = int(headers.partition("content-length: ")[2].split("\r\n")[0])
        assert json.loads(await reader.readexactly(length))["choices"][0]["text"] == "hi"
    writer.close()
