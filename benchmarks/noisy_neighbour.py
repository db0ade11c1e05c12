"""What a flood does to a steady neighbour, on the real model.

    OMP_WAIT_POLICY=passive python benchmarks/noisy_neighbour.py [requests]

Tenant `steady` sends a short chat turn at a fixed pace, behind a system prompt that it has sent
before; tenant `flood` keeps a queue of long prompts. Measured for the steady tenant: alone with
half of the machine's time (each step is followed by a pause of the same length), and alone with
half of its threads, which for small batches are much more than half of it; then beside the flood
with all of it, by `wfq` and by `fcfs`. Also whether its cached system prompt, which its KV floor
covers, outlives the flood, and whether its floor does.
"""

import random
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from engine.config import CacheConfig, EngineConfig, SchedulerConfig
from engine.core import EngineCore
from engine.events import SequenceFinished, TokensGenerated
from engine.model.default_model import find_default_model
from engine.model.loader import load_model
from engine.model.runner import ModelRunner
from engine.plan import Runner, StepOutput, StepPlan
from engine.sequence import SamplingParams, TenantShare
from engine.waits import WaitCause

PACE_SECONDS = 2.5
SYSTEM_TOKENS, TURN_TOKENS, OUTPUT_TOKENS = 64, 96, 16
FLOOD_PROMPT_TOKENS, FLOOD_OUTPUT_TOKENS, FLOOD_QUEUE = 600, 32, 8
FLOOR_BLOCKS = 16
# The budget of a step is what a decode may wait for; a CPU gains nothing by larger ones.
CACHE = CacheConfig(num_blocks=136)
SCHEDULER = {"max_step_tokens": 16, "max_seqs": 8, "max_model_len": 1024}

STEADY = TenantShare(tenant="steady", kv_floor_blocks=FLOOR_BLOCKS)
FLOOD = TenantShare(tenant="flood")


@dataclass
class Run:
    """What befell the steady tenant. Latencies in seconds."""

    ttft: list[float] = field(default_factory=list)
    tpot: list[float] = field(default_factory=list)  # mean of each request
    cached_tokens: list[int] = field(default_factory=list)
    kv_seconds: float = 0.0  # that it waited for blocks, all requests together
    least_blocks: int = FLOOR_BLOCKS  # held or cached, once it had as many as its floor
    num_flood_tokens: int = 0
    evicted_blocks: int = 0  # of the flood's own cache: that there was pressure at all


@dataclass(frozen=True)
class HalfOfTheTime:
    """A runner that has the machine every other moment."""

    runner: Runner

    def execute(self, plan: StepPlan) -> StepOutput:
        started = time.monotonic()
        output = self.runner.execute(plan)
        time.sleep(time.monotonic() - started)
        return output


def run(
    runner: Runner,
    policy: str,
    *,
    num_requests: int,
    flood: bool,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> Run:
    """One run of the steady tenant's requests, on whatever executes them."""
    config = EngineConfig(
        cache=CACHE,
        scheduler=SchedulerConfig(policy=policy, **SCHEDULER),  # type: ignore[arg-type]
    )
    core = EngineCore(config, runner, clock=clock)
    rng, found = random.Random(1), Run()
    system = tokens(rng, SYSTEM_TOKENS)
    add(core, "warm-up", STEADY, system + tokens(rng, TURN_TOKENS))
    while core.has_work:
        core.step()
    due = {f"s{i}": clock() + PACE_SECONDS * (i + 1) for i in range(num_requests)}
    pending, num_floods = list(due), 0
    pool, reached_floor = core.scheduler.pool, False
    token_times: defaultdict[str, list[float]] = defaultdict(list)
    while pending or any(one in core._requests for one in due):
        now = clock()
        while pending and due[pending[0]] <= now:
            add(core, pending.pop(0), STEADY, system + tokens(rng, TURN_TOKENS))
        while flood and core.scheduler.queues.num_waiting(0, "flood") < FLOOD_QUEUE:
            add(core, f"f{num_floods}", FLOOD, tokens(rng, FLOOD_PROMPT_TOKENS))
            num_floods += 1
        if not core.has_work:
            sleep(max(0.0, due[pending[0]] - now))
            continue
        events = core.step()
        blocks = pool.held_by_tenant["steady"] + pool.cached_by_tenant["steady"]
        reached_floor = reached_floor or blocks >= FLOOR_BLOCKS
        if reached_floor:
            found.least_blocks = min(found.least_blocks, blocks)
        for event in events:
            if isinstance(event, TokensGenerated) and event.tenant == "steady":
                token_times[event.request_id].append(event.at)
            elif isinstance(event, SequenceFinished) and event.tenant == "steady":
                found.cached_tokens.append(event.usage.cached_tokens)
                found.kv_seconds += waited_for_blocks(core, event.request_id)
            elif isinstance(event, SequenceFinished):
                found.num_flood_tokens += event.usage.prompt_tokens + event.usage.output_tokens
    for request_id, times in token_times.items():
        found.ttft.append(times[0] - due[request_id])
        found.tpot.append((times[-1] - times[0]) / (len(times) - 1))
    found.evicted_blocks = pool.evicted_by_tenant["flood"]
    assert reached_floor
    return found


def waited_for_blocks(core: EngineCore, request_id: str) -> float:
    explanation = core.explain(request_id)
    assert explanation is not None
    intervals = explanation.sequences[0].intervals
    return sum(one.end - one.start for one in intervals if one.cause is WaitCause.KV)


def tokens(rng: random.Random, number: int) -> tuple[int, ...]:
    return tuple(rng.randrange(1000, 40_000) for _ in range(number))


def add(core: EngineCore, request_id: str, share: TenantShare, prompt: tuple[int, ...]) -> None:
    most = FLOOD_OUTPUT_TOKENS if share is FLOOD else OUTPUT_TOKENS
    params = SamplingParams(max_tokens=most, temperature=0, ignore_eos=True)
    core.add(request_id, prompt, params, share=share, namespace=share.tenant)


def percentile(values: list[float], part: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(part * len(ordered)))]


def main() -> None:
    num_requests = int(sys.argv[1]) if len(sys.argv) > 1 else 60
    model = load_model(find_default_model())
    threads = torch.get_num_threads()
    print(f"{model.name}, {model.dtype}, {threads} threads, {num_requests} requests per run")
    print("                            TTFT p50   p99 (x)        TPOT p50   p99 (x)     cached")
    alone: Run | None = None
    for label, policy, flood, num_threads in [
        ("alone, half of the time", "wfq", False, threads),
        (f"alone, {threads // 2} of {threads} threads", "wfq", False, threads // 2),
        ("beside the flood, wfq", "wfq", True, threads),
        ("beside the flood, fcfs", "fcfs", True, threads),
    ]:
        torch.set_num_threads(num_threads)
        runner: Runner = ModelRunner(model, CACHE)
        if alone is None:
            runner = HalfOfTheTime(runner)
        found = run(runner, policy, num_requests=num_requests, flood=flood)
        alone = alone or found
        row = f"{label:26}"
        for values, base in ((found.ttft, alone.ttft), (found.tpot, alone.tpot)):
            worst = percentile(values, 0.99)
            ratio = worst / percentile(base, 0.99)
            row += f"{statistics.median(values):9.3f}{worst:8.3f} ({ratio:5.2f})  "
        hits = sum(number >= SYSTEM_TOKENS - CACHE.block_size for number in found.cached_tokens)
        print(
            f"{row}{hits}/{len(found.cached_tokens)}  waited for blocks: {found.kv_seconds:.3f} s; "
            f"blocks kept: {found.least_blocks}; flood: {found.num_flood_tokens} tokens, "
            f"{found.evicted_blocks} cached blocks evicted",
            flush=True,
        )


if __name__ == "__main__":
    main()
