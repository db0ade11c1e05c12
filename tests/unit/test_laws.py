"""Laws of single steps of any policy, on the real scheduler: no room is wasted, and no class is
served before a higher one beyond its floor. What they follow from is in docs/decisions.md, sections
1, 2 and 7; those of whole runs are in test_laws_runs.py, of fair shares in test_laws_fairness.py.
"""

from collections import Counter
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.config import CacheConfig, EngineConfig, SchedulerConfig
from engine.core import EngineCore
from engine.cost_model import LinearCost
from engine.plan import StepPlan
from engine.sequence import Sequence as EngineSequence
from engine.simulated_runner import SimulatedRunner, VirtualClock
from tests.laws import CLASSES, Heads, Ledger, Request, play, record_charges, requests, use, watch
from tests.scripted import make_core

happened: Counter[str] = Counter()


# ---------------------------------------------------------------------------- work conservation


@settings(max_examples=100, deadline=None)
@given(
    load=st.lists(
        requests("abcd", topics=(None, None, 0, 1), n=(1, 1, 1, 2), patience=(None, None, 0.1)),
        min_size=20,
        max_size=50,
    ),
    policy=st.sampled_from(["wfq", "vtc", "drr", "fcfs", "priority"]),
    num_blocks=st.sampled_from([12, 20, 64]),
    max_step_tokens=st.sampled_from([6, 16, 64]),
    max_seqs=st.sampled_from([3, 6]),
    max_bypasses=st.sampled_from([0, 2, 8]),
    lead=st.sampled_from([0.0, 32.0, 512.0]),
    watermark=st.sampled_from([0.0, 0.1]),
    max_prefix_delays=st.sampled_from([1, 8]),
)
def no_room_is_left(
    load: list[Request],
    policy: str,
    num_blocks: int,
    max_step_tokens: int,
    max_seqs: int,
    max_bypasses: int,
    lead: float,
    watermark: float,
    max_prefix_delays: int,
) -> None:
    core, _ = make_core(
        max_prefix_delays=max_prefix_delays,
        policy=policy,
        num_blocks=num_blocks,
        max_step_tokens=max_step_tokens,
        max_seqs=max_seqs,
        max_bypasses=max_bypasses,
        max_bypass_lead=lead,
        watermark=watermark,
        class_floor=0.2,
        check=False,
    )
    use(core, policy)
    heads = Heads(core)

    def look(plan: StepPlan) -> None:
        idle = heads.idle(plan, core._clock())
        num_budget = heads.num_budget(plan)
        happened["steps"] += 1
        happened["with room"] += num_budget > 0 and heads.num_slots > 0
        happened["preempting"] += bool(plan.preempted)
        assert not (idle and num_budget), (idle, core.scheduler)
        if num_budget:
            unfinished = [one for one in prompts(core) if one.id not in chunks(plan)]
            assert not unfinished

    watch(core, look, heads.start)
    for _ in play(core, load, CLASSES):
        pass
    happened.update(heads.seen)


def prompts(core: EngineCore) -> list[EngineSequence]:
    """Running sequences that do not decode yet."""
    return [one for one in core.scheduler.running.values() if not one.is_decoding]


def chunks(plan: StepPlan) -> dict[str, int]:
    """Number of tokens by sequence."""
    return {chunk.seq.id: chunk.num_tokens for chunk in plan.chunks}


def test_no_step_leaves_room_in_which_a_queue_head_fits() -> None:
    """Work conservation of grade (a), a little more: not only the first head of all, the head of
    every tenant's queue in every class. Not grade (b), any waiting request: a tenant's own queue
    is served in order.

    So by design, and for no other reason, a step leaves tokens, slots and blocks unused beside a
    head that fits: it preempted; room is kept for a head that does not fit, by the rules of
    engine/scheduling/bypass.py; a twin waits, at most `max_prefix_delays` times, and who is ahead
    of it in its class with it. (And three that this load has not: floors and caps of KV, and more
    than `MAX_PASSED_HEADS` heads that do not fit.)
    """
    happened.clear()

    no_room_is_left()

    assert happened["with room"] > 500
    for one in ("preempting", "misfits", "twins", "held"):
        assert happened[one] > 30, happened


def served(policy: str, load: Sequence[Request]) -> tuple[float, float, float]:
    """Service of all tenants, when it was done, and how much of it at half of that time, on a
    device whose steps cost what they compute."""
    clock = VirtualClock()
    cost = LinearCost(step=0.02, prompt_token=0.0005, decode=0.001, context_token=0.00001)
    config = EngineConfig(
        cache=CacheConfig(num_blocks=160, block_size=4, enable_prefix_cache=False),
        scheduler=SchedulerConfig(policy=policy, max_step_tokens=32, max_seqs=16),
    )
    core = EngineCore(config, SimulatedRunner(clock, cost), clock=clock)
    use(core, policy)
    ledger, half = record_charges(core), 0.0
    for _ in play(core, load, CLASSES):
        if clock() < 2.0:
            half = ledger.total()
    return ledger.total(), clock(), half


@settings(max_examples=8, deadline=None)
@given(st.lists(requests("abcd", gaps=(0.0, 0.001)), min_size=150, max_size=160))
def test_policies_share_out_the_same_amount_of_work(load: list[Request]) -> None:
    """Overload: every policy keeps the batch full, so all do the same work in the same time."""
    total, makespan, half = served("wfq", load)
    for policy in ("vtc", "drr", "fcfs", "priority"):
        other_total, other_makespan, other_half = served(policy, load)
        assert other_total == pytest.approx(total)
        assert other_makespan == pytest.approx(makespan, rel=0.05)
        assert other_half == pytest.approx(half, rel=0.05)


# ----------------------------------------------------------------------------------- inversion


class Inversions:
    """What a class is given while a higher one wants more.

    Let W be what is charged to classes, U the same and, at the rate of prompts, the tokens that
    are computed again; Q a step's budget of prompt tokens; aged 1 if the class has a `max_wait`,
    else 0. Over any steps at whose planning a class before j still wanted more, up to and with the
    prompts of the last step in which j went first:

        U_j  <=  class_floor * (sum of W_r over classes r < j) + (1 + class_floor + aged) * Q

    Proof. In these steps j goes first on credit, or computes what it has begun. Its credit was at
    most (1 + class_floor) Q at the first, rose by the floor's part of W_r (less where it was at its
    limit) and fell by U_j, and was not forgiven, as a class before it wanted more. When j went
    first the last time, its credit was at least Q (0 if aged), and it took at most another Q in
    that step. QED. After that, its running sequences decode on: one token each step, however long.
    Without a floor and age there is no credit: it never goes first.

    Two ways to see that j went first: it got prompt tokens though a class before it had a prompt to
    compute or a head that fits; or it was admitted though one had a head that does not fit, for
    which what is freed is kept. (Beside such a head a running prompt of j may use what is left.)
    """

    def __init__(self, core: EngineCore, ledger: Ledger, num_aged: int) -> None:
        config = core.config.scheduler
        self.core, self.ledger, self.heads = core, ledger, Heads(core)
        self.floor, self.rate = config.class_floor, config.charge.prompt
        self.quantum = config.max_step_tokens * self.rate
        self.limit = (1 + config.class_floor + num_aged) * self.quantum
        self.may_go_first = self.floor > 0 or num_aged > 0
        self.again: Counter[int] = Counter()  # tokens, by rank
        self.before: dict[int, float] = {}
        self.least: dict[tuple[str, int], float] = {}
        self.largest = 0.0  # in quanta

    def balance(self, rank: int) -> float:
        above = sum(map(self.ledger.of_class, range(rank)))
        used = self.ledger.of_class(rank) + self.rate * self.again[rank]
        return used - self.floor * above

    def start(self) -> None:
        """Before a step."""
        self.heads.start()
        self.before = {rank: self.balance(rank) for rank in (1, 2)}

    def look(self, plan: StepPlan) -> None:
        for seq, start, num_tokens, _ in plan.chunks:
            again = max(0, min(start + num_tokens, seq.num_reached_tokens) - start)
            self.again[seq.rank] += again
            happened["again"] += again > 0
        could_run = self.could_run(plan)
        given = {chunk.seq.rank for chunk in plan.chunks if not chunk.seq.is_decoding}
        self.check("out of turn", could_run, given)
        blocked = {one.rank for one in self.heads.misfits}
        self.check("passed", could_run | blocked, {one.rank for one in plan.admitted})

    def check(self, how: str, wanting: set[int], given: set[int]) -> None:
        for rank in (1, 2):
            if min(wanting, default=rank) >= rank:
                self.least.pop((how, rank), None)
                continue
            before = self.before[rank]
            least = self.least[how, rank] = min(self.least.get((how, rank), before), before)
            if rank in given:
                assert self.may_go_first, (how, rank)
                excess = self.balance(rank) - least
                self.largest = max(self.largest, excess / self.quantum)
                assert excess <= self.limit + 1e-6, (how, rank, excess, self.limit)
                happened[how] += 1

    def could_run(self, plan: StepPlan) -> set[int]:
        """Ranks of classes to which a full step did not give what it could have."""
        idle = self.heads.idle(plan, self.core._clock())
        if plan.num_tokens < self.core.config.scheduler.max_step_tokens:
            return set()
        computed = chunks(plan)
        unfinished = {
            one.rank
            for one in prompts(self.core)
            if computed.get(one.id, 0) < one.num_uncomputed_tokens
        }
        return unfinished | ({one.rank for one in idle} if not plan.preempted else set())


def check_victims(core: EngineCore, plan: StepPlan) -> None:
    """Nothing of a class gives way while something of a lower one runs on, but for what was
    displaced again and again before it came any further, and is left alone until it has."""
    bound = core.config.scheduler.max_preemptions
    lowest = max(
        (
            one.rank
            for one in core.scheduler.running.values()
            if one.num_fruitless < bound or one.num_reached_tokens > one.num_tokens_at_preemption
        ),
        default=0,
    )
    assert all(victim.rank >= lowest for victim in plan.preempted)
    happened["victims"] += len(plan.preempted)
    happened["class conflicts"] += len({one.rank for one in plan.preempted} - {lowest})


@settings(max_examples=80, deadline=None)
@given(
    load=st.lists(requests("aabbcd", n=(1, 1, 1, 2)), min_size=20, max_size=80),
    policy=st.sampled_from(["wfq", "drr", "priority"]),
    num_blocks=st.sampled_from([14, 24, 64]),
    max_step_tokens=st.sampled_from([6, 16, 32]),
    max_seqs=st.sampled_from([3, 6]),
    max_bypasses=st.sampled_from([0, 2, 8]),
    floor=st.sampled_from([0.0, 0.1, 0.4]),
    max_wait=st.sampled_from([None, None, 0.2]),
)
def classes_in_order(
    load: list[Request],
    policy: str,
    num_blocks: int,
    max_step_tokens: int,
    max_seqs: int,
    max_bypasses: int,
    floor: float,
    max_wait: float | None,
) -> None:
    core, _ = make_core(
        policy=policy,
        num_blocks=num_blocks,
        max_step_tokens=max_step_tokens,
        max_seqs=max_seqs,
        max_bypasses=max_bypasses,
        class_floor=floor,
        watermark=0.0,
        prefix_cache=False,
        check=False,
    )
    use(core, policy)
    inversions = Inversions(core, record_charges(core), num_aged=max_wait is not None)

    def look(plan: StepPlan) -> None:
        inversions.look(plan)
        check_victims(core, plan)

    watch(core, look, inversions.start)
    lower = {"max_wait": max_wait, "preemptible": True}
    tenants = {t: {**share, **(lower if share["rank"] else {})} for t, share in CLASSES.items()}
    for _ in play(core, load, tenants):
        pass
    happened["at the limit"] += inversions.largest > 1.0


def test_a_class_is_served_before_a_higher_one_within_its_floor_only() -> None:
    happened.clear()

    classes_in_order()

    for one in ("out of turn", "passed", "victims", "class conflicts", "again"):
        assert happened[one] > 50, happened
    assert happened["at the limit"] > 2, happened


@settings(max_examples=80, deadline=None)
@given(
    load=st.lists(
        requests("abc", prompt=12, output=6, gaps=(0.0, 0.004)), min_size=25, max_size=50
    ),
    big=st.integers(30, 46),
    policy=st.sampled_from(["fcfs", "priority"]),
    max_bypasses=st.sampled_from([0, 1, 3]),
)
def big_heads(load: list[Request], big: int, policy: str, max_bypasses: int) -> None:
    core, _ = make_core(
        policy=policy,
        num_blocks=12,
        max_bypasses=max_bypasses,
        max_bypass_seconds=1e9,
        max_bypass_lead=1e9,
        prefix_cache=False,
        check=False,
    )
    load = [*load[:8], Request("big", big, 2), *load[8:]]
    num_younger: int | None = None  # let in since the big one was first seen not to fit

    def look(plan: StepPlan) -> None:
        nonlocal num_younger
        (waiting,) = [one for one in core.scheduler.queues if one.id == "r8"] or [None]
        if waiting is None:
            return
        # The step in which it is first looked at in vain: nobody older waits, and slots are left.
        older = any(one.place < waiting.place for one in core.scheduler.queues)
        if num_younger is None and not older and not plan.preempted:
            num_younger = 0
        if num_younger is not None:
            num_younger += sum(one.place > waiting.place for one in plan.admitted)
            happened["passes"] += sum(one.place > waiting.place for one in plan.admitted)
            assert num_younger <= max_bypasses

    watch(core, look)
    for _ in play(core, load, {}):
        pass
    assert core.scheduler.pool.num_held == 0


def test_a_head_that_does_not_fit_is_passed_as_often_as_may_be_and_no_more() -> None:
    """In order of arrival, where to pass is to come later and to be let in before."""
    happened.clear()

    big_heads()

    assert happened["passes"] > 3, happened
