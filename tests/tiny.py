"""The whole core on real tensors: made, driven, and all that it reported put in order."""

import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path

import pytest
from transformers import LlamaForCausalLM

from engine.config import CacheConfig, EngineConfig, SchedulerConfig
from engine.core import EngineCore
from engine.events import (
    Event,
    GroupFinished,
    PromptScored,
    SequenceAdmitted,
    SequenceFinished,
    SequencePreempted,
    StepFinished,
    TokenLogprobs,
    TokensGenerated,
)
from engine.model.loader import LoadedModel, load_model
from engine.model.runner import ModelRunner
from engine.scheduling.scheduler import Scheduler
from engine.sequence import SamplingParams, TenantShare
from engine.sequence import Sequence as EngineSequence
from engine.simulated_runner import VirtualClock
from tests.model_oracle import save_tiny_llama

Key = tuple[str, int]
"""A request's id and the index of one of its sequences."""

STEP_SECONDS = 0.01  # of virtual time


@cache
def tiny_model() -> tuple[LoadedModel, LlamaForCausalLM]:
    """A random llama in float32, and transformers' model of the same weights."""
    with tempfile.TemporaryDirectory() as folder:
        # Less wild than the default: rounding moves its logprobs by a few millionths.
        oracle = save_tiny_llama(Path(folder), num_hidden_layers=2, initializer_range=0.15)
        return load_model(Path(folder), device="cpu", dtype="float32"), oracle


@dataclass(frozen=True)
class Request:
    prompt: tuple[int, ...]
    params: SamplingParams
    tenant: str = "a"


def make_core(
    model: LoadedModel,
    *,
    num_blocks: int = 512,
    prefill_blocks: int | None = None,
    num_host_blocks: int = 0,
    prefix_cache: bool = False,
    public_prompts: tuple[tuple[int, ...], ...] = (),
    **scheduler: object,
) -> EngineCore:
    """A core on the model, every invariant checked at each step; its time is virtual, so that a
    run repeats exactly.

    With `prefill_blocks`, prompts have a pool of that size to themselves.
    """
    whole = CacheConfig(
        num_blocks=num_blocks,
        enable_prefix_cache=prefix_cache,
        num_host_blocks=num_host_blocks,
        public_prompts=public_prompts,
    )
    prefill_cache, prefill = None, None
    if prefill_blocks is not None:
        prefill_cache = replace(whole, num_blocks=prefill_blocks, num_host_blocks=0)
        prefill = ModelRunner(model, prefill_cache)
    settings = {"max_seqs": 16, "max_model_len": 512, "watermark": 0.0, **scheduler}
    config = EngineConfig(
        cache=whole,
        scheduler=SchedulerConfig(**settings),  # type: ignore[arg-type]
        prefill_cache=prefill_cache,
        check_invariants=True,
    )
    return EngineCore(
        config,
        ModelRunner(model, whole, prefill=prefill),
        prefill_runner=prefill,
        clock=VirtualClock(),
        token_bytes=model.tokenizer.token_bytes,
        eos_token_ids=model.eos_token_ids,
    )


@dataclass
class Answer:
    """What one sequence was told."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    text: str = ""
    end: SequenceFinished | None = None


class Session:
    """A core with what was asked of it, what it answered, and a count of what happened."""

    def __init__(self, core: EngineCore) -> None:
        self.core = core
        self.requests: dict[str, Request] = {}
        self.answers: dict[Key, Answer] = defaultdict(Answer)
        self.scored: dict[str, tuple[TokenLogprobs, ...]] = {}
        self.happened: Counter[str] = Counter()

    def add(self, request_id: str, request: Request) -> None:
        self.core.add(
            request_id,
            request.prompt,
            request.params,
            share=TenantShare(tenant=request.tenant),
            namespace=request.tenant,
        )
        self.requests[request_id] = request

    def abort(self, request_id: str) -> None:
        self._take(self.core.abort(request_id))

    def step(self) -> None:
        self.core._clock.now += STEP_SECONDS  # type: ignore[attr-defined]
        self._take(self.core.step())

    def run(self, max_steps: int = 10_000) -> None:
        """Step until nothing is left; everything has been given back then."""
        for _ in range(max_steps):
            if not self.core.has_work:
                break
            self.step()
        assert not self.core.has_work, "it never ended"
        for stage in self.core.stages:
            memory = stage.scheduler.memory
            assert memory.pool.num_held == 0
            assert memory.host.num_free == memory.host.num_blocks
        for request_id, request in self.requests.items():
            for index in range(request.params.num_sequences):
                assert self.answers[request_id, index].end is not None

    def force_preemptions(self) -> None:
        """Preempt whatever runs and decodes, as a full pool would."""
        scheduler = self.core.stages[-1].scheduler
        for seq in list(scheduler.running.values()):
            if seq.id in scheduler.running:
                scheduler._preempt(seq, self.core._clock())
                self.happened["forced"] += 1

    @property
    def _running(self) -> list[EngineSequence]:
        return [s for stage in self.core.stages for s in stage.scheduler.running.values()]

    def _take(self, events: Iterable[Event]) -> None:
        happened = self.happened
        for event in events:
            match event:
                case TokensGenerated():
                    answer = self.answers[event.request_id, event.index]
                    answer.tokens += event.token_ids
                    answer.logprobs += event.logprobs
                    answer.text += event.text
                case SequenceFinished():
                    answer = self.answers[event.request_id, event.index]
                    assert answer.end is None, "ended twice"
                    assert event.error is None, event.error
                    answer.end = event
                    answer.text += event.text
                    happened["recomputed_tokens"] += event.usage.recomputed_tokens
                    happened["cached_tokens"] += event.usage.cached_tokens
                case PromptScored():
                    assert event.request_id not in self.scored
                    self.scored[event.request_id] = event.logprobs
                case SequencePreempted():
                    happened["swapped" if event.swapped else "recomputed"] += 1
                    happened["preempted_children"] += event.index > 0
                case SequenceAdmitted():
                    happened["admissions"] += 1
                case GroupFinished():
                    happened["groups"] += 1
                    happened["shared"] += event.block_steps < event.unshared_block_steps
                case StepFinished():
                    happened["steps"] += 1
                    running = sum(seq.num_slots for seq in self._running)
                    happened["most_running"] = max(happened["most_running"], running)
                    happened["prefill_steps"] += event.num_prefill_tokens > 0
                    happened["mixed_steps"] += (
                        event.num_prefill_tokens > 0 and event.num_decode_tokens > 0
                    )
                    happened["copied_blocks"] += event.num_copied_blocks
                    happened["swapped_out_blocks"] += event.num_swapped_out_blocks
                    happened["swapped_in_blocks"] += event.num_swapped_in_blocks
                    happened["received_blocks"] += event.num_received_blocks


def assert_same_logprobs(
    found: Sequence[TokenLogprobs], expected: Sequence[TokenLogprobs], tolerance: float = 1e-5
) -> None:
    """The same tokens, and logprobs that differ by rounding at most."""
    assert [one.token_id for one in found] == [one.token_id for one in expected]
    assert [len(one.top) for one in found] == [len(one.top) for one in expected]
    assert _values(found) == pytest.approx(_values(expected), abs=tolerance, rel=0)


def _values(logprobs: Sequence[TokenLogprobs]) -> list[float]:
    """The likeliest tokens by their places: two of almost equal logprobs may change them."""
    return [value for one in logprobs for value in (one.logprob, *(v for _, v in one.top))]


def assert_same_answers(
    found: Session, expected: Session, request_id: str, tolerance: float = 1e-5
) -> None:
    """All that the client of a request sees, apart from when it sees it."""
    for index in range(expected.requests[request_id].params.num_sequences):
        one, other = found.answers[request_id, index], expected.answers[request_id, index]
        assert one.end is not None
        assert other.end is not None
        assert one.tokens == other.tokens, f"{request_id}/{index}"
        assert (one.text, one.end.reason) == (other.text, other.end.reason)
        assert_same_logprobs(one.logprobs, other.logprobs, tolerance)
        total = pytest.approx(other.end.cumulative_logprob, abs=len(one.tokens) * tolerance, rel=0)
        assert one.end.cumulative_logprob == total
    assert_same_logprobs(
        found.scored.get(request_id, ()), expected.scored.get(request_id, ()), tolerance
    )


def free_blocks(scheduler: Scheduler) -> list[int]:
    """Blocks of the pool that nobody holds and nobody can find."""
    return [b.id for b in scheduler.pool.blocks if not b.ref_count and b.key is None]
