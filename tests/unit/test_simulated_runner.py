"""The simulated runner: time passes as the cost model says, step by step."""

from engine.config import CacheConfig, EngineConfig, SchedulerConfig
from engine.core import EngineCore
from engine.cost_model import LinearCost
from engine.events import StepFinished, TokensGenerated
from engine.sequence import SamplingParams, TenantShare
from engine.simulated_runner import SimulatedRunner, VirtualClock


def test_a_step_takes_what_it_computes_and_reads():
    cost = LinearCost(step=1000.0, prompt_token=100.0, decode=10.0, context_token=1.0)
    clock = VirtualClock()
    config = EngineConfig(
        cache=CacheConfig(num_blocks=8, block_size=4),
        scheduler=SchedulerConfig(max_step_tokens=4, max_seqs=4),
    )
    core = EngineCore(config, SimulatedRunner(clock, cost), clock=clock)
    for name, num_prompt_tokens in (("a", 6), ("b", 3)):
        core.add(
            name,
            tuple(range(num_prompt_tokens)),
            SamplingParams(max_tokens=2),
            share=TenantShare(tenant=name),
            namespace=name,
        )

    events = []
    while core.has_work:
        events += core.step()

    steps = [e for e in events if isinstance(e, StepFinished)]
    assert [e.executed - e.started for e in steps] == [
        1000 + 4 * 100,  # a: tokens 0..3; its counter is now ahead of b's
        1000 + 3 * 100 + 10 + 4,  # b: tokens 0..2; one token of a, which reads four
        1000 + 10 + 3 + 10 + 5,  # b decodes, and ends; the last prompt token of a reads five
        1000 + 10 + 6,  # a decodes, and ends
    ]
    assert [(e.request_id, e.at) for e in events if isinstance(e, TokensGenerated)] == [
        ("b", 2714.0),
        ("b", 3742.0),
        ("a", 3742.0),
        ("a", 4758.0),
    ]
