"""A pool for prompts and a pool for decodes in one process, under one fair clock."""

from engine.core import EngineCore
from engine.events import Event, SequenceAdmitted, SequenceFinished, StepFinished, TokensGenerated
from engine.sequence import BeamSearch
from tests.scripted import add, find, make_core, run_to_end


def steps(events: list[Event], stage: str) -> list[StepFinished]:
    return [e for e in events if isinstance(e, StepFinished) and e.stage == stage]


def test_prompts_run_in_one_pool_and_decodes_in_the_other() -> None:
    core, _ = make_core(num_blocks=16, prefill_blocks=8)
    add(core, "a", "acme", prompt=10, output=5)

    events = core.step()  # the prompt, and the first decode behind it
    prefill, decode = core.stages
    assert find(core, "a").id in decode.scheduler.running
    assert prefill.scheduler.pool.num_held == 0
    assert decode.scheduler.pool.num_held == 3
    assert decode.scheduler.memory.prefix_cache.match(find(core, "a"))  # what was received

    events += run_to_end(core)
    assert [e.num_prefill_tokens for e in steps(events, "prefill")] == [10]
    decodes = steps(events, "decode")
    assert [e.num_decode_tokens for e in decodes] == [1, 1, 1, 1]
    assert [e.num_received_blocks for e in decodes] == [3, 0, 0, 0]
    tokens = [t for e in events if isinstance(e, TokensGenerated) for t in e.token_ids]
    assert tokens == [1010, 1011, 1012, 1013, 1014]
    assert core.scheduler.counters[0]["acme"] == 10 + 2 * 5


def test_what_cannot_be_fetched_holds_prefills_back() -> None:
    """Decode has two slots; prompts that are done keep blocks and slots of the prefill pool."""
    core, _ = make_core(num_blocks=64, prefill_blocks=6, max_seqs=2, max_step_tokens=64)
    for i in range(6):
        add(core, f"r{i}", "acme", prompt=7, output=17)
    for _ in range(4):
        core.step()
    prefill, decode = core.stages
    assert len(decode.scheduler.running) == 2
    assert prefill.scheduler.places.num_handed_over == 2
    assert len(decode.scheduler.queues) == 2
    assert prefill.scheduler.pool.num_held == 4
    assert len(prefill.scheduler.queues) == 2  # two more would fit the blocks, but not the slots
    assert len([e for e in run_to_end(core) if isinstance(e, SequenceFinished)]) == 6


def test_a_preempted_decode_is_recomputed_in_the_prefill_pool() -> None:
    core, _ = make_core(
        num_blocks=8, prefill_blocks=8, watermark=0.0, preemption="recompute", prefix_cache=False
    )
    for name, tenant in (("a", "acme"), ("z", "zeta")):
        add(core, name, tenant, prompt=11, output=12)
    events = run_to_end(core)
    ends = [e for e in events if isinstance(e, SequenceFinished)]
    (victim,) = [e for e in ends if e.num_preemptions]
    assert victim.usage.recomputed_tokens > 11
    # Its newest token was not computed yet, and is with the others.
    assert sum(e.num_prefill_tokens for e in steps(events, "prefill")) == (
        22 + victim.usage.recomputed_tokens + 1
    )
    assert core.scheduler.counters[0].as_dict() == {"acme": 11 + 24, "zeta": 11 + 24}
    assert sum(isinstance(e, SequenceAdmitted) for e in events) == 2 * 2 + 2


def test_a_group_shares_its_prompt_in_the_decode_pool_too() -> None:
    core, _ = make_core(num_blocks=16, prefill_blocks=8)
    add(core, "r", "acme", prompt=9, output=6, n=3)
    for _ in range(3):
        core.step()
    tables = [find(core, "r", i).block_table for i in range(3)]
    assert all(table[:2] == tables[0][:2] for table in tables)
    assert len({table[2] for table in tables}) == 3
    run_to_end(core)


def test_beams_are_handed_over_together() -> None:
    core, _ = make_core(num_blocks=24, prefill_blocks=24)
    add(core, "r", "acme", prompt=9, output=6, beam=BeamSearch(width=3))
    alone, _ = make_core(num_blocks=24)
    add(
        alone,
        "r",
        "acme",
        prompt=list(find(core, "r").token_ids),
        output=6,
        beam=BeamSearch(width=3),
    )

    def scores(core: EngineCore) -> list[float | None]:
        found: list[Event] = []
        while core.has_work:
            found += core.step()
        return [e.cumulative_logprob for e in found if isinstance(e, SequenceFinished)]

    assert scores(core) == scores(alone)


def test_one_clock_over_both_pools() -> None:
    """Backlogged tenants of weights 1 and 3 get tokens 1 : 3, prompts and outputs together."""
    core, _ = make_core(num_blocks=40, prefill_blocks=16, max_seqs=8, max_step_tokens=16)
    for i in range(60):
        add(core, f"a{i}", "acme", prompt=6, output=6, weight=1.0)
        add(core, f"z{i}", "zeta", prompt=6, output=6, weight=3.0)
    before = core.scheduler.counters[0].as_dict()
    while core.scheduler.queues.num_waiting(0, "zeta") > 5:
        core.step()
    after = core.scheduler.counters[0].as_dict()
    assert core.scheduler.queues.num_waiting(0, "acme") > 30
    gap = abs((after["acme"] - before["acme"]) - (after["zeta"] - before["zeta"]))
    assert gap < 0.1 * after["acme"]
