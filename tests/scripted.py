"""A runner without a model: tokens from a counter, time from a cost line. For tests of the core."""

import random
from collections import defaultdict
from dataclasses import dataclass, field

from engine.config import CacheConfig, EngineConfig, SchedulerConfig
from engine.core import EngineCore
from engine.events import Event, TokenLogprobs
from engine.plan import BlockPairs, ScheduledChunk, StepOutput, StepPlan
from engine.sequence import SamplingParams, Sequence, TenantShare
from engine.simulated_runner import VirtualClock

Store = defaultdict[int, dict[int, int]]
"""Fingerprints by block and offset: what stands for keys and values."""

NUM_CANDIDATES = 12


def fingerprints(token_ids: list[int]) -> list[int]:
    """One number for each token, that depends on it and on all before it, as its KV does."""
    found, last = [], 7
    for token in token_ids:
        last = (last * 1_000_003 + token + 1) % (1 << 61)
        found.append(last)
    return found


def candidates(fingerprint: int) -> tuple[tuple[int, float], ...]:
    """The likeliest tokens after a prefix: a fixed function of the prefix, best first."""
    rng = random.Random(fingerprint)
    found = [(2000 + i, -5 * rng.random()) for i in range(NUM_CANDIDATES)]
    return tuple(sorted(found, key=lambda one: -one[1]))


@dataclass
class ScriptedRunner:
    """Each sequence's next token is its position, plus 100,000 for each sequence of its request
    before it; a step costs base + per_token * tokens, and swap_seconds for each block swapped.

    Checks on the way what a model would rely on: that block tables cover the chunk and hold, for
    every token before it, the KV of exactly this sequence's tokens, whatever was copied, shared,
    freed and reused; that no block is written by two sequences; that every token but those of
    prefix hits is computed in order.
    """

    clock: VirtualClock
    block_size: int
    base_seconds: float = 0.01
    seconds_per_token: float = 0.0001
    swap_seconds: float = 0.0
    plans: list[StepPlan] = field(default_factory=list)
    keep_plans: bool = False
    fail_on: frozenset[str] = frozenset()
    fail_prompt_on: frozenset[str] = frozenset()
    refuse_on: frozenset[str] = frozenset()
    explode: bool = False
    prefill: "ScriptedRunner | None" = None
    blocks: Store = field(default_factory=lambda: defaultdict(dict))
    host: Store = field(default_factory=lambda: defaultdict(dict))

    def execute(self, plan: StepPlan) -> StepOutput:
        if self.keep_plans:
            self.plans.append(plan)
        if self.explode:
            raise RuntimeError("the device is gone")
        copies = plan.copies
        _copy(self.blocks, self.host, copies.swapped_out)
        _copy(self.blocks, self.blocks, copies.copied)
        _copy(self.host, self.blocks, copies.swapped_in)
        if copies.received:
            assert self.prefill is not None
            _copy(self.prefill.blocks, self.blocks, copies.received)
        num_swapped = len(copies.swapped_out) + len(copies.swapped_in)
        self.clock.now += self.base_seconds + self.seconds_per_token * plan.num_tokens
        self.clock.now += self.swap_seconds * num_swapped
        written: set[int] = set()
        output = StepOutput({}, swap_seconds=self.swap_seconds * num_swapped)
        for chunk in plan.chunks:
            written |= self._compute(chunk, written)
            self._draw(chunk, output)
        return output

    def _compute(self, chunk: ScheduledChunk, written: set[int]) -> set[int]:
        seq, end = chunk.seq, chunk.start + chunk.num_tokens
        assert chunk.num_tokens > 0
        assert chunk.start == seq.num_computed_tokens
        assert end <= seq.num_tokens
        assert bool(chunk.draws) == (end == seq.num_tokens and seq.params.max_tokens > 0)
        assert len(seq.block_table) * self.block_size >= end
        kv = fingerprints(seq.token_ids)
        places = [(seq.block_table[i // self.block_size], i % self.block_size) for i in range(end)]
        for (block, offset), expected in zip(places[: chunk.start], kv, strict=False):
            assert self.blocks[block].get(offset) == expected, f"{seq} reads foreign KV"
        targets = {block for block, _ in places[chunk.start :]}
        assert not targets & written, "two sequences write one block"
        for (block, offset), value in list(zip(places, kv, strict=False))[chunk.start :]:
            self.blocks[block][offset] = value
        return targets

    def _draw(self, chunk: ScheduledChunk, output: StepOutput) -> None:
        for seq in chunk.draws:
            if seq.id in self.fail_on:
                output.errors[seq.id] = "logits are not finite"
                continue
            if seq.id in self.refuse_on:
                output.refusals[seq.id] = "no token is allowed"
                continue
            token = 1000 + seq.num_tokens + 100_000 * seq.index
            output.token_ids[seq.id] = token
            if seq.params.logprobs is not None:
                found = candidates(fingerprints(seq.token_ids)[-1])
                top = found[: seq.params.logprobs]
                output.logprobs[seq.id] = TokenLogprobs(token, -0.5, top)
        seq = chunk.seq
        if seq.id in self.fail_prompt_on:
            output.errors[seq.id] = "logits are not finite"
        elif seq.params.prompt_logprobs is not None:
            first, last = chunk.start + 1, chunk.start + chunk.num_tokens + 1
            output.prompt_logprobs[seq.id] = tuple(
                TokenLogprobs(token, -float(i))
                for i, token in enumerate(seq.token_ids[first:last], first)
                if i < seq.num_prompt_tokens
            )


def _copy(source: Store, target: Store, pairs: BlockPairs) -> None:
    read = [(to, dict(source[block])) for block, to in pairs]
    assert len({to for to, _ in read}) == len(read), "two copies into one block"
    target.update(read)


def make_core(
    *,
    num_blocks: int = 64,
    block_size: int = 4,
    check: bool = True,
    prefix_cache: bool = True,
    num_host_blocks: int = 0,
    host_budget: int | None = None,
    prefill_blocks: int | None = None,
    public_prompts: tuple[tuple[int, ...], ...] = (),
    eos: frozenset[int] = frozenset(),
    **scheduler: object,
) -> tuple[EngineCore, ScriptedRunner]:
    """A core on a scripted runner and a virtual clock, every invariant checked at each step.

    With `prefill_blocks`, prompts have a pool of that size to themselves.
    """
    clock = VirtualClock()
    settings = {"max_step_tokens": 32, "max_seqs": 8, "max_model_len": 256, **scheduler}
    cache = CacheConfig(
        num_blocks=num_blocks,
        block_size=block_size,
        enable_prefix_cache=prefix_cache,
        num_host_blocks=num_host_blocks,
        max_host_blocks_per_tenant=host_budget,
        public_prompts=public_prompts,
    )
    prefill_cache, prefill = None, None
    if prefill_blocks is not None:
        prefill = ScriptedRunner(clock, block_size)
        prefill_cache = CacheConfig(
            num_blocks=prefill_blocks,
            block_size=block_size,
            enable_prefix_cache=prefix_cache,
            public_prompts=public_prompts,
        )
    runner = ScriptedRunner(clock, block_size, prefill=prefill)
    config = EngineConfig(
        cache=cache,
        scheduler=SchedulerConfig(**settings),  # type: ignore[arg-type]
        prefill_cache=prefill_cache,
        check_invariants=check,
    )
    core = EngineCore(config, runner, clock=clock, prefill_runner=prefill, eos_token_ids=eos)
    return core, runner


def add(
    core: EngineCore,
    request_id: str,
    tenant: str,
    prompt: int | list[int],
    output: int,
    *,
    weight: float = 1.0,
    rank: int = 0,
    floor: int = 0,
    cap: int | None = None,
    preemptible: bool = False,
    class_weight: float = 1.0,
    max_wait: float | None = None,
    deadline: float | None = None,
    **params: object,
) -> None:
    """Add a request with that many prompt tokens (random: no prefix hits) and output tokens."""
    if isinstance(prompt, int):
        rng = random.Random(request_id)
        prompt = [rng.randrange(1 << 30) for _ in range(prompt)]
    core.add(
        request_id,
        tuple(prompt),
        SamplingParams(max_tokens=output, **params),  # type: ignore[arg-type]
        share=TenantShare(
            tenant=tenant,
            weight=weight,
            rank=rank,
            is_preemptible=preemptible,
            class_weight=class_weight,
            max_wait_seconds=max_wait,
            kv_floor_blocks=floor,
            kv_cap_blocks=cap,
        ),
        namespace=tenant,
        deadline_seconds=deadline,
    )


def find(core: EngineCore, request_id: str, index: int = 0) -> Sequence:
    """One sequence of a live request."""
    return core._requests[request_id][index]


def run_to_end(core: EngineCore) -> list[Event]:
    """All events until nothing is left, which must come, and nothing held."""
    events: list[Event] = []
    for _ in range(3000):
        if not core.has_work:
            for stage in core.stages:
                memory = stage.scheduler.memory
                assert memory.pool.num_held == 0
                assert memory.host.num_free == memory.host.num_blocks
            return events
        events += core.step()
    raise AssertionError(f"still working: {core.scheduler!r}")
