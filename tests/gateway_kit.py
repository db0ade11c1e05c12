"""A gateway for tests: real app, policy store, scheduler and engine thread; only tensors missing.

The model speaks bytes: token id = byte, 256 ends a text. What it says is written in the prompt.
"""

import asyncio
import inspect
import math
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
from engine.detokenizer import TokenBytes
from engine.events import TokenLogprobs
from engine.plan import Runner, ScheduledChunk, StepOutput, StepPlan
from engine.sequence import Grammar
from engine.service import AsyncEngine, Grammars
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

    Sequence i of several says `text<i>:...` where the prompt has one, or letters from the i-th on.
    `fail:N` makes the N-th token fail, `fail<i>:N` that of sequence i. `open` cleared holds the
    next step back.
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
        output = StepOutput({})
        for chunk in plan.chunks:
            scores = prompt_scores(chunk)
            if scores is not None:
                output.prompt_logprobs[chunk.seq.id] = scores
            for seq in chunk.draws:
                prompt = bytes(seq.token_ids[: seq.num_prompt_tokens]).decode()
                nth = seq.num_output_tokens
                fail = re.search(rf"fail{seq.index or ''}:(\d+)", prompt)
                if fail and nth + 1 == int(fail[1]):
                    output.errors[seq.id] = "logits are not finite"
                    continue
                token = said(prompt, nth, seq.index)
                output.token_ids[seq.id] = token
                if seq.params.logprobs is not None:
                    worth = -0.25 * (1 + worth_less(prompt, seq.index))
                    output.logprobs[seq.id] = scored(token, worth, seq.params.logprobs)
        return output


def said(prompt: str, nth: int, index: int = 0) -> int:
    script = re.search(rf"text{index or ''}:([^|]*)", prompt)
    if script is None:
        return ord("a") + (nth + index) % 26
    text = script[1].encode()
    return text[nth] if nth < len(text) else EOS


def worth_less(prompt: str, index: int) -> int:
    """By how many quarters the logprobs of sequence `index` are less: its digit of `worth:`."""
    script = re.search(r"worth:(\d+)", prompt)
    return int(script[1][index]) if script else index


def scored(token: int, logprob: float, num_top: int) -> TokenLogprobs:
    """A token with the likeliest ones, itself first; a tilde is impossible."""
    if token == ord("~"):
        logprob = -math.inf
    top = [(token, logprob)] + [(token ^ bit, logprob - bit) for bit in range(1, num_top)]
    return TokenLogprobs(token, logprob, tuple(top[:num_top]))


def prompt_scores(chunk: ScheduledChunk) -> tuple[TokenLogprobs, ...] | None:
    """Of the tokens after each of the chunk's: token i has the logprob -i / 8."""
    seq = chunk.seq
    if seq.params.prompt_logprobs is None:
        return None
    end = min(chunk.start + chunk.num_tokens + 1, seq.num_prompt_tokens)
    return tuple(
        scored(seq.token_ids[at], -at / 8, seq.params.prompt_logprobs)
        for at in range(chunk.start + 1, end)
    )


def encode(text: str) -> list[int]:
    return list(text.encode())


def token_bytes(token: int) -> bytes:
    return bytes([token]) if token < EOS else b""


def encode_chat(messages: Any, **_: Any) -> list[int]:
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


def bytes_model(max_seqs: int, encode_chat: Callable[..., list[int]]) -> ServedModel:
    return ServedModel(
        name=MODEL,
        created=1_700_000_000,
        device="cpu",
        dtype="float32",
        max_model_len=MAX_MODEL_LEN,
        max_seqs=max_seqs,
        vocab_size=257,
        max_token_bytes=4,
        token_bytes=token_bytes,
        encode=encode,
        encode_plain=encode,
        encode_chat=encode_chat,
        compile_grammar=AnyGrammar().compile,
    )


@dataclass(frozen=True)
class RealModel:
    """Tensors instead of a script."""

    runner: Callable[[CacheConfig], Runner]
    token_bytes: TokenBytes
    eos_token_ids: frozenset[int]
    grammars: Grammars
    served: Callable[[EngineConfig], ServedModel]


class AnyGrammar:
    """Where a script says what comes: compiles everything, and allows it."""

    is_finished = False

    def compile(self, grammar: Grammar) -> "AnyGrammar":
        return self

    def accept(self, token_id: int) -> bool:
        return True

    def fork(self) -> "AnyGrammar":
        return self


@asynccontextmanager
async def open_harness(
    url: str,
    *,
    environ: dict[str, str] | None = None,
    num_blocks: int = 512,
    max_seqs: int = 8,
    step_seconds: float = 0.0,
    encode_chat: Callable[..., list[int]] = encode_chat,
    real: RealModel | None = None,
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
    grammars: Any = real.grammars if real else AnyGrammar()
    metrics = Metrics(model_name=MODEL, config=config, max_tenants=settings.max_metric_tenants)
    core = EngineCore(
        config,
        real.runner(config.cache) if real else runner,
        clock=time.monotonic,
        token_bytes=real.token_bytes if real else token_bytes,
        eos_token_ids=real.eos_token_ids if real else frozenset({EOS}),
    )
    engine = AsyncEngine(
        core,
        observers=[metrics.engine.observe],
        grammars=grammars,
        foresees=settings.forecasts != "off",
    )
    store = Store.open(url)
    ledger = Ledger(store.database, instance_id="gw_test", lease_seconds=settings.lease_seconds)
    gateway = assemble(
        settings=settings,
        model=real.served(config) if real else bytes_model(max_seqs, encode_chat),
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
