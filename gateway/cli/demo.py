"""`headrace demo load`: three tenants on this home's server, one of them flooding it."""

import asyncio
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

import click
import httpx
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console
from rich.live import Live
from rich.table import Table

from engine.config import CacheConfig, SchedulerConfig
from engine.scheduling.fairness import ServiceGapMeter, service_bound
from gateway.cli import load
from gateway.cli.fairness import Sample, backlogged_seconds, entitlements, shares
from gateway.cli.home import ServerNote, find_note
from gateway.cli.latency import Percentiles, RequestRecord
from gateway.cli.output import NoServerError, json_option, print_json, stdout
from gateway.cli.store import actor, load_settings, with_store
from gateway.settings import Settings
from tenants.errors import TenantExistsError
from tenants.store import Store

OUTPUT_TOKENS = 16
TOKEN_IDS = range(97, 123)  # plain text in any vocabulary that begins with bytes
POLL_SECONDS = 0.5
POLL_TIMEOUT_SECONDS = 20.0
ERROR_PAUSE_SECONDS = 1.0  # a refused client must not spin


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoTenant:
    """One tenant's part: a closed loop of clients, enough of them to be always backlogged."""

    slug: str
    weight: float
    num_clients: int
    prompt_tokens: int


TENANTS = (
    DemoTenant(slug="demo-noisy", weight=1, num_clients=48, prompt_tokens=400),
    DemoTenant(slug="demo-steady", weight=1, num_clients=24, prompt_tokens=40),
    DemoTenant(slug="demo-double", weight=2, num_clients=36, prompt_tokens=40),
)
MAX_PROMPT_TOKENS = max(tenant.prompt_tokens for tenant in TENANTS)
WEIGHTS = {tenant.slug: tenant.weight for tenant in TENANTS}


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantResult:
    """What one tenant got."""

    tenant: str
    weight: float
    num_requests: int  # ended; the rest was cut off when the time was over
    num_errors: int
    tokens: int  # prompt and output, as the server counts them
    share: float | None  # of the service while all were backlogged
    entitlement: float
    ttft_ms: Percentiles
    tpot_ms: Percentiles


@dataclass(frozen=True, slots=True, kw_only=True)
class Gap:
    """Largest difference of service over weight that two backlogged tenants had, and its bound."""

    tenants: tuple[str, str]
    gap: float
    bound: float


@click.group()
def command() -> None:
    """Demonstrations on a running server."""


@command.command("load")
@click.option("--seconds", default=60.0, show_default=True, type=click.FloatRange(min=1))
@json_option
def load_(seconds: float, as_json: bool) -> None:
    """Flood this home's server as one tenant, use it as two others, and see who gets what.

    Weights are 1, 1 and 2. Shares and the service gap are read from the server's own counters,
    over the time in which the tenants are backlogged.
    """
    settings = load_settings()
    note = find_note(settings.home)
    if note is None:
        raise NoServerError(
            "no server to load",
            why=f"none has left its note in {settings.home}",
            next_step="headrace up, in another terminal with the same HEADRACE_HOME",
        )
    keys = with_store(settings, "make the demo tenants", _make_tenants)
    records: dict[str, list[RequestRecord]] = {tenant.slug: [] for tenant in TENANTS}
    try:
        secrets = {slug: secret for slug, (_, secret) in keys.items()}
        samples = asyncio.run(_run(settings, note, secrets, records, seconds, shown=not as_json))
    finally:
        key_ids = [key_id for key_id, _ in keys.values()]
        with_store(settings, "revoke the demo keys", lambda store: _revoke(store, key_ids))
    _report(_results(records, samples), _largest_gap(note, samples), samples, as_json)


async def _make_tenants(store: Store) -> dict[str, tuple[str, str]]:
    """Key id and secret by tenant. The keys live for one run; the tenants stay."""
    made = {}
    for tenant in TENANTS:
        try:
            await store.create_tenant(
                tenant.slug, weight=tenant.weight, actor=actor(), now=time.time()
            )
        except TenantExistsError:
            await store.set_tenant(
                tenant.slug, weight=tenant.weight, limits=(), actor=actor(), now=time.time()
            )
        key, secret = await store.create_key(
            tenant.slug, "demo load", actor=actor(), now=time.time()
        )
        made[tenant.slug] = (key.id, secret)
    return made


async def _revoke(store: Store, key_ids: Sequence[str]) -> None:
    for key_id in key_ids:
        await store.revoke_key(key_id, actor=actor(), now=time.time())


async def _run(
    settings: Settings,
    note: ServerNote,
    secrets: Mapping[str, str],
    records: Mapping[str, list[RequestRecord]],
    seconds: float,
    shown: bool,
) -> list[Sample]:
    """Load the server for `seconds`, filling `records`; the samples taken meanwhile."""
    samples: list[Sample] = []
    async with load.client() as http:
        end = time.monotonic() + seconds
        clients = [
            asyncio.create_task(_client(http, note, tenant, secrets[tenant.slug], n, end, records))
            for tenant in TENANTS
            for n in range(tenant.num_clients)
        ]
        console = Console(stderr=True)
        console.quiet = not (shown and console.is_terminal)
        try:
            with Live(console=console, transient=True) as live:
                while time.monotonic() < end:
                    samples.append(await _sample(http, note, settings.operator_token))
                    live.update(_table(_results(records, samples), samples[-1]))
                    await asyncio.sleep(POLL_SECONDS)
        except httpx.HTTPError as error:
            raise NoServerError(
                "the server stopped answering",
                why=f"{type(error).__name__} from {note.base_url}/metrics",
                next_step="headrace up",
            ) from error
        finally:
            for client in clients:
                client.cancel()
            ends = await asyncio.gather(*clients, return_exceptions=True)
        for end_of_client in ends:
            if isinstance(end_of_client, Exception):
                raise end_of_client
    return samples


async def _client(
    http: httpx.AsyncClient,
    note: ServerNote,
    tenant: DemoTenant,
    secret: str,
    number: int,
    end: float,
    records: Mapping[str, list[RequestRecord]],
) -> None:
    """One client of one tenant: the next request when the last one ended, until `end`."""
    target = load.Target(base_url=note.base_url, model=note.model, api_key=secret)
    # Other prompts in each run: none may be in the prefix cache.
    rng = random.Random(f"{secret} {number}")  # noqa: S311 - load, not secrets
    while time.monotonic() < end:
        # Token ids, so that the length that the bound rests on is exact.
        prompt = tuple(rng.choices(TOKEN_IDS, k=tenant.prompt_tokens))
        work = load.Work(prompt=prompt, output_tokens=OUTPUT_TOKENS)
        record = await load.send(http, target, work, time.monotonic())
        records[tenant.slug].append(record)
        if record.error is not None:
            await asyncio.sleep(ERROR_PAUSE_SECONDS)


async def _sample(http: httpx.AsyncClient, note: ServerNote, token: str | None) -> Sample:
    """The server's view of the demo's tenants now. Raises httpx.HTTPError."""
    headers = {"authorization": f"Bearer {token}"} if token else {}
    reply = await http.get(
        f"{note.base_url}/metrics", headers=headers, timeout=POLL_TIMEOUT_SECONDS
    )
    reply.raise_for_status()
    series: dict[str, dict[str, float]] = {}
    for family in text_string_to_metric_families(reply.text):
        for point in family.samples:
            tenant = point.labels.get("tenant")
            if tenant in WEIGHTS and point.labels.get("kind") != "cached":  # part of the input
                of_tenants = series.setdefault(point.name, {})
                of_tenants[tenant] = of_tenants.get(tenant, 0.0) + point.value
    return Sample(
        at=time.monotonic(),
        counters=series.get("headrace_tenant_virtual_counter", {}),
        waiting=series.get("headrace_tenant_queue_depth", {}),
        running=series.get("headrace_tenant_running", {}),
        tokens=series.get("headrace_tenant_tokens_total", {}),
    )


def _results(
    records: Mapping[str, list[RequestRecord]], samples: Sequence[Sample]
) -> list[TenantResult]:
    got = shares(samples, WEIGHTS) or {}
    results = []
    for slug, weight in WEIGHTS.items():
        done = [record for record in records[slug] if record.error is None]
        tokens = samples[-1].tokens.get(slug, 0.0) - samples[0].tokens.get(slug, 0.0)
        results.append(
            TenantResult(
                tenant=slug,
                weight=weight,
                num_requests=len(records[slug]),
                num_errors=len(records[slug]) - len(done),
                tokens=int(tokens),
                share=got.get(slug),
                entitlement=entitlements(WEIGHTS)[slug],
                ttft_ms=Percentiles.of_seconds(record.ttft_seconds for record in done),
                tpot_ms=Percentiles.of_seconds(record.tpot_seconds for record in done),
            )
        )
    return results


def _largest_gap(note: ServerNote, samples: Sequence[Sample]) -> Gap | None:
    """The pair that came closest to its bound; None if no two were backlogged together."""
    meter = ServiceGapMeter()
    for sample in samples:
        waiting = {t for t, n in sample.waiting.items() if n > 0 and t in sample.counters}
        meter.observe(waiting, sample.counters)
    config = SchedulerConfig(
        max_seqs=note.max_seqs,
        max_step_tokens=note.max_step_tokens,
        max_model_len=note.max_model_len,
    )
    gaps = [
        Gap(
            tenants=pair,
            gap=gap,
            bound=service_bound(
                config,
                CacheConfig(num_blocks=note.num_blocks, block_size=note.block_size),
                weights=(WEIGHTS[pair[0]], WEIGHTS[pair[1]]),
                max_prompt_tokens=MAX_PROMPT_TOKENS,
                max_output_tokens=OUTPUT_TOKENS,
            ),
        )
        for pair, gap in meter.largest.items()
    ]
    return max(gaps, key=lambda one: one.gap / one.bound, default=None)


def _report(
    results: Sequence[TenantResult], gap: Gap | None, samples: Sequence[Sample], as_json: bool
) -> None:
    backlogged = backlogged_seconds(samples, list(WEIGHTS))
    if as_json:
        print_json(
            {
                "backlogged_seconds": backlogged,
                "tenants": [asdict(result) for result in results],
                "gap": gap and asdict(gap),
            }
        )
        return
    console = stdout()
    console.print(_table(results, samples[-1]))
    console.print(f"All three were backlogged for {backlogged:.1f} s; shares are of that time.")
    if gap is None:
        console.print("No two of them were backlogged together: there is no gap to measure.")
    else:
        console.print(
            f"Largest gap of service per weight: {gap.gap:.0f} between {' and '.join(gap.tenants)}"
            f", bound {gap.bound:.0f}."
        )


def _table(results: Sequence[TenantResult], now: Sample) -> Table:
    table = Table(box=None, header_style="bold")
    columns = ("tenant", "weight", "running", "queued", "done", "errors", "tokens")
    for column in (*columns, "share", "entitled", "TTFT p50/p99 s", "TPOT p50/p99 ms"):
        table.add_column(column, justify="left" if column == "tenant" else "right")
    for one in results:
        table.add_row(
            one.tenant,
            f"{one.weight:g}",
            f"{now.running.get(one.tenant, 0):.0f}",
            f"{now.waiting.get(one.tenant, 0):.0f}",
            str(one.num_requests - one.num_errors),
            str(one.num_errors),
            str(one.tokens),
            "-" if one.share is None else f"{100 * one.share:.0f}%",
            f"{100 * one.entitlement:.0f}%",
            _pair(one.ttft_ms, 1000),
            _pair(one.tpot_ms, 1),
        )
    return table


def _pair(percentiles: Percentiles, divisor: float) -> str:
    if percentiles.p50 is None or percentiles.p99 is None:
        return "-"
    digits = 1 if divisor > 1 else 0
    return f"{percentiles.p50 / divisor:.{digits}f}/{percentiles.p99 / divisor:.{digits}f}"
