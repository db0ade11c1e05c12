"""The series that the engine's events fill: names, labels and buckets."""

from prometheus_client import CollectorRegistry, Counter, Histogram

from engine.events import SequenceFinished

_TTFT = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10),
    *(20, 40, 80, 160, 640, 2560),
)
_ITL = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1),
    *(2.5, 5, 7.5, 10, 20, 40, 80),
)
LATENCY = (
    *(0.001, 0.005, 0.01, 0.05, 0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50),
    *(60, 120, 240, 480, 960, 1920, 7680),
)
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000)
_STEP = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)


class VllmSeries:
    """The subset of vLLM's series that this engine can fill truthfully."""

    def __init__(self, registry: CollectorRegistry, model_name: str) -> None:
        self._registry = registry
        self._values = (model_name, "0")
        counter, histogram = self._counter, self._histogram
        self.preemptions = counter("num_preemptions", "Preemptions")
        self.prompt_tokens = counter("prompt_tokens", "Prompt tokens of admitted requests")
        self.generation_tokens = counter("generation_tokens", "Generated tokens")
        self.cached_tokens = counter("prompt_tokens_cached", "Prompt tokens found in the cache")
        self.success = Counter(
            "vllm:request_success",
            "Finished requests",
            ["model_name", "engine", "finished_reason"],
            registry=registry,
        )
        self.ttft = histogram("time_to_first_token_seconds", _TTFT)
        self.inter_token = histogram("inter_token_latency_seconds", _ITL)
        self.per_token = histogram("request_time_per_output_token_seconds", _ITL)
        self.e2e = histogram("e2e_request_latency_seconds", LATENCY)
        self.queue = histogram("request_queue_time_seconds", LATENCY)
        self.prefill = histogram("request_prefill_time_seconds", LATENCY)
        self.decode = histogram("request_decode_time_seconds", LATENCY)
        self.inference = histogram("request_inference_time_seconds", LATENCY)
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
        self.request_prompt.observe(usage.prompt_tokens)
        if times.first_token is not None:
            self.ttft.observe(times.first_token - times.arrived)
            self.prefill.observe(times.first_token - times.admitted)


class EngineSeries:
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
            "headrace_tenant_preemptions",
            "Preemptions, by how the KV comes back",
            ["tenant", "role", "how"],
            registry=registry,
        )
        self.step_tokens = Counter(
            "headrace_step_tokens", "Tokens computed in steps", ["kind"], registry=registry
        )
        self.copied_blocks = Counter(
            "headrace_copied_blocks", "KV blocks copied whole", ["kind"], registry=registry
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
            "headrace_tenant_queue_seconds", "One wait in the queue", "tenant", LATENCY
        )
        self.step_seconds = histogram(
            "headrace_scheduler_step_seconds", "Time by part of a step", "phase", _STEP
        )
