"""KV-block-seconds: exact values for who held what, and nothing lost or counted twice."""

from collections import Counter

import pytest

from engine.core import EngineCore
from engine.errors import InvariantError
from engine.events import Event, SequenceFinished, SequencePreempted, StepFinished
from engine.snapshot import take_snapshot
from tests.scripted import ScriptedRunner, add, find, make_core, run_to_end

BLOCK = 4
STEP = 0.5  # seconds, whatever is computed


def timed(**settings: object) -> tuple[EngineCore, ScriptedRunner]:
    """A core all of whose steps take `STEP`, begun at another time than 0."""
    core, runner = make_core(block_size=BLOCK, watermark=0.0, **settings)  # type: ignore[arg-type]
    for one in (runner, runner.prefill):
        if one is not None:
            one.base_seconds, one.seconds_per_token = STEP, 0.0
    runner.clock.now = 1000.0
    return core, runner


def charged(events: list[Event]) -> dict[tuple[str, int], float]:
    """Block-steps of each ended sequence."""
    return {
        (e.request_id, e.index): e.usage.kv_block_seconds / STEP
        for e in events
        if isinstance(e, SequenceFinished)
    }


def block_steps(core: EngineCore) -> dict[str, float]:
    """Of each tenant until now."""
    return {m.tenant: m.kv_block_seconds / STEP for m in take_snapshot(core).memory}


def held_block_steps(core: EngineCore) -> float:
    """Held blocks over time, of all pools."""
    return sum(stage.scheduler.pool.held_block_seconds for stage in core.stages) / STEP


def alone(prompt: int, output: int) -> int:
    """What one request holds, in block-steps: the closed form. The k-th step computes up to token
    prompt + k - 1, and all of its blocks are held in it."""
    return sum(-(-(prompt + k) // BLOCK) for k in range(output))


@pytest.mark.parametrize(("prompt", "output"), [(1, 1), (8, 9), (11, 12), (24, 40)])
def test_one_request_is_charged_the_closed_form(prompt: int, output: int) -> None:
    core, _ = timed()
    add(core, "r", "acme", prompt, output)
    events = run_to_end(core)
    assert charged(events) == {("r", 0): pytest.approx(alone(prompt, output))}
    assert block_steps(core) == {"acme": pytest.approx(alone(prompt, output))}
    assert held_block_steps(core) == pytest.approx(alone(prompt, output))


def test_residency_grows_with_the_square_of_the_length() -> None:
    """Twelve times the tokens hold blocks for nearly 144 times as long."""
    assert alone(768, 768) / alone(64, 64) == pytest.approx(144, rel=0.02)


def test_a_prompt_in_chunks_holds_all_its_blocks_from_the_first_on() -> None:
    core, _ = timed(max_step_tokens=4, max_seqs=4)
    add(core, "r", "acme", prompt=12, output=2)
    assert charged(run_to_end(core)) == {("r", 0): pytest.approx(3 * 3 + 4)}


def test_two_that_share_a_prefix_pay_half_of_it_while_both_live() -> None:
    core, _ = timed()
    prompt = list(range(8))
    add(core, "a", "acme", [*prompt, 100], output=4)  # 9, 10, 11, 12 tokens: 3 blocks
    core.step()
    add(core, "b", "acme", [*prompt, 200], output=8)  # ... 13, 14, 15, 16 tokens: 4 blocks
    assert block_steps(core) == {"acme": 3}
    core.step()
    assert len({*find(core, "a").block_table, *find(core, "b").block_table}) == 4
    assert block_steps(core) == {"acme": 3 + 4}
    events = run_to_end(core)
    # a: alone for one step, then three beside b. b: three beside a, one of 3 blocks, four of 4.
    assert charged(events) == {
        ("a", 0): pytest.approx(3 + 3 * (2 / 2 + 1)),
        ("b", 0): pytest.approx(3 * (2 / 2 + 1) + 3 + 4 * 4),
    }


def test_a_public_prompt_is_paid_by_all_tenants_that_hold_it() -> None:
    public = tuple(range(8))
    core, _ = timed(public_prompts=(public,))
    add(core, "a", "acme", [*public, 100], output=4)
    core.step()
    add(core, "z", "zeta", [*public, 200], output=3)
    core.step()
    assert core.scheduler.pool.held_by_tenant == {"acme": 3, "zeta": 1}
    assert block_steps(core) == {"acme": pytest.approx(3 + 2), "zeta": pytest.approx(2)}
    run_to_end(core)
    assert block_steps(core) == {"acme": pytest.approx(3 + 3 * 2), "zeta": pytest.approx(3 * 2)}


def test_a_cached_block_costs_nobody_and_begins_again_when_it_is_found() -> None:
    core, runner = timed()
    prompt = list(range(9))
    for name in ("a", "b"):
        add(core, name, "acme", prompt, output=1)
        assert charged(run_to_end(core)) == {(name, 0): pytest.approx(3)}
        assert core.scheduler.pool.num_cached == 2
        runner.clock.now += 100.0
    assert core.scheduler.memory.hit_tokens["acme"] == 8
    assert block_steps(core) == {"acme": pytest.approx(6)}


def test_of_a_group_each_sequence_pays_its_part() -> None:
    """A prompt of two full blocks and a part, which each but the last to write to it copies."""
    core, _ = timed()
    add(core, "g", "acme", prompt=10, output=3, n=3)
    core.step()
    leader, *children = core._requests["g"]
    assert len(children) == 2
    assert leader.block_table == children[0].block_table == children[1].block_table
    assert block_steps(core) == {"acme": pytest.approx(3)}
    events = run_to_end(core)
    # The first step is the leader's; then two full blocks are shared by three and each has a third
    # block of its own, for two steps.
    each = 2 * (2 / 3 + 1)
    assert charged(events) == {
        ("g", 0): pytest.approx(3 + each),
        ("g", 1): pytest.approx(each),
        ("g", 2): pytest.approx(each),
    }


def test_blocks_swapped_out_cost_until_the_step_has_run_and_nothing_in_host_memory() -> None:
    core, _ = timed(num_blocks=8, num_host_blocks=8, preemption="swap", prefix_cache=False)
    add(core, "a", "acme", prompt=11, output=12)
    add(core, "z", "zeta", prompt=11, output=12)
    expected: Counter[str] = Counter()
    events: list[Event] = []
    was_parked = was_leaving = 0
    while core.has_work:
        tables = {s.tenant: len(s.block_table) for s in core.scheduler.running.values()}
        found = core.step()
        events += found
        # A victim's blocks are held for the step in which they are read, and then by nobody.
        for e in found:
            if isinstance(e, SequencePreempted):
                assert e.swapped
                expected[e.tenant] += tables[e.tenant]
                was_leaving += 1
        was_parked += core.scheduler.memory.host.num_free < 8
        ended = [e.tenant for e in found if isinstance(e, SequenceFinished)]
        assert core.has_work or ended
        if any(isinstance(e, StepFinished) for e in found):
            for seq in core.scheduler.running.values():
                expected[seq.tenant] += len(seq.block_table)
            for tenant in ended:  # its last step: all its 22 tokens but the newest are computed
                expected[tenant] += 6
        assert block_steps(core) == pytest.approx(expected)
    assert was_leaving > 0
    assert was_parked > 2
    by_tenant = {"a": expected["acme"], "z": expected["zeta"]}
    assert charged(events) == {(name, 0): pytest.approx(n) for name, n in by_tenant.items()}


def test_an_abort_between_steps_pays_to_that_instant() -> None:
    core, runner = timed()
    add(core, "r", "acme", prompt=8, output=40)
    core.step()
    runner.clock.now += STEP / 4
    assert block_steps(core) == {"acme": pytest.approx(2)}  # as of the last step
    assert charged(core.abort("r")) == {("r", 0): pytest.approx(2.5)}
    assert block_steps(core) == {"acme": pytest.approx(2.5)}


def test_an_abort_before_anything_was_held_costs_nothing() -> None:
    core, _ = timed(max_seqs=1)
    add(core, "r", "acme", prompt=8, output=3)
    add(core, "w", "zeta", prompt=8, output=3)
    core.step()
    assert charged(core.abort("w")) == {("w", 0): 0}
    assert block_steps(core) == {"acme": pytest.approx(2)}


def test_kv_waiting_in_the_prefill_pool_is_paid_until_it_is_fetched() -> None:
    """One slot for decodes: the second request's KV stays where its prompt was computed until the
    first has ended. The steps of the two stages take turns, and time."""
    core, _ = timed(prefill_blocks=8, max_seqs=1, max_step_tokens=64)
    prefill, decode = core.stages
    add(core, "a", "acme", prompt=8, output=3)
    add(core, "z", "zeta", prompt=8, output=2)
    core.step()  # a: computed, and copied and decoded
    assert (prefill.scheduler.pool.num_held, decode.scheduler.pool.num_held) == (0, 3)
    assert block_steps(core) == {"acme": pytest.approx(2 + 2 + 3)}
    core.step()  # z is computed; a draws its last
    assert find(core, "z").parked is not None
    assert (prefill.scheduler.pool.num_held, decode.scheduler.pool.num_held) == (2, 0)
    assert block_steps(core) == {
        "acme": pytest.approx(2 + 2 + 3 + 3 + 3),
        "zeta": pytest.approx(2 + 2),
    }
    events = run_to_end(core)
    assert charged(events) == {("z", 0): pytest.approx(2 + 2 + 2 + 3)}


def test_a_group_shares_the_blocks_of_both_pools() -> None:
    core, _ = timed(prefill_blocks=8)
    add(core, "g", "acme", prompt=8, output=2, n=2)
    events = core.step()
    assert not core.has_work
    # The prompt is the first one's: 2 blocks. While those are copied for both, as 2 again, each
    # has a third for what it generates.
    each = 2 / 2 + 2 / 2 + 1
    assert charged(events) == {("g", 0): pytest.approx(2 + each), ("g", 1): pytest.approx(each)}


@pytest.mark.parametrize("prefill_blocks", [None, 8])
def test_the_sequences_of_a_failed_step_pay_for_it(prefill_blocks: int | None) -> None:
    """Also for what they were fetching from the other pool when it failed."""
    core, runner = timed(prefill_blocks=prefill_blocks)
    add(core, "r", "acme", prompt=8, output=3)
    runner.explode = True
    before = runner.clock.now
    events = core.step()
    assert runner.clock.now - before == (0 if prefill_blocks is None else STEP)
    expected = 0 if prefill_blocks is None else 2
    assert charged(events) == {("r", 0): pytest.approx(expected)}
    assert block_steps(core).get("acme", 0) == pytest.approx(expected)


def test_time_that_runs_backwards_stands_still() -> None:
    core, runner = timed()
    add(core, "r", "acme", prompt=8, output=3)
    core.step()
    runner.clock.now -= 100 * STEP
    core.step()
    assert block_steps(core) == {"acme": pytest.approx(2)}
    core.scheduler.check()


def test_accounts_of_tenants_without_a_block_are_dropped_and_the_books_still_balance() -> None:
    core, _ = timed(prefix_cache=False)
    add(core, "r", "acme", prompt=8, output=3)
    run_to_end(core)
    add(core, "s", "zeta", prompt=8, output=3)
    core.step()
    core.scheduler.memory.forget_idle()
    assert block_steps(core) == {"zeta": pytest.approx(2)}
    core.scheduler.check()
    run_to_end(core)
    core.scheduler.check()


def test_check_finds_block_seconds_that_nobody_was_charged() -> None:
    core, _ = timed()
    add(core, "r", "acme", prompt=8, output=3)
    core.step()
    core.scheduler.pool.held_block_seconds += 0.01
    with pytest.raises(InvariantError, match="KV meter"):
        core.scheduler.check()
