"""Who may find whose prefix, who waits for one, and whose cached blocks give way."""

import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.core import EngineCore
from engine.events import Event, SequenceAdmitted, SequenceFinished, StepFinished
from engine.memory.prefix_cache import PUBLIC, block_key, root_key
from engine.sequence import SamplingParams, TenantShare
from engine.snapshot import take_snapshot
from tests.scripted import add, find, make_core

PUBLIC_PROMPT = tuple(range(500, 514))  # three full blocks of 4, and two tokens


def run(core: EngineCore) -> list[Event]:
    events: list[Event] = []
    while core.has_work:
        events += core.step()
    return events


def cached_tokens(events: list[Event]) -> dict[str, int]:
    return {e.request_id: e.usage.cached_tokens for e in events if isinstance(e, SequenceFinished)}


def ask(
    core: EngineCore, request_id: str, tenant: str, tokens: list[int], **options: object
) -> int:
    """Run one request; how many of its tokens were found."""
    core.add(
        request_id,
        tuple(tokens),
        SamplingParams(max_tokens=1),
        share=TenantShare(tenant=tenant),
        namespace=options.pop("namespace", tenant),  # type: ignore[arg-type]
        **options,  # type: ignore[arg-type]
    )
    return cached_tokens(run(core))[request_id]


@given(st.data())
@settings(max_examples=200, deadline=None)
def test_no_two_splits_of_namespace_adapter_and_tokens_collide(data: st.DataObject) -> None:
    """One text cut at two places into three fields, in every order of its kind: 1,000 and more
    pairs, with separators, digits and empty fields in the text."""
    text = data.draw(st.text(alphabet="ab/\0\x01|:0123", min_size=2, max_size=12))
    keys: dict[bytes, tuple[object, ...]] = {}
    for i in range(len(text) + 1):
        for j in range(i, len(text) + 1):
            namespace, adapter, rest = text[:i], text[i:j], text[j:]
            tokens = [ord(character) for character in rest]
            for parts in ((namespace, adapter, tokens), (PUBLIC, namespace + adapter, tokens)):
                key = block_key(root_key(parts[0], parts[1]), tokens)
                fields = (parts[0], parts[1], tuple(tokens))
                assert keys.setdefault(key, fields) == fields


def test_a_thousand_adversarial_splits_do_not_collide() -> None:
    rng = random.Random(3)
    seen: dict[bytes, tuple[object, ...]] = {}
    for _ in range(1000):
        base = "".join(rng.choice("ab|/\0") for _ in range(8))
        i, j = sorted(rng.randrange(9) for _ in range(2))
        fields = (base[:i], base[i:j], tuple(map(ord, base[j:])))
        key = block_key(root_key(fields[0], fields[1]), list(fields[2]))
        assert seen.setdefault(key, fields) == fields
    assert len(seen) > 900


def test_a_chain_cut_elsewhere_is_another_key() -> None:
    root = root_key("acme")
    assert block_key(block_key(root, [1, 2]), [3, 4]) != block_key(root, [1, 2, 3, 4])
    assert block_key(block_key(root, [1]), [2, 3, 4]) != block_key(block_key(root, [1, 2]), [3, 4])


def test_a_request_can_opt_out_of_reading_and_of_writing() -> None:
    core, _ = make_core()
    prompt = list(range(13))
    assert ask(core, "a", "acme", prompt, use_prefix_cache=False) == 0
    assert ask(core, "b", "acme", prompt) == 0  # nothing was published
    assert ask(core, "c", "acme", prompt) == 12
    assert ask(core, "d", "acme", prompt, use_prefix_cache=False) == 0


def test_a_narrower_namespace_of_a_tenant_is_apart() -> None:
    core, _ = make_core()
    prompt = list(range(13))
    assert ask(core, "a", "acme", prompt) == 0
    assert ask(core, "b", "acme", prompt, namespace="acme/user-1") == 0
    assert ask(core, "c", "acme", prompt, namespace="acme/user-1") == 12
    assert ask(core, "d", "acme", prompt, namespace="acme/user-2") == 0


def test_a_public_prompt_is_found_by_every_tenant_and_what_follows_is_not() -> None:
    core, _ = make_core(public_prompts=(PUBLIC_PROMPT,))
    prompt = [*PUBLIC_PROMPT, *range(10)]
    assert ask(core, "a", "acme", prompt) == 0
    assert ask(core, "b", "zeta", prompt) == 12  # the three blocks that are public
    assert ask(core, "c", "zeta", prompt) == 20
    assert ask(core, "d", "acme", prompt) == 20
    # A prompt that begins like the public one shares as far as it is the same.
    assert ask(core, "e", "beta", [*PUBLIC_PROMPT[:9], 1, 2, 3, 4]) == 8
    # What looks like it, but starts elsewhere, shares nothing.
    assert ask(core, "f", "beta", [7, *PUBLIC_PROMPT]) == 0


def test_a_tenants_own_blocks_after_a_public_prefix_are_its_own() -> None:
    """Also where another tenant's blocks follow the same public blocks."""
    core, _ = make_core(public_prompts=(PUBLIC_PROMPT[:4],))
    prompt = [*PUBLIC_PROMPT[:4], *range(9)]
    assert [ask(core, f"a{i}", "acme", prompt) for i in range(2)] == [0, 12]
    assert [ask(core, f"z{i}", "zeta", prompt) for i in range(2)] == [4, 12]


def test_a_twin_waits_for_the_first_to_publish() -> None:
    """Two equal prompts at once: the second computes only its last block."""
    core, _ = make_core(max_step_tokens=16)
    prompt = list(range(33))
    add(core, "a", "acme", prompt, output=2)
    add(core, "b", "acme", prompt, output=2)
    events = run(core)
    assert cached_tokens(events) == {"a": 0, "b": 32}
    prefills = sum(e.num_prefill_tokens for e in events if isinstance(e, StepFinished))
    assert prefills == 33 + 1


def test_the_wait_for_a_twin_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    core, _ = make_core(max_prefix_delays=3)
    monkeypatch.setattr(core.scheduler.memory.prefix_cache, "num_coming", lambda seq, hits: 2)
    add(core, "a", "acme", list(range(9)), output=2)
    for _ in range(3):
        assert core.step() == []
    assert isinstance(core.step()[0], SequenceAdmitted)


def test_what_follows_a_delayed_twin_is_let_in_once() -> None:
    """Also when the twin was first in the queue, lost that place to a preempted sequence and got
    it back: for a while its queue knew it twice, and admitted what follows twice."""
    core, runner = make_core(max_step_tokens=16, policy="fcfs")
    runner.keep_plans = True
    prompt = list(range(100, 120))
    add(core, "early", "acme", 2, output=20)
    core.step()
    add(core, "first", "acme", prompt, output=2)
    add(core, "twin", "acme", prompt, output=2)
    core.step()
    assert core.scheduler.queues.is_head(find(core, "twin"))
    core.scheduler._preempt(core.scheduler.running["early"], now=0.0)
    add(core, "behind", "acme", 2, output=2)
    run(core)

    chunks = [chunk for plan in runner.plans for chunk in plan.chunks if chunk.start == 0]
    assert Counter(chunk.seq.id for chunk in chunks) == {
        **{"early": 2, "first": 1, "behind": 1},  # the twin begins where the first has come to
    }


def test_nobody_waits_for_another_tenant_or_a_lower_class() -> None:
    prompt = list(range(33))
    core, _ = make_core(max_step_tokens=40, public_prompts=(tuple(prompt),))
    add(core, "a", "acme", prompt, output=2)
    add(core, "z", "zeta", prompt, output=2)
    core.step()
    assert set(core.scheduler.running) == {"a", "z"}

    core, _ = make_core(max_step_tokens=8)
    add(core, "low", "acme", prompt, output=2, rank=1)
    core.step()
    add(core, "high", "acme", prompt, output=2, rank=0)
    core.step()
    assert set(core.scheduler.running) == {"low", "high"}


def test_a_twin_of_an_aborted_prompt_goes_on_alone() -> None:
    core, _ = make_core(max_step_tokens=16)
    prompt = list(range(33))
    add(core, "a", "acme", prompt, output=2)
    add(core, "b", "acme", prompt, output=2)
    core.step()
    core.abort("a")
    assert cached_tokens(run(core)) == {"b": 16}


def test_the_tenant_that_caches_most_gives_way() -> None:
    """A flood of one tenant's prompts pushes out its own, not the small tenant's."""
    core, _ = make_core(num_blocks=24)
    small = list(range(13))
    assert ask(core, "small", "acme", small) == 0
    for i in range(20):
        ask(core, f"flood{i}", "zeta", [1000 * i + j for j in range(17)])
    assert ask(core, "again", "acme", small) == 12
    memory = {one.tenant: one for one in take_snapshot(core).memory}
    assert memory["acme"].evicted_blocks == 0
    assert memory["zeta"].evicted_blocks > 40
    assert (memory["acme"].queried_tokens, memory["acme"].hit_tokens) == (26, 12)
    assert memory["acme"].cached_blocks == 3


def test_reset_forgets_one_tenant_or_all() -> None:
    core, _ = make_core()
    prompt = list(range(13))
    for tenant in ("acme", "zeta"):
        ask(core, tenant, tenant, prompt)
    assert core.reset_prefix_cache("acme") == 3
    assert ask(core, "a", "acme", prompt) == 0
    assert ask(core, "z", "zeta", prompt) == 12
    assert core.reset_prefix_cache() == 6
    assert core.scheduler.pool.num_cached == 0
    assert ask(core, "y", "zeta", prompt) == 0


def test_reset_leaves_running_sequences_alone() -> None:
    core, _ = make_core()
    prompt = list(range(13))
    add(core, "a", "acme", prompt, output=6)
    core.step()
    core.reset_prefix_cache()
    assert ask(core, "b", "acme", prompt) == 0
    assert not core.has_work


def test_waiting_for_twins_saves_tokens_and_steps() -> None:
    """Pairs that share 8 of 9 tokens, all queued at once: nobody's queue stands still."""

    def cost(max_prefix_delays: int) -> tuple[int, int]:
        core, _ = make_core(
            num_blocks=400, max_step_tokens=64, max_seqs=32, max_prefix_delays=max_prefix_delays
        )
        for i in range(200):
            add(core, f"r{i}", "acme", [1000 * (i // 2) + j for j in range(8)] + [i], output=2)
        steps = [event for event in run(core) if isinstance(event, StepFinished)]
        return len(steps), sum(step.num_prefill_tokens for step in steps)

    steps, tokens = cost(8)
    steps_without, tokens_without = cost(0)
    assert tokens == 100 * 9 + 100 * 1
    assert tokens_without > 1.5 * tokens
    assert steps < steps_without


def test_reset_of_one_tenant_leaves_public_prompts_to_the_others() -> None:
    core, _ = make_core(public_prompts=(PUBLIC_PROMPT,))
    prompt = [*PUBLIC_PROMPT, *range(10)]
    ask(core, "a", "acme", prompt)
    ask(core, "z", "zeta", prompt)  # the last to use it
    assert core.reset_prefix_cache("zeta") == 3
    assert ask(core, "b", "acme", prompt) == 20
    assert core.reset_prefix_cache() > 3
    assert ask(core, "c", "acme", prompt) == 0
