"""A flood beside a steady tenant, on virtual time: what benchmarks/noisy_neighbour.py measures on
the real model, where half of a machine takes twice as long for each step."""

from benchmarks.noisy_neighbour import FLOOR_BLOCKS, SYSTEM_TOKENS, Run, percentile, run
from engine.cost_model import LinearCost
from engine.simulated_runner import SimulatedRunner, VirtualClock

# About what the default model takes on two cores.
WHOLE = LinearCost(step=0.012, prompt_token=0.0015, decode=0.003, context_token=2e-6)
HALF = LinearCost(step=0.024, prompt_token=0.003, decode=0.006, context_token=4e-6)


def simulate(cost: LinearCost, policy: str, *, flood: bool) -> Run:
    clock = VirtualClock()

    def sleep(seconds: float) -> None:
        clock.now += seconds

    runner = SimulatedRunner(clock, cost)
    return run(runner, policy, num_requests=100, flood=flood, clock=clock, sleep=sleep)


def test_a_steady_tenant_keeps_its_half_beside_a_flood() -> None:
    alone = simulate(HALF, "wfq", flood=False)
    fair = simulate(WHOLE, "wfq", flood=True)

    assert percentile(fair.ttft, 0.99) < 1.5 * percentile(alone.ttft, 0.99)
    assert percentile(fair.tpot, 0.99) < 1.5 * percentile(alone.tpot, 0.99)
    assert fair.num_flood_tokens > 10_000
    assert fair.evicted_blocks > 500  # there was pressure, and it was the flood's own to bear
    assert fair.cached_tokens == [SYSTEM_TOKENS] * 100
    assert fair.kv_seconds == 0  # never waited for blocks
    assert fair.least_blocks == FLOOR_BLOCKS > SYSTEM_TOKENS // 16


def test_first_come_first_served_leaves_it_behind_the_flood() -> None:
    alone = simulate(HALF, "fcfs", flood=False)
    unfair = simulate(WHOLE, "fcfs", flood=True)

    assert percentile(unfair.ttft, 0.99) > 10 * percentile(alone.ttft, 0.99)
