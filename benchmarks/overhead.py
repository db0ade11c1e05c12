"""What scheduling costs: `schedule` and `update` of one step, without any model.

A steady state: `running` sequences decode, `queued` wait in as many queues as there are tenants,
and what ends is replaced, so that every step admits now and then. Prints the median and the 99th
percentile of both together over the steps, and how they grow with each size.
"""

import argparse
import random
import statistics
import time

from engine.config import CacheConfig, SchedulerConfig
from engine.scheduling.scheduler import Scheduler
from engine.sequence import SamplingParams, Sequence, SequenceStatus, TenantShare

BLOCK_SIZE = 16


def sequence(number: int, tenant: int, rng: random.Random) -> Sequence:
    prompt = [rng.randrange(1 << 20) for _ in range(rng.randint(16, 96))]
    name = f"tenant-{tenant}"
    return Sequence(
        id=f"r{number}",
        share=TenantShare(tenant=name, weight=1 + tenant % 4),
        namespace=name,
        token_ids=prompt,
        params=SamplingParams(max_tokens=rng.randint(100, 400)),
        arrived=0.0,
    )


def measure(policy: str, running: int, queued: int, tenants: int, steps: int) -> list[float]:
    """Seconds of schedule + update, for each step after the first `running` of them."""
    rng = random.Random(0)
    cache = CacheConfig(num_blocks=running * 36, block_size=BLOCK_SIZE)
    config = SchedulerConfig(
        policy=policy, max_seqs=running, max_step_tokens=running + 2048, max_model_len=4096
    )
    scheduler = Scheduler(config, cache)
    count = 0

    def arrive() -> None:
        nonlocal count
        scheduler.add(sequence(count, count % tenants, rng))
        count += 1

    while len(scheduler.queues) < running + queued:
        arrive()
    seconds: list[float] = []
    warm = 60
    for step in range(warm + steps):
        started = time.perf_counter()
        plan = scheduler.schedule(float(step))
        planned = time.perf_counter() - started
        tokens = {seq.id: 7 for chunk in plan.chunks for seq in chunk.draws}
        started = time.perf_counter()
        scheduler.update(plan, tokens, step + 0.5)
        if step >= warm:
            seconds.append(planned + time.perf_counter() - started)
        for chunk in plan.chunks:
            seq = chunk.seq
            if seq.num_output_tokens >= seq.params.max_tokens:
                assert seq.status is SequenceStatus.RUNNING
                scheduler.finish(seq, step + 0.5)
        while len(scheduler.queues) < queued:
            arrive()
    assert len(scheduler.running) >= 0.9 * running
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--policy", default="wfq")
    parser.add_argument("--steps", type=int, default=300)
    arguments = parser.parse_args()
    sizes = [
        *((n, 10_000, 1000) for n in (32, 64, 128, 256)),
        *((256, n, min(n, 1000)) for n in (100, 1000, 10_000, 30_000)),
        *((256, 10_000, n) for n in (1, 10, 100, 1000, 10_000)),
    ]
    print(f"{'running':>8}{'queued':>8}{'tenants':>8}{'median ms':>11}{'p99 ms':>8}")
    for running, queued, tenants in sizes:
        found = measure(arguments.policy, running, queued, tenants, arguments.steps)
        median = 1e3 * statistics.median(found)
        p99 = 1e3 * sorted(found)[int(0.99 * len(found))]
        print(f"{running:8}{queued:8}{tenants:8}{median:11.3f}{p99:8.3f}")


if __name__ == "__main__":
    main()
