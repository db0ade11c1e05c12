"""Random histories at the smallest legal pool, where every block that is free is full of NaN.

Whatever reads KV that is not a sequence's own gets NaN into its logits, which ends the sequence
with an error. Tokens and logprobs are those of a run with all the room that there is.
"""

import random
from collections import Counter
from dataclasses import replace
from typing import Any

from engine.core import EngineCore
from engine.errors import NeverFitsError
from engine.model.runner import ModelRunner
from engine.plan import StepOutput, StepPlan
from engine.sequence import BeamSearch, SamplingParams
from tests.tiny import Request, Session, assert_same_answers, free_blocks, make_core, tiny_model

NUM_HISTORIES, NUM_REQUESTS = 24, 12
NAN = float("nan")


class PoisoningRunner:
    """Fills what is free with NaN, in every pool, before each step runs."""

    def __init__(self, core: EngineCore, runner: ModelRunner) -> None:
        self._core = core
        self._runner = runner
        self.cache = runner.cache
        self.num_poisoned = 0

    def execute(self, plan: StepPlan) -> StepOutput:
        # What a copy on write reads may be nobody's by now: copies run before anything is written.
        still_read = {source for source, _ in plan.copies.copied}
        for stage in self._core.stages:
            cache, memory = stage.runner.cache, stage.scheduler.memory  # type: ignore[attr-defined]
            free = [
                block
                for block in free_blocks(stage.scheduler)
                if stage.runner is not self or block not in still_read
            ]
            for layer in cache.layers:
                layer[free] = NAN
            for layer in cache.host_layers:
                layer[memory.host._free] = NAN
            self.num_poisoned += len(free)
        return self._runner.execute(plan)


def poison(core: EngineCore) -> list[PoisoningRunner]:
    runners = [PoisoningRunner(core, stage.runner) for stage in core.stages]  # type: ignore[arg-type]
    core.stages = tuple(
        replace(stage, runner=runner) for stage, runner in zip(core.stages, runners, strict=True)
    )
    return runners


def random_requests(rng: random.Random, *, with_beams: bool) -> dict[str, Request]:
    """Beams make the smallest legal pool three times as large."""
    beginnings = [tuple(rng.randrange(256) for _ in range(40)) for _ in range(2)]
    requests = {}
    for i in range(NUM_REQUESTS):
        begun = rng.choice(beginnings)[: rng.choice((0, 20, 40))]
        tail = tuple(rng.randrange(256) for _ in range(rng.randint(1, 12)))
        kinds: list[dict[str, Any]] = [
            {"temperature": 0.0},
            {"temperature": 1.0, "repetition_penalty": 1.2},
            {"temperature": 1.0, "n": rng.randint(2, 4)},
            {"prompt_logprobs": 1},
        ]
        if with_beams:
            kinds.append({"beam": BeamSearch(width=rng.randint(2, 3))})
        kind = rng.choice(kinds)
        params = SamplingParams(max_tokens=rng.randint(8, 48), seed=i, logprobs=1, **kind)
        requests[f"r{i}"] = Request((*begun, *tail), params, tenant=rng.choice("ab"))
    return requests


def smallest_pool(requests: dict[str, Request], **settings: Any) -> Session:
    """A core with one block less would refuse one of the requests."""
    for num_blocks in range(1, 100):
        if "prefill_blocks" in settings:
            settings["prefill_blocks"] = num_blocks
        session = Session(make_core(tiny_model()[0], num_blocks=num_blocks, **settings))
        try:
            for request_id, request in requests.items():
                session.add(request_id, request)
                session.abort(request_id)
        except NeverFitsError:
            continue
        return Session(session.core)
    raise AssertionError("no pool is large enough")


def play(session: Session, requests: dict[str, Request], rng: random.Random) -> set[str]:
    """Let all arrive, and some leave, at random; who left."""
    waiting, gone = list(requests), set()
    while waiting or session.core.has_work:
        if waiting and rng.random() < 0.4:
            request_id = waiting.pop()
            session.add(request_id, requests[request_id])
        if session.requests and rng.random() < 0.03:
            request_id = rng.choice(list(session.requests))
            if session.answers[request_id, 0].end is None:
                session.abort(request_id)
                gone.add(request_id)
        session.step()
    session.run()
    return gone


def test_random_histories_on_poisoned_blocks() -> None:
    happened: Counter[str] = Counter()
    for seed in range(NUM_HISTORIES):
        rng = random.Random(seed)
        requests = random_requests(rng, with_beams=seed % 3 == 0)
        expected = Session(make_core(tiny_model()[0]))
        for request_id, request in requests.items():
            expected.add(request_id, request)
        expected.run()
        session = smallest_pool(
            requests,
            preemption=("swap", "recompute")[seed % 2],
            num_host_blocks=(12, 80)[seed // 8 % 2],
            prefix_cache=seed // 4 % 2 == 0,
            max_step_tokens=rng.choice((16, 50, 512)),
            **({"prefill_blocks": 1} if seed // 2 % 2 else {}),
        )
        runners = poison(session.core)

        gone = play(session, requests, rng)

        for request_id in requests:
            if request_id not in gone:
                assert_same_answers(session, expected, request_id)
                continue
            for index in range(requests[request_id].params.num_sequences):
                found = session.answers[request_id, index].tokens
                assert found == expected.answers[request_id, index].tokens[: len(found)]
        happened += session.happened
        happened["aborted"] += len(gone)
        happened["poisoned"] += sum(runner.num_poisoned for runner in runners)

    for event, least in {
        **{"swapped": 50, "recomputed": 50, "preempted_children": 30, "swapped_in_blocks": 50},
        **{"received_blocks": 100, "copied_blocks": 100, "shared": 40, "cached_tokens": 200},
        **{"aborted": 40, "poisoned": 5_000},
    }.items():
        assert happened[event] >= least, (event, happened)
