"""Prometheus metrics in a registry of their own: the vllm:* names dashboards know, and headrace_*.

Engine events arrive a step at a time on the event loop, outside the engine's thread. Tenant labels
come from the slug of the policy store, never from a request, and their number is bounded.
"""

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
from engine.snapshot import EngineSnapshot

OTHER = "_other"

_TTFT = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10),
    *(20, 40, 80, 160, 640, 2560),
)
_ITL = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1),
    *(2.5, 5, 7.5, 10, 20, 40, 80),
)
_LATENCY = (
    *(0.001, 0.005, 0.01, 0.05, 0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50),
    *(60, 120, 240, 480, 960, 1920, 7680),
)
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000)
_STEP = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)


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
            buckets=_LATENCY,
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

    def request_ended(self, tenant: str, outcome: str) -> None:
        self._requests.labels(self._labels.label(tenant), outcome).inc()

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
        self._vllm = _VllmSeries(registry, model_name)
        self._own = _EngineSeries(registry)

    def observe(self, events: Sequence[Event]) -> None:
        """An Observer of the engine."""
        for event in events:
            match event:
                case TokensGenerated():
                    self._count_tokens(event)
                case StepFinished():
                    self._count_step(event)
                case SequenceAdmitted():
                    tenant = self._labels.label(event.tenant)
                    self._own.queue_seconds.labels(tenant).observe(event.waited_seconds)
                case SequencePreempted():
                    self._vllm.preemptions.inc()
                    self._own.preemptions.labels(self._labels.label(event.tenant), "victim").inc()
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
        self._vllm.iteration_tokens.observe(event.num_prefill_tokens + event.num_decode_tokens)
        self._own.step_tokens.labels("prefill").inc(event.num_prefill_tokens)
        self._own.step_tokens.labels("decode").inc(event.num_decode_tokens)
        self._own.step_seconds.labels("plan").observe(event.scheduled - event.started)
        self._own.step_seconds.labels("model").observe(event.executed - event.scheduled)

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


class _VllmSeries:
    """The subset of vLLM's series that this engine can fill truthfully."""

    def __init__(self, registry: CollectorRegistry, model_name: str) -> None:
        self._registry = registry
        self._values = (model_name, "0")
        counter, histogram = self._counter, self._histogram
        self.preemptions = counter("num_preemptions", "Preemptions")
        self.prompt_tokens = counter("prompt_tokens", "Prompt tokens of admitted requests")
        self.generation_tokens = counter("generation_tokens", "Generated tokens")
        self.cached_tokens = counter("prompt_tokens_cached", "Prompt tokens found in the cache")
        self.cache_queries = counter("prefix_cache_queries", "Tokens looked up in the cache")
        self.cache_hits = counter("prefix_cache_hits", "Tokens found in the cache")
        self.success = Counter(
            "vllm:request_success",
            "Finished requests",
            ["model_name", "engine", "finished_reason"],
            registry=registry,
        )
        self.ttft = histogram("time_to_first_token_seconds", _TTFT)
        self.inter_token = histogram("inter_token_latency_seconds", _ITL)
        self.per_token = histogram("request_time_per_output_token_seconds", _ITL)
        self.e2e = histogram("e2e_request_latency_seconds", _LATENCY)
        self.queue = histogram("request_queue_time_seconds", _LATENCY)
        self.prefill = histogram("request_prefill_time_seconds", _LATENCY)
        self.decode = histogram("request_decode_time_seconds", _LATENCY)
        self.inference = histogram("request_inference_time_seconds", _LATENCY)
        self.request_prompt = histogram("request_prompt_tokens", _TOKENS)
        self.request_generation = histogram("request_generation_tokens", _TOKENS)
        self.iteration_tokens = histogram("iteration_tokens_total", _TOKENS)

    def _counter(self, name: str, text: str) -> Counter:
        return Counter(
            f"vllm:{name}", text, ["model_name", "engine"], registry=self._registry
        ).labels(*self._values)

    def _histogram(self, name: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(
            f"vllm:{name}",
            name.replace("_", " "),
            ["model_name", "engine"],
            buckets=buckets,
            registry=self._registry,
        ).labels(*self._values)

    def count_finished(self, event: SequenceFinished) -> None:
        usage, times = event.usage, event.timings
        if event.index == 0:
            self._count_request(event)
        elif not usage.output_tokens:
            return  # a beam: what all of them generated is with the first
        if times.admitted is None:
            return
        self.generation_tokens.inc(usage.output_tokens)
        self.request_generation.observe(usage.output_tokens)
        if times.first_token is None:
            return
        self.decode.observe(times.finished - times.first_token)
        if usage.output_tokens > 1:
            seconds = times.finished - times.first_token
            self.per_token.observe(seconds / (usage.output_tokens - 1))

    def _count_request(self, event: SequenceFinished) -> None:
        usage, times = event.usage, event.timings
        self.success.labels(*self._values, event.reason).inc()
        self.e2e.observe(times.finished - times.arrived)
        if times.admitted is None:
            return
        self.queue.observe(times.admitted - times.arrived)
        self.inference.observe(times.finished - times.admitted)
        self.prompt_tokens.inc(usage.prompt_tokens)
        self.cached_tokens.inc(usage.cached_tokens)
        self.cache_queries.inc(usage.prompt_tokens)
        self.cache_hits.inc(usage.cached_tokens)
        self.request_prompt.observe(usage.prompt_tokens)
        if times.first_token is not None:
            self.ttft.observe(times.first_token - times.arrived)
            self.prefill.observe(times.first_token - times.admitted)


class _EngineSeries:
    """What nobody else has: queues, tokens and preemptions by tenant, time by part of a step."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def histogram(name: str, text: str, label: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(name, text, [label], buckets=buckets, registry=registry)

        self.tokens = Counter(
            "headrace_tenant_tokens",
            "Tokens of finished sequences",
            ["tenant", "kind"],
            registry=registry,
        )
        self.preemptions = Counter(
            "headrace_tenant_preemptions", "Preemptions", ["tenant", "role"], registry=registry
        )
        self.step_tokens = Counter(
            "headrace_step_tokens", "Tokens computed in steps", ["kind"], registry=registry
        )
        self.group_block_steps = Counter(
            "headrace_group_block_steps",
            "KV blocks over steps of requests for several sequences: held together, and what they "
            "would be unshared",
            ["kind"],
            registry=registry,
        )
        self.ttft = histogram(
            "headrace_tenant_ttft_seconds", "Arrival to first token", "tenant", _TTFT
        )
        self.queue_seconds = histogram(
            "headrace_tenant_queue_seconds", "One wait in the queue", "tenant", _LATENCY
        )
        self.step_seconds = histogram(
            "headrace_scheduler_step_seconds", "Time by part of a step", "phase", _STEP
        )


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
        gauge("vllm:cache_config_info", "KV cache", *vllm, "block_size", "num_gpu_blocks").labels(
            *self._values, config.cache.block_size, config.cache.num_blocks
        ).set(1)
        gauge("headrace_scheduler_policy_info", "Scheduling policy", "policy").labels(
            config.scheduler.policy
        ).set(1)

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


class Metrics:
    """All series of one gateway process."""

    def __init__(self, *, model_name: str, config: EngineConfig, max_tenants: int) -> None:
        self._registry = CollectorRegistry()
        labels = TenantLabels(max_tenants)
        self.http = HttpMetrics(self._registry)
        self.tenants = TenantMetrics(self._registry, labels)
        self.engine = EngineMetrics(self._registry, labels, model_name)
        self._state = StateMetrics(self._registry, labels, model_name, config)

    def render(self, snapshot: EngineSnapshot) -> bytes:
        """The text that Prometheus scrapes."""
        self._state.read(snapshot)
        return generate_latest(self._registry)
