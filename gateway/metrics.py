"""Prometheus metrics in a registry of their own: the vllm:* names dashboards know, and headrace_*.

Engine events arrive a step at a time on the event loop, outside the engine's thread. Tenant labels
come from the slug of the policy store, never from a request, and their number is bounded.
"""

import math
from collections.abc import Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from starlette.routing import Route
from starlette.types import Scope

from engine.config import EngineConfig
from engine.events import (
    Event,
    GroupFinished,
    SequenceAdmitted,
    SequenceFinished,
    SequencePreempted,
    StepFinished,
    TokensGenerated,
)
from engine.snapshot import EngineSnapshot, TenantMemory
from gateway.metric_series import LATENCY, EngineSeries, VllmSeries

OTHER = "_other"


class TenantLabels:
    """The first N tenants get a label of their own; later ones share `_other`."""

    def __init__(self, max_tenants: int) -> None:
        self._max_tenants = max_tenants
        self._known: set[str] = set()

    def label(self, tenant: str) -> str:
        if tenant not in self._known:
            if len(self._known) >= self._max_tenants:
                return OTHER
            self._known.add(tenant)
        return tenant


class HttpMetrics:
    """Requests by route, method and class of status."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._requests = Counter(
            "http_requests", "HTTP requests", ["handler", "method", "status"], registry=registry
        )
        self._seconds = Histogram(
            "http_request_duration_seconds",
            "Time until the end of the response",
            ["handler", "method"],
            buckets=LATENCY,
            registry=registry,
        )

    def observe(self, scope: Scope, status: int, seconds: float) -> None:
        """Count one finished request; status 0 is a response that never began."""
        route = scope.get("route")
        handler = route.path if isinstance(route, Route) else "none"
        method = scope["method"] if scope["method"] in _METHODS else "other"
        family = f"{status // 100}xx" if status else "none"
        self._requests.labels(handler, method, family).inc()
        self._seconds.labels(handler, method).observe(seconds)


_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})


class TenantMetrics:
    """What the gateway decided and delivered, by tenant."""

    def __init__(self, registry: CollectorRegistry, labels: TenantLabels) -> None:
        self._labels = labels
        self._requests = Counter(
            "headrace_tenant_requests",
            "Generation requests by how they ended",
            ["tenant", "outcome"],
            registry=registry,
        )
        self._rate_limited = Counter(
            "headrace_rate_limited",
            "Requests refused by a limit",
            ["tenant", "limit"],
            registry=registry,
        )
        self._deadline_exceeded = Counter(
            "headrace_deadline_exceeded",
            "Requests ended, or not begun, because of their own deadline",
            ["tenant"],
            registry=registry,
        )
        self._estimate_ratio = Histogram(
            "headrace_ttft_estimate_ratio",
            "Time to first token over what was foreseen when the request came",
            buckets=(0.25, 0.5, 0.67, 0.8, 0.9, 1, 1.11, 1.25, 1.5, 2, 4),
            registry=registry,
        )

    def request_ended(self, tenant: str, outcome: str) -> None:
        self._requests.labels(self._labels.label(tenant), outcome).inc()

    def first_token_foreseen(self, estimated_seconds: float, actual_seconds: float) -> None:
        if estimated_seconds > 0:
            self._estimate_ratio.observe(actual_seconds / estimated_seconds)

    def deadline_exceeded(self, tenant: str) -> None:
        self._deadline_exceeded.labels(self._labels.label(tenant)).inc()

    def rate_limited(self, tenant: str, limit: str) -> None:
        self._rate_limited.labels(self._labels.label(tenant), limit).inc()


class EngineMetrics:
    """Counts the events of the engine's steps.

    A request for several sequences is one request, whose first sequence stands for it; what is
    said of tokens counts every sequence.
    """

    def __init__(self, registry: CollectorRegistry, labels: TenantLabels, model_name: str) -> None:
        self._labels = labels
        # By request and sequence, for inter-token latency.
        self._last_token: dict[tuple[str, int], float] = {}
        self._vllm = VllmSeries(registry, model_name)
        self._own = EngineSeries(registry)

    def observe(self, events: Sequence[Event]) -> None:
        """An Observer of the engine."""
        for event in events:
            match event:
                case TokensGenerated():
                    self._count_tokens(event)
                case StepFinished():
                    self._count_step(event)
                # To be handed over between the engine's own pools is not to wait in the queue.
                case SequenceAdmitted() if event.stage != "decode":
                    tenant = self._labels.label(event.tenant)
                    self._own.queue_seconds.labels(tenant).observe(event.waited_seconds)
                case SequencePreempted():
                    self._vllm.preemptions.inc()
                    tenant = self._labels.label(event.tenant)
                    how = "swap" if event.swapped else "recompute"
                    self._own.preemptions.labels(tenant, "victim", how).inc()
                case SequenceFinished():
                    self._count_finished(event)
                case GroupFinished():
                    steps = self._own.group_block_steps
                    steps.labels("held").inc(event.block_steps)
                    steps.labels("unshared").inc(event.unshared_block_steps)

    def _count_tokens(self, event: TokensGenerated) -> None:
        sequence = (event.request_id, event.index)
        before = self._last_token.get(sequence)
        if before is not None:
            self._vllm.inter_token.observe((event.at - before) / len(event.token_ids))
        self._last_token[sequence] = event.at

    def _count_step(self, event: StepFinished) -> None:
        """A batch. An engine of two stages has one of each per step, one after the other."""
        num_tokens = event.num_prefill_tokens + event.num_decode_tokens
        if num_tokens:  # a step may only copy
            self._vllm.iteration_tokens.observe(num_tokens)
        self._own.step_tokens.labels("prefill").inc(event.num_prefill_tokens)
        self._own.step_tokens.labels("decode").inc(event.num_decode_tokens)
        self._own.step_seconds.labels("plan").observe(event.scheduled - event.started)
        self._own.step_seconds.labels("model").observe(event.executed - event.scheduled)
        copied = self._own.copied_blocks
        copied.labels("swapped_out").inc(event.num_swapped_out_blocks)
        copied.labels("swapped_in").inc(event.num_swapped_in_blocks)
        copied.labels("copied").inc(event.num_copied_blocks)
        copied.labels("received").inc(event.num_received_blocks)

    def _count_finished(self, event: SequenceFinished) -> None:
        self._last_token.pop((event.request_id, event.index), None)
        tenant = self._labels.label(event.tenant)
        self._vllm.count_finished(event)
        usage, times = event.usage, event.timings
        tokens = self._own.tokens
        tokens.labels(tenant, "input").inc(usage.prompt_tokens if times.admitted else 0)
        tokens.labels(tenant, "output").inc(usage.output_tokens)
        tokens.labels(tenant, "cached").inc(usage.cached_tokens)
        if times.first_token is not None and event.index == 0:
            self._own.ttft.labels(tenant).observe(times.first_token - times.arrived)


class StateMetrics:
    """Gauges of this instant, read from the engine when somebody looks."""

    def __init__(
        self,
        registry: CollectorRegistry,
        labels: TenantLabels,
        model_name: str,
        config: EngineConfig,
    ) -> None:
        self._labels = labels
        self._values = (model_name, "0")

        def gauge(name: str, text: str, *names: str) -> Gauge:
            return Gauge(name, text, names, registry=registry)

        vllm = ("model_name", "engine")
        self._running = gauge("vllm:num_requests_running", "Sequences in the batch", *vllm)
        self._waiting = gauge("vllm:num_requests_waiting", "Sequences in queues", *vllm)
        self._kv_usage = gauge("vllm:kv_cache_usage_perc", "Held part of the KV cache, 0-1", *vllm)
        self._tenant_running = gauge("headrace_tenant_running", "Sequences in the batch", "tenant")
        self._tenant_waiting = gauge("headrace_tenant_queue_depth", "Sequences waiting", "tenant")
        self._tenant_counter = gauge(
            "headrace_tenant_virtual_counter", "Service received over weight", "tenant", "rank"
        )
        self._gap = gauge(
            "headrace_fairness_max_gap_tokens",
            "Largest difference of virtual counters between tenants of one class that wait",
        )
        pools = [pool for pool in (config.cache, config.prefill_cache) if pool is not None]
        gauge("vllm:cache_config_info", "KV cache", *vllm, "block_size", "num_gpu_blocks").labels(
            *self._values, config.cache.block_size, sum(pool.num_blocks for pool in pools)
        ).set(1)
        self._policy = gauge("headrace_scheduler_policy_info", "Scheduling policy", "policy")

    def read(self, now: EngineSnapshot) -> None:
        """Set every gauge to the snapshot."""
        total = now.free_blocks + now.cached_blocks + now.held_blocks
        self._running.labels(*self._values).set(now.num_running)
        self._waiting.labels(*self._values).set(now.num_waiting)
        self._kv_usage.labels(*self._values).set(now.held_blocks / total if total else 0)
        # Cleared first: a tenant that left has no value rather than an old one.
        self._tenant_running.clear()
        self._tenant_waiting.clear()
        self._tenant_counter.clear()
        self._policy.clear()
        self._policy.labels(now.policy).set(1)
        waiting: dict[int, list[float]] = {}
        for row in now.tenants:
            label = self._labels.label(row.tenant)
            if row.num_running:
                self._tenant_running.labels(label).inc(row.num_running)
            if row.num_waiting:
                self._tenant_waiting.labels(label).inc(row.num_waiting)
                waiting.setdefault(row.rank, []).append(row.counter)
            if label != OTHER:  # counters do not add up
                self._tenant_counter.labels(label, row.rank).set(row.counter)
        self._gap.set(max((max(c) - min(c) for c in waiting.values()), default=0))


class MemoryMetrics:
    """Who has which KV blocks now, and what the prefix cache did for whom."""

    def __init__(self, registry: CollectorRegistry, labels: TenantLabels, model_name: str) -> None:
        def counter(name: str, text: str, *names: str) -> Counter:
            return Counter(name, text, names, registry=registry)

        self._labels = labels
        self._blocks = Gauge(
            "headrace_kv_blocks",
            "KV blocks: in use, kept for reuse, or in host memory",
            ["tenant", "state"],
            registry=registry,
        )
        queried, hit = "Tokens looked up in the prefix cache", "Tokens found in the prefix cache"
        vllm = ("model_name", "engine")
        self._queries = counter("vllm:prefix_cache_queries", queried, *vllm).labels(model_name, "0")
        self._hits = counter("vllm:prefix_cache_hits", hit, *vllm).labels(model_name, "0")
        self._queried_tokens = counter("headrace_prefix_cache_queried_tokens", queried, "tenant")
        self._hit_tokens = counter("headrace_prefix_cache_hit_tokens", hit, "tenant")
        self._evicted_blocks = counter(
            "headrace_prefix_cache_evicted_blocks", "Cached blocks taken for other use", "tenant"
        )
        self._block_seconds = counter(
            "headrace_kv_block_seconds",
            "Time that KV blocks were held; of blocks held by several, each's part",
            "tenant",
        )
        # By tenant and fact: what the counters contain of the engine's totals.
        self._counted: dict[tuple[str, str], float] = {}

    def read(self, memory: Sequence[TenantMemory]) -> None:
        """Set the gauges, and bring the counters up to the engine's totals."""
        self._blocks.clear()
        for row in memory:
            label = self._labels.label(row.tenant)
            self._blocks.labels(label, "held").inc(row.held_blocks)
            self._blocks.labels(label, "cached").inc(row.cached_blocks)
            self._blocks.labels(label, "host").inc(row.host_blocks)
            queried = self._increase(row.tenant, "queried", row.queried_tokens)
            hit = self._increase(row.tenant, "hit", row.hit_tokens)
            evicted = self._increase(row.tenant, "evicted", row.evicted_blocks)
            self._queries.inc(queried)
            self._hits.inc(hit)
            self._queried_tokens.labels(label).inc(queried)
            self._hit_tokens.labels(label).inc(hit)
            self._evicted_blocks.labels(label).inc(evicted)
            held = self._increase(row.tenant, "block_seconds", row.kv_block_seconds)
            self._block_seconds.labels(label).inc(held)

    def _increase(self, tenant: str, fact: str, total: float) -> float:
        """Since the last look. A total that fell began again from 0, as Prometheus reckons; but a
        sum of floats may come out a hair lower when it is summed in another order."""
        before = self._counted.get((tenant, fact), 0)
        self._counted[tenant, fact] = total
        has_restarted = total < before and not math.isclose(total, before)
        return total if has_restarted else max(0.0, total - before)


class Metrics:
    """All series of one gateway process."""

    def __init__(self, *, model_name: str, config: EngineConfig, max_tenants: int) -> None:
        self._registry = CollectorRegistry()
        labels = TenantLabels(max_tenants)
        self.http = HttpMetrics(self._registry)
        self.tenants = TenantMetrics(self._registry, labels)
        self.engine = EngineMetrics(self._registry, labels, model_name)
        self._state = StateMetrics(self._registry, labels, model_name, config)
        self._memory = MemoryMetrics(self._registry, labels, model_name)

    def render(self, snapshot: EngineSnapshot) -> bytes:
        """The text that Prometheus scrapes."""
        self._state.read(snapshot)
        self._memory.read(snapshot.memory)
        return generate_latest(self._registry)
