"""`drf`: who holds KV for long gets fewer tokens, so that dominant shares are equal."""

from collections import Counter
from dataclasses import dataclass

import pytest

from engine.events import SequenceFinished
from engine.scheduling.policies import make_policy
from tests.scripted import add, make_core, run_to_end

BLOCKS = 128
SHORT, LONG = (4, 4), (48, 48)
"""Prompt and output tokens: per token, a long one holds blocks for twelve times as long."""


@dataclass(frozen=True)
class Shares:
    """By tenant, parts of what was there: of all tokens' service, and of the pool over time."""

    service: dict[str, float]
    memory: dict[str, float]

    @property
    def dominant(self) -> dict[str, float]:
        return {name: max(self.service[name], self.memory[name]) for name in self.service}


def saturate(
    policy: str,
    sizes: dict[str, tuple[int, int]],
    weights: dict[str, float] | None = None,
    steps: int = 1000,
) -> Shares:
    """Keep every tenant backlogged, and count what ended after the first third."""
    core, runner = make_core(
        policy=policy,
        num_blocks=BLOCKS,
        max_seqs=60,
        max_step_tokens=60,
        watermark=0.0,
        prefix_cache=False,
        check=False,
    )
    runner.seconds_per_token = 0.0
    service: Counter[str] = Counter()
    memory: Counter[str] = Counter()
    count, start = 0, 0.0
    for step in range(steps):
        if step == steps // 3:
            service.clear()
            memory.clear()
            start = runner.clock.now
        for tenant, (prompt, output) in sizes.items():
            while core.scheduler.queues.num_waiting(0, tenant) < 20:
                weight = (weights or {}).get(tenant, 1.0)
                add(core, f"{tenant}{count}", tenant, prompt, output, weight=weight)
                count += 1
        for event in core.step():
            if isinstance(event, SequenceFinished):
                used = event.usage
                service[event.tenant] += used.computed_tokens + 2 * used.output_tokens
                memory[event.tenant] += used.kv_block_seconds  # type: ignore[assignment]
    pool = BLOCKS * (runner.clock.now - start)
    assert sum(memory.values()) > 0.9 * pool, "the pool was not short"
    return Shares(
        {name: service[name] / service.total() for name in sizes},
        {name: memory[name] / pool for name in sizes},
    )


def test_wfq_shares_tokens_and_drf_shares_what_is_short() -> None:
    sizes = {"short": SHORT, "long": LONG}
    wfq, drf = saturate("wfq", sizes), saturate("drf", sizes)

    assert wfq.service["long"] == pytest.approx(wfq.service["short"], rel=0.1)
    assert wfq.memory["long"] > 8 * wfq.memory["short"]
    assert wfq.dominant["long"] > 1.6 * wfq.dominant["short"]

    assert drf.service["long"] < 0.5 * drf.service["short"]
    assert drf.dominant["long"] == drf.memory["long"]
    assert drf.dominant["short"] == drf.service["short"]
    assert drf.dominant["long"] == pytest.approx(drf.dominant["short"], rel=0.1)


@pytest.mark.parametrize("policy", ["wfq", "drf"])
def test_tenants_of_one_kind_share_by_weight(policy: str) -> None:
    """Also though the one with the lower weight has fewer sequences, so that its tokens come in
    larger bursts."""
    sizes, weights = {"one": LONG, "three": LONG}, {"one": 1.0, "three": 3.0}
    shares = saturate(policy, sizes, weights, steps=1600)
    assert shares.memory["three"] / shares.memory["one"] == pytest.approx(3, rel=0.1)
    assert shares.service["three"] / shares.service["one"] == pytest.approx(3, rel=0.1)


def test_dominant_shares_are_in_proportion_to_weights() -> None:
    shares = saturate("drf", {"short": SHORT, "long": LONG}, {"short": 1.0, "long": 2.0})
    assert shares.dominant["long"] / shares.dominant["short"] == pytest.approx(2, rel=0.1)
    assert shares.service["long"] < 1.5 * shares.service["short"]  # under `wfq` twice as much


def test_a_lone_tenant_is_served_as_under_wfq() -> None:
    def makespan(policy: str) -> float:
        core, runner = make_core(policy=policy, num_blocks=64, watermark=0.0)
        for i in range(40):
            add(core, f"r{i}", "acme", *(LONG if i % 3 else SHORT))
        run_to_end(core)
        return runner.clock.now

    assert makespan("drf") == makespan("wfq") > 0


@pytest.mark.parametrize("other", [("zeta", 0), ("acme", 1)])
def test_a_counter_advances_by_the_larger_of_tokens_and_memory(other: tuple[str, int]) -> None:
    """Tokens come first; and what a tenant has in another class is not charged to this one."""
    core, _ = make_core(policy="drf", num_blocks=16, max_step_tokens=40, max_seqs=4, watermark=0.0)
    add(core, "a", "acme", prompt=32, output=8, weight=2.0)
    for i, (tenant, rank) in enumerate([("zeta", 0), ("zeta", 0), other]):
        add(core, f"{i}", tenant, prompt=1, output=12, rank=rank, weight=2.0)
    counters = core.scheduler.counters

    core.step()
    # Tokens cost 32 + 2, memory 8/16 of all (34 + 3 * 3), 21.5. It is 12.5 ahead.
    assert counters[0]["acme"] == 34 / 2
    for _ in range(4):  # tokens cost 2, memory 9/16 of 8: it falls back by 2.5 in each
        core.step()
    assert counters[0]["acme"] == (34 + 4 * 2) / 2
    core.step()  # a tenth block: 2.5 ahead, 2 for the token, 10/16 of 8 for memory
    assert counters[0]["acme"] == (34 + 5 * 2 + 0.5) / 2
    core.step()
    assert counters[0]["acme"] == (34 + 5 * 2 + 0.5 + 5) / 2
    num_others = 3 if other == ("zeta", 0) else 1
    assert counters[other[1]][other[0]] == num_others * (1 + 7 * 2) / 2


def test_what_was_counted_ahead_is_forgotten_with_the_policy() -> None:
    """Under `wfq` nothing is remembered, and `drf` begins anew."""
    core, _ = make_core(policy="drf", num_blocks=16, max_step_tokens=40, max_seqs=4, watermark=0.0)
    add(core, "a", "acme", prompt=32, output=8)
    for i in range(3):
        add(core, f"{i}", "zeta", prompt=1, output=12)
    core.step()  # 12.5 ahead
    core.switch_policy(make_policy("wfq"))
    core.step()
    core.switch_policy(make_policy("drf"))
    assert core.scheduler.counters[0]["acme"] == 36
    core.step()
    assert core.scheduler.counters[0]["acme"] == 36 + 4.5
