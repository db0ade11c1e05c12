"""Loads on a core with a virtual clock, and what the laws of scheduling are stated in: service by
tenant as it was charged, and the state that each step's planning left behind."""

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st

from engine.core import EngineCore
from engine.events import Event
from engine.plan import StepPlan
from engine.scheduling.fairness import max_resident_service
from engine.scheduling.policies import DeficitRoundRobin
from engine.scheduling.shares import VirtualCounters
from engine.sequence import Sequence as EngineSequence
from tests.scripted import add

MAX_STEPS = 20_000
QUANTUM = 24.0  # of `drr` here: the product's would not be used up by such small loads

Tenants = Mapping[str, Mapping[str, Any]]
"""By name: weight, rank and what else of a share is not the default."""

CLASSES: Tenants = {
    "a": {"rank": 0, "weight": 2.0},
    "b": {"rank": 0},
    "c": {"rank": 1},
    "d": {"rank": 2, "preemptible": True},
}


@dataclass(frozen=True)
class Request:
    tenant: str
    prompt: int
    output: int
    gap: float = 0.0  # seconds after the request before it
    n: int = 1
    topic: int | None = None  # its prompt begins as others of its tenant with this one do
    patience: float | None = None  # seconds after which its client leaves


def requests(
    tenants: str,
    *,
    prompt: int = 24,
    output: int = 12,
    gaps: tuple[float, ...] = (0.0, 0.0, 0.0, 1 / 256, 1 / 32),
    topics: tuple[int | None, ...] = (None,),
    patience: tuple[float | None, ...] = (None,),
    n: tuple[int, ...] = (1,),
) -> st.SearchStrategy[Request]:
    """Requests of up to so many tokens. Most gaps are none: the load comes in bursts."""
    return st.builds(
        Request,
        tenant=st.sampled_from(tenants),
        prompt=st.integers(1, prompt),
        output=st.integers(1, output),
        gap=st.sampled_from(gaps),
        n=st.sampled_from(n),
        topic=st.sampled_from(topics),
        patience=st.sampled_from(patience),
    )


def submit(core: EngineCore, request_id: str, request: Request, tenants: Tenants) -> None:
    prompt: int | list[int] = request.prompt
    if request.topic is not None:
        prompt = [10**7 + 1000 * request.topic + i for i in range(request.prompt)]
    share = tenants.get(request.tenant, {})
    add(core, request_id, request.tenant, prompt, request.output, n=request.n, **share)


def play(
    core: EngineCore, load: Sequence[Request], tenants: Tenants, prefix: str = "r"
) -> Iterator[list[Event]]:
    """Let the requests arrive at their times and run to the end; yields after each change."""
    clock: Any = core._clock
    due, leaving = 0.0, []
    for number, request in enumerate(load):
        due += request.gap
        while core.has_work and clock() < due:
            yield from _advance(core, leaving)
        clock.now = max(clock.now, due)
        submit(core, f"{prefix}{number}", request, tenants)
        if request.patience is not None:
            leaving.append((clock() + request.patience, f"{prefix}{number}"))
        yield []
    for _ in range(MAX_STEPS):
        if not core.has_work:
            return
        yield from _advance(core, leaving)
    raise AssertionError(f"still working: {core.scheduler!r}")


def _advance(core: EngineCore, leaving: list[tuple[float, str]]) -> Iterator[list[Event]]:
    yield core.step()
    for one in [one for one in leaving if one[0] <= core._clock()]:
        leaving.remove(one)
        yield core.abort(one[1])


def saturate(
    core: EngineCore,
    tenants: Tenants,
    sizes: Mapping[str, tuple[int, int]],
    steps: int,
    prefix: str = "",
) -> Iterator[list[Event]]:
    """So many steps, before each of which every tenant of `sizes` has so many requests waiting,
    all in the first class, that a step cannot admit them all."""
    enough = core.config.scheduler.max_seqs + 1
    for step in range(steps):
        for tenant, (prompt, output) in sizes.items():
            for number in range(core.scheduler.queues.num_waiting(0, tenant), enough):
                request = Request(tenant, prompt, output)
                submit(core, f"{prefix}{tenant}{step}.{number}", request, tenants)
        yield core.step()


# ------------------------------------------------------------------------------------- service


class Ledger(Counter[tuple[int, str]]):
    """Service units charged so far, before division by weights, by (rank, tenant). No lift, and
    nothing else that the scheduler does to its counters, changes it."""

    def of_class(self, rank: int) -> float:
        return sum(service for (one, _), service in self.items() if one == rank)

    def of(self, tenant: str) -> float:
        return sum(service for (_, one), service in self.items() if one == tenant)


class _RecordingCounters(VirtualCounters):
    def __init__(self, ledger: Ledger, rank: int) -> None:
        super().__init__()
        self._ledger, self._rank = ledger, rank

    def charge(self, tenant: str, service: float) -> None:
        self._ledger[self._rank, tenant] += service  # type: ignore[assignment]
        super().charge(tenant, service)


def record_charges(core: EngineCore) -> Ledger:
    """From now on, which is before the first arrival."""
    ledger = Ledger()
    for rank in range(4):
        core.scheduler.counters[rank] = _RecordingCounters(ledger, rank)
    return ledger


def watch(
    core: EngineCore,
    look: Callable[[StepPlan], None],
    before: Callable[[], None] = lambda: None,
) -> None:
    """Call `before` when a step is to be planned, and `look` when it is and has not run."""
    schedule = core.scheduler.schedule

    def planned(now: float) -> StepPlan:
        before()
        plan = schedule(now)
        look(plan)
        return plan

    core.scheduler.schedule = planned  # type: ignore[method-assign]


def use(core: EngineCore, policy: str) -> float:
    """The slack of a policy's order: how far a tenant that is admitted may be ahead of one that
    waits. Under `drr` it has at most started the same round."""
    lead = core.config.scheduler.max_bypass_lead
    if policy != "drr":
        return lead
    small = DeficitRoundRobin()
    small.QUANTUM = QUANTUM  # type: ignore[misc]
    core.switch_policy(small)
    return max(lead, QUANTUM)


def resident_service(core: EngineCore, load: Sequence[Request]) -> float:
    """R of engine/scheduling/fairness.py for the longest requests of a load."""
    return max_resident_service(
        core.config.scheduler,
        core.config.cache,
        max_prompt_tokens=max(one.prompt for one in load),
        max_output_tokens=max(one.output for one in load),
    )


class RivalMeter:
    """How much service a rival g gets while f waits, beside what f gets, over every interval.

    Law (VTC's theorems 4.4, 4.9 and 4.11 in one). Let f wait throughout [t1, t2], and g do
    whatever it likes: be idle, come and go, run. With the lemma's slack S (`use`) and R:

        dW_g / w_g  <=  dW_f / w_f + R / w_f + 2 R / w_g + 2 S

    Proof. If g never waits in [t1, t2], its residents alone are served: dW_g <= R. Otherwise let u
    be the first moment at which it does. Up to u it got at most R. At u it waited already, or was
    lifted to the least counter of those that wait; so c_g(u) >= c_h(u) for an h that waits (f does,
    so there is one), and by the lemma c_f(u) <= c_h(u) + S + R / w_f. At t2 the lemma says
    c_g(t2) <= c_f(t2) + S + R / w_g. Subtract; lifts of g only make its service less than the rise
    of its counter, and f, which waits, is not lifted. QED.

    With t1 the arrival of a request of f and t2 its admission it bounds what anybody gets
    before it starts: nothing starves. With f backlogged and g on and off it says that idleness
    saves up no claim. Two that both wait have it both ways round.
    """

    def __init__(self, ledger: Ledger, weights: Mapping[str, float]) -> None:
        self._ledger = ledger
        self._weights = weights
        self._least: dict[tuple[str, str], float] = {}
        self.largest: defaultdict[tuple[str, str], float] = defaultdict(float)

    def observe(self, waiting: set[str]) -> None:
        """`waiting` of one class."""
        lead = {t: self._ledger.of(t) / weight for t, weight in self._weights.items()}
        least: dict[tuple[str, str], float] = {}
        for f in waiting:
            for g in self._weights.keys() - {f}:
                difference = lead[g] - lead[f]
                least[f, g] = min(self._least.get((f, g), difference), difference)
                self.largest[f, g] = max(self.largest[f, g], difference - least[f, g])
        self._least = least

    def check(self, slack: float, resident: float) -> None:
        for (f, g), rise in self.largest.items():
            bound = resident / self._weights[f] + 2 * resident / self._weights[g] + 2 * slack
            assert rise <= bound + 1e-6, (f, g, rise, bound)


# ------------------------------------------------------------------------------ what could run


class Heads:
    """Which queue heads a planned step could have admitted and did not, found from the state that
    it left: blocks, slots, places. Within a step room only shrinks, so what fits now did before.
    `start` is for before each step, `idle` for after its planning.

    For a single pool, no caps, fewer tenants than the sixteen heads at which a step stops looking.
    """

    def __init__(self, core: EngineCore) -> None:
        self.core = core
        self.config = core.config.scheduler
        self.scheduler = core.scheduler
        self.num_admitted = 0
        self.misfits: list[EngineSequence] = []  # of the last step
        self._blocked: dict[EngineSequence, tuple[float, int]] = {}  # since, admissions before
        self._num_delays: Counter[EngineSequence] = Counter()
        self._counters: dict[int, dict[str, float]] = {}  # as they were before the step
        self.seen: Counter[str] = Counter()

    def start(self) -> None:
        self._counters = {rank: one.as_dict() for rank, one in self.scheduler.counters.items()}

    def idle(self, plan: StepPlan, now: float) -> list[EngineSequence]:
        """Heads that fit, and that nothing which is so by design keeps waiting."""
        before, self.num_admitted = self.num_admitted, self.num_admitted + len(plan.admitted)
        heads = [one for one in self.scheduler.queues if self.scheduler.queues.is_head(one)]
        twins = [one for one in heads if self._awaits_twin(one)]
        # What stands behind a twin may have been looked at, and so may keep others waiting.
        looked = heads + [one for twin in twins for one in self._behind(twin)]
        self.misfits = [one for one in looked if not self._fits(one)]
        for one in plan.admitted:
            self._blocked.pop(one, None)
            self._num_delays.pop(one, None)
        if self.num_slots + sum(one.num_slots for one in plan.admitted) > 0:
            for one in self.misfits:
                self._blocked.setdefault(one, (now, before))
        fitting = [one for one in heads if self._fits(one)]
        idle = [one for one in fitting if not self._is_held(one, twins, now)]
        if self.num_budget(plan) > 0:
            self._num_delays.update(one for one in idle if one in twins)
        self.seen["misfits"] += len(self.misfits)
        self.seen["held"] += len(fitting) - len(idle)
        self.seen["twins"] += len(twins)
        most = self.config.max_prefix_delays
        return [one for one in idle if one not in twins or self._num_delays[one] > most]

    def num_budget(self, plan: StepPlan) -> int:
        """Tokens with which the step could still have admitted; one that preempts admits nobody."""
        return 0 if plan.preempted else self.config.max_step_tokens - plan.num_tokens

    @property
    def num_slots(self) -> int:
        running = self.scheduler.running.values()
        return self.config.max_seqs - sum(one.num_slots for one in running)

    def _behind(self, head: EngineSequence) -> list[EngineSequence]:
        queue = [one for one in self.scheduler.queues if one.tenant == head.tenant]
        return [one for one in queue if one.rank == head.rank and one is not head]

    def _awaits_twin(self, head: EngineSequence) -> bool:
        """A running prompt of its tenant is about to compute half of what it lacks, or more."""
        if not self.core.config.cache.enable_prefix_cache:
            return False
        size = self.core.config.cache.block_size
        hits = size * len(self.scheduler.memory.match(head))
        common = [
            _num_common(head, one) // size * size
            for one in self.scheduler.running.values()
            if one.tenant == head.tenant and one.rank <= head.rank and not one.is_decoding
        ]
        coming = max(common, default=0) - hits
        return head.parked is None and coming > 0 and 2 * coming >= head.num_tokens - hits

    def _fits(self, head: EngineSequence) -> bool:
        """Slots and blocks are there for it, by the books of the pool; beside what runs, an
        admission leaves one block and the watermark."""
        memory, pool = self.scheduler.memory, self.scheduler.pool
        shared = sum(pool.blocks[block].ref_count > 0 for block in memory.match(head))
        num_blocks = memory.num_blocks(head.num_tokens) - shared
        if self.scheduler.running:
            num_blocks += 1 + math.ceil(self.config.watermark * len(pool.blocks))
        return num_blocks <= pool.num_free + pool.num_cached and head.num_slots <= self.num_slots

    def _is_held(self, head: EngineSequence, twins: list[EngineSequence], now: float) -> bool:
        """Room is kept for a head that does not fit: of a higher class at once; else when it was
        passed as often or for as long as may be, or, in its class, by who is ahead of it."""
        for one in self.misfits:
            since, before = self._blocked.get(one, (now, self.num_admitted))
            if head.rank > one.rank or self._leads(head, one):
                return True
            if self.num_admitted - before >= self.config.max_bypasses:
                return True
            if now - since > self.config.max_bypass_seconds:
                return True
        return any(self._leads(head, one) for one in twins)

    def _leads(self, head: EngineSequence, other: EngineSequence) -> bool:
        """Whether it may have been ahead at some moment of the step: counters only grow."""
        if head.rank != other.rank:
            return False
        most = self.scheduler.counters[head.rank][head.tenant]
        least = self._counters.get(head.rank, {}).get(other.tenant, 0.0)
        return most - least > self.config.max_bypass_lead


def _num_common(one: EngineSequence, other: EngineSequence) -> int:
    """Tokens with which both begin; the last of a sequence is always computed."""
    most = min(one.num_tokens - 1, other.num_tokens)
    pairs = zip(one.token_ids[:most], other.token_ids, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), most)
