"""Preemption by swapping: blocks out and in, budgets, costs, and what a failure leaves."""

import pytest

from engine.core import EngineCore
from engine.errors import ConfigError, InvariantError
from engine.events import (
    Event,
    SequenceFinished,
    SequencePreempted,
    StepFinished,
    TokensGenerated,
)
from engine.memory.host_pool import HostPool
from engine.plan import BlockCopies, ScheduledChunk, StepPlan
from engine.scheduling.preemption import TRY_AGAIN, PreemptionCosts
from engine.sequence import SequenceStatus
from tests.scripted import ScriptedRunner, add, find, make_core, run_to_end


def pressed(**settings: object) -> tuple[EngineCore, ScriptedRunner]:
    """Two sequences of up to 24 tokens in a pool of 8 blocks of 4: one has to give way."""
    defaults = {"num_blocks": 8, "num_host_blocks": 8, "watermark": 0.0, "preemption": "swap"}
    core, runner = make_core(**defaults | settings)  # type: ignore[arg-type]
    add(core, "a", "acme", prompt=11, output=12)
    add(core, "z", "zeta", prompt=11, output=12)
    return core, runner


def preemptions(events: list[Event]) -> list[bool]:
    return [e.swapped for e in events if isinstance(e, SequencePreempted)]


def ends(events: list[Event]) -> dict[str, SequenceFinished]:
    return {e.request_id: e for e in events if isinstance(e, SequenceFinished)}


def step_until_preempted(core: EngineCore) -> int:
    """How many steps it took."""
    for number in range(1, 200):
        if preemptions(core.step()):
            return number
    raise AssertionError("nothing was preempted")


@pytest.mark.parametrize("prefix_cache", [True, False])
def test_a_swapped_sequence_returns_and_recomputes_nothing(prefix_cache: bool) -> None:
    core, _ = pressed(prefix_cache=prefix_cache)
    events = run_to_end(core)

    assert preemptions(events) == [True]
    steps = [e for e in events if isinstance(e, StepFinished)]
    moved_out = sum(e.num_swapped_out_blocks for e in steps)
    moved_in = sum(e.num_swapped_in_blocks for e in steps)
    assert moved_out == 4
    assert moved_in == (4 if not prefix_cache else moved_in) > 0
    for name in ("a", "z"):
        end = ends(events)[name]
        assert (end.reason, end.usage.output_tokens) == ("length", 12)
        assert end.usage.recomputed_tokens == 0
    assert core.scheduler.counters[0].as_dict() == {"acme": 11 + 24, "zeta": 11 + 24}
    tokens = [t for e in events if isinstance(e, TokensGenerated) for t in e.token_ids]
    assert sorted(tokens) == sorted(2 * [1011 + i for i in range(12)])


def test_swapping_can_be_ruled_out() -> None:
    core, _ = pressed(preemption="recompute")
    assert preemptions(run_to_end(core)) == [False]


def test_without_room_in_host_memory_it_recomputes() -> None:
    core, _ = pressed(num_host_blocks=3)
    assert preemptions(run_to_end(core)) == [False]
    core, _ = pressed(host_budget=3)
    assert preemptions(run_to_end(core)) == [False]
    core, _ = pressed(host_budget=4)
    assert preemptions(run_to_end(core)) == [True]


def test_the_measured_costs_choose() -> None:
    """Swapping is tried once; after that, slow copies lose to computing again."""
    quick, _ = pressed(preemption="auto")
    assert preemptions(run_to_end(quick)) == [True]

    slow, runner = pressed(preemption="auto")
    runner.swap_seconds = 10.0
    assert preemptions(run_to_end(slow)) == [True]
    add(slow, "b", "acme", prompt=11, output=12)
    add(slow, "y", "zeta", prompt=11, output=12)
    assert preemptions(run_to_end(slow)) == [False]


def test_costs_are_moving_averages() -> None:
    costs = PreemptionCosts()
    assert costs.prefers_swap(100, 1)
    core, _ = make_core()
    add(core, "a", "acme", prompt=8, output=1)
    chunk = ScheduledChunk(find(core, "a"), 0, 8)
    copies = BlockCopies(swapped_out=((1, 1), (2, 2)), swapped_in=((3, 3), (4, 4)))
    costs.observe(StepPlan(1, (chunk,), copies=copies), 5.0, 1.0)
    assert costs.seconds_per_swapped_block == 0.25
    assert costs.seconds_per_token == 0.5
    costs.observe(StepPlan(2, (chunk,)), 8.0, 0.0)
    assert costs.seconds_per_token == pytest.approx(0.7 * 0.5 + 0.3 * 1.0)
    # Four blocks out and in again take 2 s, as long as 3.08 tokens at 0.65 s.
    assert not costs.prefers_swap(4, 3)
    assert costs.prefers_swap(4, 4)


def test_a_swap_is_tried_again_now_and_then() -> None:
    """One slow measurement, such as the first touch of host memory, does not decide for ever."""
    costs = PreemptionCosts(seconds_per_swapped_block=10.0, seconds_per_token=0.1)
    decisions = [costs.prefers_swap(4, 20) for _ in range(TRY_AGAIN)]
    assert decisions == [False] * (TRY_AGAIN - 1) + [True]
    assert not costs.prefers_swap(4, 20)


def with_a_group() -> tuple[EngineCore, ScriptedRunner]:
    """A decode that grows beside a group that is still computing its prompt."""
    core, runner = make_core(
        num_blocks=10,
        num_host_blocks=40,
        preemption="swap",
        watermark=0.0,
        max_step_tokens=4,
        max_seqs=4,
    )
    add(core, "d", "acme", prompt=6, output=20)
    core.step()
    core.step()
    add(core, "g", "zeta", prompt=27, output=4, rank=1, n=2)
    return core, runner


def test_a_group_that_was_swapped_out_before_its_fork_survives_a_failed_step() -> None:
    core, _ = with_a_group()
    num_steps = step_until_preempted(core)
    assert [seq.parked is None for seq in core._requests["g"]] == [False, True]
    core, runner = with_a_group()
    for _ in range(num_steps - 1):
        core.step()
    runner.explode = True
    events = core.step()
    runner.explode = False
    assert preemptions(events) == [True]
    events += run_to_end(core)
    reasons = {(e.request_id, e.index): e.reason for e in events if isinstance(e, SequenceFinished)}
    assert reasons == {("d", 0): "length", ("g", 0): "length", ("g", 1): "length"}


def test_blocks_on_their_way_out_are_not_taken_before_the_step_has_run() -> None:
    core, runner = pressed()
    runner.keep_plans = True
    step_until_preempted(core)
    plan = runner.plans[-1]
    out = {source for source, _ in plan.copies.swapped_out}
    grown = {block for chunk in plan.chunks for block in chunk.seq.block_table}
    assert out
    assert not out & grown
    # The one that had to wait for them goes on in the next step.
    assert len(plan.chunks) == 0
    core.step()
    assert len(runner.plans[-1].chunks) == 1


def test_a_swapped_sequence_can_be_aborted() -> None:
    core, _ = pressed()
    step_until_preempted(core)
    (name,) = [n for n in "az" if find(core, n).status is SequenceStatus.WAITING]
    assert core.stages[0].scheduler.memory.host.num_free == 4
    (end,) = core.abort(name)
    assert isinstance(end, SequenceFinished)
    assert core.stages[0].scheduler.memory.host.num_free == 8
    assert ends(run_to_end(core)).keys() == {"a", "z"} - {name}


def test_when_the_step_that_swaps_out_fails_the_victim_recomputes() -> None:
    core, _ = pressed()
    num_steps = step_until_preempted(core)
    core, runner = pressed()
    for _ in range(num_steps - 1):
        core.step()
    runner.explode = True
    events = core.step()
    runner.explode = False
    assert preemptions(events) == [True]
    events += run_to_end(core)

    found = ends(events)
    (victim,) = [end for end in found.values() if end.num_preemptions]
    assert victim.reason == "length"
    assert victim.usage.recomputed_tokens > 0


def test_host_pool_books() -> None:
    pool = HostPool(4, max_blocks_per_tenant=3)
    assert (pool.num_available("acme"), pool.num_available("zeta")) == (3, 3)
    mine = pool.allocate(2, "acme")
    assert (pool.num_available("acme"), pool.num_available("zeta")) == (1, 2)
    pool.check([mine])
    with pytest.raises(InvariantError):
        pool.check([])
    pool.free(mine)
    assert pool.held_by_tenant == {}
    with pytest.raises(AssertionError, match="freed twice"):
        pool.free(mine)
    assert repr(pool) == "<HostPool 0 held, 4 free>"


def test_settings_that_mean_nothing_are_refused() -> None:
    for settings in ({"num_host_blocks": -1}, {"host_budget": -1}, {"preemption": "no"}):
        with pytest.raises(ConfigError):
            make_core(**settings)  # type: ignore[arg-type]
