"""A runner without a model: tokens from a counter, time from a cost line. For tests of the core."""

import random
from dataclasses import dataclass, field

from engine.config import CacheConfig, EngineConfig, SchedulerConfig
from engine.core import EngineCore
from engine.plan import StepOutput, StepPlan
from engine.sequence import SamplingParams, TenantShare


@dataclass
class VirtualClock:
    now: float = 0.0

    def __call__(self) -> float:
        return self.now


@dataclass
class ScriptedRunner:
    """Each sequence's next token is its position; a step costs base + per_token * tokens.

    Checks on the way what a model would rely on: that block tables cover the chunk, that no block
    is written by two sequences, that every token but those of prefix hits is computed in order.
    """

    clock: VirtualClock
    block_size: int
    base_seconds: float = 0.01
    seconds_per_token: float = 0.0001
    plans: list[StepPlan] = field(default_factory=list)
    keep_plans: bool = False
    fail_on: frozenset[str] = frozenset()
    explode: bool = False

    def execute(self, plan: StepPlan) -> StepOutput:
        if self.keep_plans:
            self.plans.append(plan)
        if self.explode:
            raise RuntimeError("the device is gone")
        written: set[int] = set()
        for chunk in plan.chunks:
            seq, end = chunk.seq, chunk.start + chunk.num_tokens
            assert chunk.num_tokens > 0
            assert chunk.start == seq.num_computed_tokens
            assert end <= seq.num_tokens
            assert bool(chunk.draws) == (end == seq.num_tokens)
            assert len(seq.block_table) * self.block_size >= end
            first, last = chunk.start // self.block_size, (end - 1) // self.block_size
            blocks = set(seq.block_table[first : last + 1])
            assert not blocks & written, "two sequences write one block"
            written |= blocks
        self.clock.now += self.base_seconds + self.seconds_per_token * plan.num_tokens
        sampling = [seq for c in plan.chunks for seq in c.draws]
        return StepOutput(
            {s.id: 1000 + s.num_tokens for s in sampling if s.id not in self.fail_on},
            {s.id: "logits are not finite" for s in sampling if s.id in self.fail_on},
        )


def make_core(
    *,
    num_blocks: int = 64,
    block_size: int = 4,
    check: bool = True,
    prefix_cache: bool = True,
    **scheduler: object,
) -> tuple[EngineCore, ScriptedRunner]:
    """A core on a scripted runner and a virtual clock, every invariant checked at each step."""
    clock = VirtualClock()
    runner = ScriptedRunner(clock, block_size)
    settings = {"max_step_tokens": 32, "max_seqs": 8, "max_model_len": 256, **scheduler}
    config = EngineConfig(
        cache=CacheConfig(
            num_blocks=num_blocks, block_size=block_size, enable_prefix_cache=prefix_cache
        ),
        scheduler=SchedulerConfig(**settings),  # type: ignore[arg-type]
        check_invariants=check,
    )
    return EngineCore(config, runner, clock=clock), runner


def add(
    core: EngineCore,
    seq_id: str,
    tenant: str,
    prompt: int | list[int],
    output: int,
    *,
    weight: float = 1.0,
    rank: int = 0,
    **params: object,
) -> None:
    """Add a sequence with that many prompt tokens (random: no prefix hits) and output tokens."""
    if isinstance(prompt, int):
        rng = random.Random(seq_id)
        prompt = [rng.randrange(1 << 30) for _ in range(prompt)]
    core.add(
        seq_id,
        tuple(prompt),
        SamplingParams(max_tokens=output, **params),  # type: ignore[arg-type]
        share=TenantShare(tenant=tenant, weight=weight, rank=rank),
        namespace=tenant,
    )
