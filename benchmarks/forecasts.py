"""How right the foreseen times to first token are, on the real model.

    OMP_WAIT_POLICY=passive python benchmarks/forecasts.py [seconds per load]

Three tenants of weights 1, 1 and 2 send chat questions as a Poisson process each, at several loads.
Outputs end when the model ends them, or at 64 tokens; the forecast knows neither that nor who
comes later. Shown: the time to first token over what was foreseen at its submission.
"""

import asyncio
import random
import sys
import time
from dataclasses import dataclass

from engine.client import GenerationRequest
from engine.config import CacheConfig, EngineConfig, SchedulerConfig
from engine.core import EngineCore
from engine.events import TokensGenerated
from engine.model.default_model import find_default_model
from engine.model.loader import LoadedModel, load_model
from engine.model.runner import ModelRunner
from engine.sequence import SamplingParams, TenantShare
from engine.service import AsyncEngine

WEIGHTS = {"one": 1.0, "other": 1.0, "double": 2.0}
RATES = (0.5, 1.0, 1.5)  # requests per second, of all tenants together
TOPICS = ("rivers", "trains", "bread", "the moon", "chess", "rain", "bees", "glass", "tea", "maps")


@dataclass(frozen=True)
class Outcome:
    estimate: float | None
    at_least: bool
    actual: float


def prompt(model: LoadedModel, rng: random.Random) -> tuple[int, ...]:
    """A question, sometimes after a long text."""
    assert model.chat_template is not None
    topic = rng.choice(TOPICS)
    context = " ".join(rng.choice(TOPICS) for _ in range(rng.choice([0, 0, 60, 200])))
    question = f"{context} Tell me in {rng.randint(1, 4)} sentences about {topic}."
    text = model.chat_template.render([{"role": "user", "content": question}])
    return tuple(model.tokenizer.encode(text, add_special_tokens=False))


async def ask(engine: AsyncEngine, request: GenerationRequest) -> Outcome:
    submitted = time.monotonic()
    stream = await engine.submit(request)
    estimating = asyncio.create_task(engine.estimate_first_token(request.id))
    first = None
    async for event in stream:
        if first is None and isinstance(event, TokensGenerated):
            first = event.at
    assert first is not None
    estimate = await estimating
    if estimate is None:
        return Outcome(None, False, first - submitted)
    return Outcome(estimate.seconds, estimate.at_least, first - submitted)


async def measure(model: LoadedModel, engine: AsyncEngine, rate: float, seconds: float) -> None:
    rng, asked = random.Random(1), []
    end = time.monotonic() + seconds
    number = 0
    while time.monotonic() < end:
        tenant = rng.choice(list(WEIGHTS))
        request = GenerationRequest(
            id=f"{rate}-{number}",
            share=TenantShare(tenant=tenant, weight=WEIGHTS[tenant]),
            namespace=tenant,
            prompt_token_ids=prompt(model, rng),
            params=SamplingParams(max_tokens=64, temperature=0.8, seed=number),
        )
        asked.append(asyncio.create_task(ask(engine, request)))
        number += 1
        await asyncio.sleep(rng.expovariate(rate))
    report(rate, await asyncio.gather(*asked))


def report(rate: float, outcomes: list[Outcome]) -> None:
    known = [o for o in outcomes if o.estimate and not o.at_least]
    ratios = sorted(o.actual / o.estimate for o in known if o.estimate)
    waits = sorted(o.actual for o in outcomes)
    near = sum(0.8 <= one <= 1.25 for one in ratios) / len(ratios)

    def at(values: list[float], part: float) -> float:
        return values[min(len(values) - 1, int(part * len(values)))]

    print(
        f"{rate:5.2f} {len(outcomes):9} {len(ratios):9} {at(waits, 0.5):9.2f} {at(waits, 0.9):7.2f}"
        f" {at(ratios, 0.1):12.2f} {at(ratios, 0.5):6.2f} {at(ratios, 0.9):6.2f} {near:11.0%}",
        flush=True,
    )


async def main() -> None:
    seconds = float(sys.argv[1]) if len(sys.argv) > 1 else 90.0
    model = load_model(find_default_model())
    cache = CacheConfig(num_blocks=2000)
    config = EngineConfig(
        cache=cache, scheduler=SchedulerConfig(max_seqs=4, max_step_tokens=64, max_model_len=2048)
    )
    core = EngineCore(
        config,
        ModelRunner(model, cache),
        clock=time.monotonic,
        token_bytes=model.tokenizer.token_bytes,
        eos_token_ids=model.eos_token_ids,
    )
    engine = AsyncEngine(core)
    engine.start()
    print("req/s  requests  foreseen  TTFT p50     p90  actual/est. p10    p50    p90  within 25 %")
    for rate in RATES:
        await measure(model, engine, rate, seconds)
    await engine.stop()


if __name__ == "__main__":
    asyncio.run(main())
