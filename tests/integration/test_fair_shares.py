"""Weights on the real model: two tenants that saturate it are served 1:3, token for token."""

import itertools
import random
import time

import pytest

from engine.config import CacheConfig, EngineConfig, SchedulerConfig
from engine.core import EngineCore
from engine.events import SequenceFinished
from engine.model.runner import ModelRunner
from engine.scheduling.fairness import ServiceGapMeter, service_bound
from engine.sequence import SamplingParams, TenantShare
from tests.model_oracle import default_model

WEIGHTS = {"one": 1.0, "three": 3.0}
# The lighter tenant sends the heavier requests: shares are of service, not of requests.
PROMPT_TOKENS = {"one": (20, 60), "three": (5, 30)}
OUTPUT_TOKENS = {"one": 12, "three": 6}
NUM_STEPS = 260


@pytest.mark.model
def test_two_saturating_tenants_are_served_by_weight() -> None:
    model = default_model()
    cache = CacheConfig(num_blocks=256)
    scheduler = SchedulerConfig(max_seqs=4, max_step_tokens=64, max_model_len=256)
    core = EngineCore(
        EngineConfig(cache=cache, scheduler=scheduler, check_invariants=True),
        ModelRunner(model, cache),
        clock=time.monotonic,
        token_bytes=model.tokenizer.token_bytes,
        eos_token_ids=model.eos_token_ids,
    )
    rng = random.Random(1)
    numbers = itertools.count()
    meter = ServiceGapMeter()
    history: list[dict[str, float]] = []  # service by tenant, after each step
    num_finished = 0
    for _ in range(NUM_STEPS):
        for tenant, weight in WEIGHTS.items():
            while core.scheduler.queues.num_waiting(0, tenant) < 3:
                length = rng.randint(*PROMPT_TOKENS[tenant])
                core.add(
                    f"{tenant}-{next(numbers)}",
                    tuple(rng.randrange(1000, 40_000) for _ in range(length)),
                    SamplingParams(
                        max_tokens=OUTPUT_TOKENS[tenant], temperature=0, ignore_eos=True
                    ),
                    share=TenantShare(tenant=tenant, weight=weight),
                    namespace=tenant,
                )
        num_finished += sum(isinstance(e, SequenceFinished) for e in core.step())
        counters = core.scheduler.counters[0].as_dict()
        meter.observe(set(WEIGHTS), counters)
        history.append({tenant: counters[tenant] * WEIGHTS[tenant] for tenant in WEIGHTS})

    assert num_finished > 60
    bound = service_bound(
        scheduler,
        cache,
        weights=(1.0, 3.0),
        max_prompt_tokens=max(high for _, high in PROMPT_TOKENS.values()),
        max_output_tokens=max(OUTPUT_TOKENS.values()),
    )
    assert 0 < meter.max_gap <= bound
    # Any long window: every one of at least two thirds of the run.
    long = 2 * NUM_STEPS // 3
    for start, end in itertools.combinations(range(0, NUM_STEPS, 20), 2):
        if end - start >= long:
            served = {t: history[end][t] - history[start][t] for t in WEIGHTS}
            assert served["three"] / served["one"] == pytest.approx(3.0, rel=0.05), (start, end)
