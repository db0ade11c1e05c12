"""Sends load to any OpenAI-compatible server and records what its clients see."""

import asyncio
import json
import random
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any, Literal

import httpx

from gateway.cli.latency import RequestRecord

Endpoint = Literal["completions", "chat"]
Progress = Callable[[], None]
"""Called after each request."""

MAX_WARMUP_TOKENS = 16

VOCABULARY = (
    "river mill wheel stone water grain field road market bridge tower garden winter summer "
    "morning evening letter window harbour forest mountain valley island storm lantern copper "
    "silver paper circle number engine signal carry gather follow answer measure balance quiet "
    "early narrow distant common simple steady ancient hidden open broken yellow several every"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """Where load goes, and as whom."""

    base_url: str  # with or without /v1
    model: str
    api_key: str | None = field(default=None, repr=False)
    endpoint: Endpoint = "completions"

    @property
    def url(self) -> str:
        path = "chat/completions" if self.endpoint == "chat" else "completions"
        return f"{self.base_url.rstrip('/').removesuffix('/v1')}/v1/{path}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """One request to make."""

    prompt: str | tuple[int, ...]  # text or token ids
    output_tokens: int


class StreamError(Exception):
    """The server answered with an error, or its stream broke the protocol."""


def make_work(seed: int, num_words: int, output_tokens: int) -> Iterator[Work]:
    """Endless work, reproducible from the seed; prompts differ from their first word on."""
    rng = random.Random(seed)  # noqa: S311 - load, not secrets
    vocabulary = VOCABULARY.split()
    while True:
        # A common beginning would be served from the prefix cache and flatter the server.
        words = [f"{rng.getrandbits(32):08x}", *rng.choices(vocabulary, k=max(0, num_words - 1))]
        yield Work(prompt=" ".join(words), output_tokens=output_tokens)


def poisson_arrivals(seed: int, rate: float, seconds: float) -> list[float]:
    """Arrival times in [0, seconds) of a Poisson process with `rate` per second."""
    rng = random.Random(f"arrivals {seed}")  # noqa: S311 - load, not secrets
    times = []
    at = rng.expovariate(rate)
    while at < seconds:
        times.append(at)
        at += rng.expovariate(rate)
    return times


def client(timeout_seconds: float = 600.0) -> httpx.AsyncClient:
    """A client whose own pool never queues: waiting must happen where it is measured."""
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    return httpx.AsyncClient(timeout=timeout_seconds, limits=limits)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClosedLoop:
    """`concurrency` clients, each sending its next request when its last one ended."""

    concurrency: int
    requests_per_client: int

    @property
    def name(self) -> str:
        return f"concurrency {self.concurrency}"

    @property
    def num_warmup(self) -> int:
        return self.concurrency

    async def run(
        self,
        http: httpx.AsyncClient,
        target: Target,
        source: Iterator[Work],
        progress: Progress = lambda: None,
    ) -> list[RequestRecord]:
        pending = islice(source, self.concurrency * self.requests_per_client)
        records: list[RequestRecord] = []

        async def run_client() -> None:
            for work in pending:
                records.append(await send(http, target, work, time.monotonic()))
                progress()

        async with asyncio.TaskGroup() as group:
            for _ in range(self.concurrency):
                group.create_task(run_client())
        return records


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenLoop:
    """Poisson arrivals, each sent at its time however many are under way."""

    rate: float  # requests per second
    arrivals: tuple[float, ...]  # seconds from the start

    @property
    def name(self) -> str:
        return f"{self.rate:g} req/s"

    @property
    def num_warmup(self) -> int:
        return 1

    async def run(
        self,
        http: httpx.AsyncClient,
        target: Target,
        source: Iterator[Work],
        progress: Progress = lambda: None,
    ) -> list[RequestRecord]:
        start = time.monotonic()

        async def run_one(work: Work, due: float) -> RequestRecord:
            await asyncio.sleep(max(0.0, due - time.monotonic()))
            # From when it was due: a late client must not hide the server's queue.
            record = await send(http, target, work, due)
            progress()
            return record

        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(run_one(next(source), start + at)) for at in self.arrivals]
        return [task.result() for task in tasks]


Level = ClosedLoop | OpenLoop


async def measure(
    target: Target, level: Level, source: Iterator[Work], num_warmup: int, progress: Progress
) -> list[RequestRecord]:
    """Records of one level; its warm-up requests are sent first, and are not among them."""
    async with client() as http:
        if num_warmup:
            warmup = ClosedLoop(concurrency=num_warmup, requests_per_client=1)
            shorter = (
                replace(w, output_tokens=min(w.output_tokens, MAX_WARMUP_TOKENS)) for w in source
            )
            await warmup.run(http, target, shorter)
        return await level.run(http, target, source, progress)


async def send(
    http: httpx.AsyncClient, target: Target, work: Work, arrived: float
) -> RequestRecord:
    """One streamed request. A failure of any kind becomes the record's `error`."""
    times: list[float] = []
    usage: dict[str, Any] = {}
    error = None
    try:
        await _stream(http, target, work, times, usage)
    except StreamError as failure:
        error = str(failure)
    except (httpx.HTTPError, ValueError) as failure:
        error = type(failure).__name__
    details = usage.get("prompt_tokens_details") or {}
    return RequestRecord(
        arrived=arrived,
        text_times=tuple(times),
        finished=time.monotonic(),
        prompt_tokens=usage.get("prompt_tokens", 0),
        cached_tokens=details.get("cached_tokens") or 0,
        output_tokens=usage.get("completion_tokens", len(times)),
        has_usage=bool(usage),
        error=error,
    )


async def _stream(
    http: httpx.AsyncClient, target: Target, work: Work, times: list[float], usage: dict[str, Any]
) -> None:
    """Read one stream to its end into `times` and `usage`. Raises StreamError, httpx.HTTPError."""
    headers = {"authorization": f"Bearer {target.api_key}"} if target.api_key else {}
    async with http.stream("POST", target.url, json=_body(target, work), headers=headers) as reply:
        if reply.status_code != 200:
            raise StreamError(_refusal(reply.status_code, await reply.aread()))
        finished = False
        async for data in sse_data(reply.aiter_bytes()):
            if data == b"[DONE]":
                continue  # to the end of the body, so that the connection is used again
            event = json.loads(data)
            if event.get("error"):
                raise StreamError(f"in the stream: {event['error'].get('code') or 'error'}")
            if event.get("usage"):
                usage.update(event["usage"])
            for choice in event.get("choices", ()):
                if choice.get("text") or (choice.get("delta") or {}).get("content"):
                    times.append(time.monotonic())
                finished = finished or choice.get("finish_reason") is not None
        if not finished:
            raise StreamError("stream ended without a finish_reason")


def _body(target: Target, work: Work) -> dict[str, Any]:
    body: dict[str, Any] = {
        "model": target.model,
        "max_tokens": work.output_tokens,
        "temperature": 0,
        "ignore_eos": True,  # every request generates exactly output_tokens
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if target.endpoint == "chat":
        return body | {"messages": [{"role": "user", "content": work.prompt}]}
    return body | {"prompt": work.prompt}


def _refusal(status: int, body: bytes) -> str:
    """`429 rate_limit_exceeded`, or the bare status where the body says no code."""
    try:
        code = json.loads(body)["error"]["code"]
    except (ValueError, KeyError, TypeError):
        code = None
    return f"{status} {code}" if code else str(status)


async def sse_data(chunks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """The `data:` payloads of an event stream cut at any byte; comments are passed over."""
    # Not httpx.aiter_lines: it also splits at U+2028 and its like, which JSON strings may hold.
    rest = b""
    async for chunk in chunks:
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                yield line[5:].strip()
