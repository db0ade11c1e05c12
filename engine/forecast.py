"""When a waiting request will have its first token: the scheduler's own state, run forward.

`capture` copies what matters of a core between two of its steps. `run_forward` rebuilds it around
a simulated runner and steps the very scheduler, at the prices learned from its steps, until every
request has its first token. What it cannot know: who arrives meanwhile, and how long outputs will
be, for which it takes what each tenant's last requests did.
"""

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import cast

from engine.arrival import make_sequences
from engine.config import CacheConfig, EngineConfig
from engine.core import EngineCore
from engine.cost_model import LinearCost
from engine.events import SequenceFinished, TokensGenerated
from engine.scheduling.classes import ClassClock
from engine.scheduling.own_policy import GuardedPolicy
from engine.scheduling.policies import Policy
from engine.scheduling.shares import VirtualCounters
from engine.sequence import FinishReason, SamplingParams, Sequence, SequenceStatus, TenantShare
from engine.simulated_runner import TOKEN, SimulatedRunner, VirtualClock

MAX_WAITING = 1024  # captured: what waits behind so many is too far away to be foreseen
MAX_MATCHED_TOKENS = 32_768  # of them looked up in the prefix cache
MAX_SECONDS = 600.0  # of the future
MAX_STEPS = 4000
PATIENCE_SECONDS = 0.25  # of computing


@dataclass(frozen=True, slots=True)
class Outline:
    """One sequence, running or in its queue, with what runs in its place before a fork."""

    id: str
    request_id: str
    index: int  # which of its request's sequences
    share: TenantShare
    rank: int
    place: int
    queued: float
    num_prompt_tokens: int
    num_tokens: int
    num_computed_tokens: int
    num_reached_tokens: int
    num_charged_tokens: int
    num_expected_tokens: int  # of output, at its end
    num_slots: int  # of its whole group, until that forks
    num_preemptions: int
    num_fruitless: int
    num_tokens_at_preemption: int
    num_bypasses: int
    blocked_since: float | None
    deadline: float | None
    is_admitted: bool
    has_first_token: bool
    block_table: tuple[int, ...] | None  # None: it waits


@dataclass(frozen=True, slots=True)
class Outlook:
    """A core at one instant: all that decides what it does next, if nobody else arrives."""

    config: EngineConfig
    policy: Policy
    cost: LinearCost
    now: float
    floors: dict[str, int]
    counters: dict[int, VirtualCounters]
    classes: ClassClock
    ahead: dict[tuple[int, str], float]  # of what memory cost, where the policy weighs it
    sequences: tuple[Outline, ...]
    # Queues of which only the beginning is here, as (rank, tenant).
    cut_queues: frozenset[tuple[int, str]]

    @property
    def started(self) -> frozenset[str]:
        """Requests that have a token already."""
        return frozenset(one.request_id for one in self.sequences if one.has_first_token)

    @property
    def awaited(self) -> frozenset[str]:
        """Requests that have no token yet."""
        return frozenset(one.request_id for one in self.sequences) - self.started


@dataclass(frozen=True, slots=True)
class Forecast:
    """Seconds from the capture to each request's first token, of those foreseen, or to its end by
    its deadline without one. The others wait for longer than `horizon`."""

    first_tokens: dict[str, float]
    horizon: float
    expired: dict[str, float] = field(default_factory=dict)
    started: frozenset[str] = frozenset()  # requests that had a token when captured


def capture(core: EngineCore, now: float) -> Outlook | None:
    """None where nothing can be foreseen: with two pools, before steps had a price, or under an
    operator's own policy, which nobody but the scheduler may ask."""
    scheduler = core.scheduler
    cost = scheduler.step_times.cost
    if len(core.stages) > 1 or cost is None or isinstance(scheduler.policy, GuardedPolicy):
        return None
    waiting = scheduler.queues.firsts(MAX_WAITING)
    hits = _Hits(core)
    num_taken = Counter((seq.rank, seq.tenant) for seq in waiting)
    return Outlook(
        config=core.config,
        policy=scheduler.policy,
        cost=cost,
        now=now,
        floors=scheduler.pool.floors,
        counters={rank: one.copy() for rank, one in scheduler.counters.items()},
        classes=scheduler.charging.classes.copy(),
        ahead=scheduler.charging.ahead.copy(),
        sequences=tuple(
            _outline(core, one, hits) for one in (*scheduler.running.values(), *waiting)
        ),
        cut_queues=frozenset(
            (rank, tenant)
            for (rank, tenant), number in num_taken.items()
            if number < scheduler.queues.num_waiting(rank, tenant)
        ),
    )


class _Hits:
    """What waiting sequences would find in the prefix cache. Looking costs time between two steps,
    so only the first are looked up; to others goes what their tenant's have found on average."""

    def __init__(self, core: EngineCore) -> None:
        self._memory = core.scheduler.memory
        self._block_size = core.config.cache.block_size
        self._budget = MAX_MATCHED_TOKENS
        self._found: Counter[str] = Counter()
        self._asked: Counter[str] = Counter()

    def of(self, seq: Sequence) -> int:
        """Tokens; at least one is left to compute."""
        if self._budget > 0:
            self._budget -= seq.num_tokens
            num_hits = len(self._memory.match(seq)) * self._block_size
            self._found[seq.tenant] += num_hits
            self._asked[seq.tenant] += seq.num_tokens
        else:
            part = self._found[seq.tenant] / max(1, self._asked[seq.tenant])
            num_hits = int(part * seq.num_tokens)
        return min(num_hits, seq.num_tokens - 1)


def _outline(core: EngineCore, seq: Sequence, hits: _Hits) -> Outline:
    is_running = seq.status is SequenceStatus.RUNNING
    num_computed = seq.num_computed_tokens  # what was swapped out will come back
    if not is_running and not num_computed:
        num_computed = hits.of(seq)
    length = core.output_lengths.expected(seq.tenant, seq.num_output_tokens, seq.params.max_tokens)
    return Outline(
        id=seq.id,
        request_id=seq.request_id,
        index=seq.index,
        share=seq.share,
        rank=seq.rank,
        place=seq.place,
        queued=seq.queued,
        num_prompt_tokens=seq.num_prompt_tokens,
        num_tokens=seq.num_tokens,
        num_computed_tokens=num_computed,
        num_reached_tokens=seq.num_reached_tokens,
        num_charged_tokens=seq.num_charged_tokens,
        num_expected_tokens=length,
        num_slots=seq.num_slots,
        num_preemptions=seq.num_preemptions,
        num_fruitless=seq.num_fruitless,
        num_tokens_at_preemption=seq.num_tokens_at_preemption,
        num_bypasses=seq.num_bypasses,
        blocked_since=seq.blocked_since,
        deadline=seq.deadline,
        is_admitted=seq.admitted is not None,
        has_first_token=seq.first_token is not None,
        block_table=tuple(seq.block_table) if is_running else None,
    )


def run_forward(
    outlook: Outlook, *, computing_clock: Callable[[], float] = time.monotonic
) -> Forecast:
    """Step until every captured request has its first token, as far as limits and patience go."""
    give_up = computing_clock() + PATIENCE_SECONDS
    clock = VirtualClock(outlook.now)
    core = _rebuild(outlook, clock)
    awaited = set(outlook.awaited)
    first_tokens: dict[str, float] = {}
    expired: dict[str, float] = {}
    for _ in range(MAX_STEPS):
        if not awaited or clock.now - outlook.now > MAX_SECONDS or computing_clock() > give_up:
            break
        if any(not core.scheduler.queues.num_waiting(*one) for one in outlook.cut_queues):
            break  # what would be its next head is not here
        for event in core.step():
            if not isinstance(event, TokensGenerated | SequenceFinished):
                continue
            if event.request_id in awaited:
                awaited.remove(event.request_id)
                is_late = (
                    isinstance(event, SequenceFinished) and event.reason == FinishReason.DEADLINE
                )
                found = expired if is_late else first_tokens
                found[event.request_id] = event.at - outlook.now
    return Forecast(first_tokens, clock.now - outlook.now, expired, outlook.started)


def _rebuild(outlook: Outlook, clock: VirtualClock) -> EngineCore:
    """A core that will decide as the captured one would."""
    config = replace(
        outlook.config,
        cache=CacheConfig(
            num_blocks=outlook.config.cache.num_blocks,
            block_size=outlook.config.cache.block_size,
            enable_prefix_cache=False,
        ),
        scheduler=replace(outlook.config.scheduler, preemption="recompute", policy="fcfs"),
        check_invariants=False,
    )
    core = EngineCore(config, SimulatedRunner(clock, outlook.cost), clock=clock)
    scheduler = core.scheduler
    scheduler.switch_policy(outlook.policy)
    scheduler.step_times.assume(outlook.cost)
    scheduler.charging.classes, scheduler.charging.ahead = outlook.classes, outlook.ahead
    scheduler.counters.update(outlook.counters)
    for tenant, floor in outlook.floors.items():
        scheduler.pool.set_floor(tenant, floor)
    blocks: dict[int, int] = {}  # those that several sequences share stay shared
    for outline in outlook.sequences:
        sequences = _sequences(outline)
        for block_id in outline.block_table or ():
            if block_id in blocks:
                scheduler.pool.touch([blocks[block_id]], outline.share.tenant)
            else:
                (blocks[block_id],) = scheduler.pool.allocate(1, outline.share.tenant)
            sequences[0].block_table.append(blocks[block_id])
        core.adopt(sequences)
    return core


def _sequences(outline: Outline) -> tuple[Sequence, ...]:
    """As captured; beams as sequences that are drawn, which take the same time. What has forked
    goes its own way."""
    sequences = make_sequences(
        outline.id,
        (TOKEN,),
        SamplingParams(max_tokens=outline.num_expected_tokens, n=outline.num_slots),
        share=outline.share,
        namespace=outline.share.tenant,
        arrived=outline.queued,
        deadline=outline.deadline,
    )
    # How many tokens there are is all that matters: bytes take the least time to make.
    token_ids = cast("list[int]", bytearray(outline.num_tokens))
    for seq in sequences:
        seq.token_ids, seq.num_prompt_tokens = token_ids, outline.num_prompt_tokens
    first = sequences[0]
    first.admitted = outline.queued if outline.is_admitted else None
    first.index, first.rank, first.place = outline.index, outline.rank, outline.place
    first.num_computed_tokens = outline.num_computed_tokens
    first.num_reached_tokens = outline.num_reached_tokens
    first.num_charged_tokens = outline.num_charged_tokens
    first.num_preemptions = outline.num_preemptions
    first.num_fruitless = outline.num_fruitless
    first.num_tokens_at_preemption = outline.num_tokens_at_preemption
    first.num_bypasses, first.blocked_since = outline.num_bypasses, outline.blocked_since
    return sequences
