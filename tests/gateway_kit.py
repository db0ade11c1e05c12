"""A gateway for tests: real app, policy store, scheduler and engine thread; only tensors missing.

The model speaks bytes: token id = byte, 256 ends a text. What it says is written in the prompt.
"""

import asyncio
import inspect
import re
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx
import uvicorn
from sqlalchemy import func, select

from engine.config import CacheConfig, EngineConfig, SchedulerConfig
from engine.core import EngineCore
from engine.plan import StepOutput, StepPlan
from engine.service import AsyncEngine
from gateway.app import Gateway, assemble, create_app
from gateway.http_server import base_url, listen, server_config
from gateway.metrics import Metrics
from gateway.served_model import ServedModel
from gateway.settings import Settings
from tenants.ledger import Ledger
from tenants.models import LedgerEntry, Reservation
from tenants.policy import Limit
from tenants.store import Store

MODEL = "bytes"
EOS = 256
MAX_MODEL_LEN = 2048


@dataclass
class ByteRunner:
    """Says `text:...` of the prompt (up to a `|`), then ends; without it, letters for ever.

    `fail:N` makes the N-th token fail. `open` cleared holds the next step back.
    """

    step_seconds: float = 0.0
    open: threading.Event = field(default_factory=threading.Event)
    num_steps: int = 0
    explode: bool = False

    def __post_init__(self) -> None:
        self.open.set()

    def execute(self, plan: StepPlan) -> StepOutput:
        assert self.open.wait(timeout=30)
        time.sleep(self.step_seconds)
        if self.explode:
            raise RuntimeError("the device is gone")
        self.num_steps += 1
        tokens: dict[str, int] = {}
        errors: dict[str, str] = {}
        for chunk in plan.chunks:
            for seq in chunk.draws:
                prompt = bytes(seq.token_ids[: seq.num_prompt_tokens]).decode()
                nth = seq.num_output_tokens
                fail = re.search(r"fail:(\d+)", prompt)
                if fail and nth + 1 == int(fail[1]):
                    errors[seq.id] = "logits are not finite"
                else:
                    tokens[seq.id] = said(prompt, nth)
        return StepOutput(tokens, errors)


def said(prompt: str, nth: int) -> int:
    script = re.search(r"text:([^|]*)", prompt)
    if script is None:
        return ord("a") + nth % 26
    text = script[1].encode()
    return text[nth] if nth < len(text) else EOS


def encode(text: str) -> list[int]:
    return list(text.encode())


def encode_chat(messages: Any) -> list[int]:
    return encode("".join(f"<{m['role']}>{m['content']}" for m in messages))


@dataclass
class Harness:
    """One gateway with what tests look at."""

    gateway: Gateway
    runner: ByteRunner
    core: EngineCore
    ledger: Ledger
    store: Store
    app: Any

    async def tenant(self, slug: str, limits: tuple[Limit, ...] = (), weight: float = 1.0) -> str:
        """Make a tenant with those limits; its key's secret."""
        await self.store.create_tenant(
            slug, actor="test", now=time.time(), limits=limits, weight=weight
        )
        _, secret = await self.store.create_key(slug, "main", actor="test", now=time.time())
        return secret

    def client(self, secret: str | None = None, **headers: str) -> httpx.AsyncClient:
        """In-process client: no socket, the whole app."""
        if secret is not None:
            headers["authorization"] = f"Bearer {secret}"
        return httpx.AsyncClient(
            transport=httpx.ASGITransport(self.app, raise_app_exceptions=False),
            base_url="http://gateway",
            headers=headers,
        )

    @asynccontextmanager
    async def listening(self) -> AsyncIterator[str]:
        """The app behind a real socket; its base URL."""
        sock = listen("127.0.0.1", 0)
        server = uvicorn.Server(server_config(self.app, self.gateway.settings))
        task = asyncio.create_task(server._serve([sock]))  # leaves signals to the test runner
        while not server.started:  # noqa: ASYNC110 -- uvicorn offers no event
            await asyncio.sleep(0.005)
        try:
            yield base_url(sock)
        finally:
            server.should_exit = True
            await task

    async def rows(self) -> list[dict[str, Any]]:
        """The ledger, oldest first."""
        async with self.store.database.reading() as session:
            found = await session.execute(
                select(LedgerEntry.__table__).order_by(LedgerEntry.finished_at)
            )
            return [dict(row._mapping) for row in found]

    async def num_reserved(self) -> int:
        async with self.store.database.reading() as session:
            return (await session.scalars(select(func.count()).select_from(Reservation))).one()

    async def until_idle(self) -> None:
        """Wait until the engine holds nothing and every request is settled."""

        async def is_idle() -> bool:
            now = self.gateway.engine.snapshot()
            return not (
                now.num_running + now.num_waiting + now.held_blocks or await self.num_reserved()
            )

        await until(is_idle)


async def until(condition: Callable[[], Any]) -> None:
    """Wait until the condition, plain or async, holds; 10 s at most."""
    async with asyncio.timeout(10):
        while True:
            result = condition()
            if await result if inspect.isawaitable(result) else result:
                return
            await asyncio.sleep(0.005)


@asynccontextmanager
async def open_harness(
    url: str,
    *,
    environ: dict[str, str] | None = None,
    num_blocks: int = 512,
    max_seqs: int = 8,
    step_seconds: float = 0.0,
    encode_chat: Callable[[Any], list[int]] = encode_chat,
    wrap_engine: Any = None,
    now: Callable[[], float] = time.time,
) -> AsyncIterator[Harness]:
    """A running gateway on a migrated database."""
    settings = Settings.from_env(environ or {})
    config = EngineConfig(
        cache=CacheConfig(num_blocks=num_blocks),
        scheduler=SchedulerConfig(
            max_seqs=max_seqs, max_step_tokens=256, max_model_len=MAX_MODEL_LEN
        ),
        check_invariants=True,
    )
    runner = ByteRunner(step_seconds=step_seconds)
    metrics = Metrics(model_name=MODEL, config=config, max_tenants=settings.max_metric_tenants)
    core = EngineCore(
        config,
        runner,
        clock=time.monotonic,
        token_bytes=lambda token: bytes([token]) if token < EOS else b"",
        eos_token_ids=frozenset({EOS}),
    )
    engine = AsyncEngine(core, observers=[metrics.engine.observe])
    store = Store.open(url)
    ledger = Ledger(store.database, instance_id="gw_test", lease_seconds=settings.lease_seconds)
    gateway = assemble(
        settings=settings,
        model=ServedModel(
            name=MODEL,
            created=1_700_000_000,
            device="cpu",
            dtype="float32",
            max_model_len=MAX_MODEL_LEN,
            vocab_size=257,
            max_token_bytes=4,
            encode=encode,
            encode_chat=encode_chat,
        ),
        engine=wrap_engine(engine) if wrap_engine else engine,
        config=config,
        store=store,
        ledger=ledger,
        metrics=metrics,
        now=now,
    )
    engine.start()
    try:
        yield Harness(gateway, runner, core, ledger, store, create_app(gateway))
    finally:
        runner.open.set()
        await gateway.admission.close(5)
        await engine.stop()
        await store.close()
