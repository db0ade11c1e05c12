"""Parallel sampling and beam search on real weights; transformers' beam search is the oracle."""

import os
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from engine.config import CacheConfig, EngineConfig, SchedulerConfig
from engine.core import EngineCore
from engine.events import Event, GroupFinished, SequenceFinished, SequencePreempted, TokensGenerated
from engine.model.loader import LoadedModel, load_model
from engine.model.runner import ModelRunner
from engine.sequence import BeamSearch, SamplingParams, TenantShare
from tests.model_oracle import default_model, default_oracle, save_tiny_llama

TEXT = "The mill stands by the river. Every morning the miller opens the gate and"
WIDTH = 4


def make_core(model: LoadedModel, num_blocks: int = 256, **scheduler: object) -> EngineCore:
    cache = CacheConfig(num_blocks=num_blocks, num_host_blocks=num_blocks)
    settings = {"max_step_tokens": 64, "max_seqs": 8, "max_model_len": 512, **scheduler}
    config = EngineConfig(
        cache=cache,
        scheduler=SchedulerConfig(**settings),  # type: ignore[arg-type]
        check_invariants=True,
    )
    return EngineCore(
        config,
        ModelRunner(model, cache),
        clock=time.monotonic,
        token_bytes=model.tokenizer.token_bytes,
        eos_token_ids=model.eos_token_ids,
    )


def add(core: EngineCore, request_id: str, prompt: Sequence[int], params: SamplingParams) -> None:
    share = TenantShare(tenant="acme")
    core.add(request_id, tuple(prompt), params, share=share, namespace="acme")


def run(core: EngineCore) -> list[Event]:
    events: list[Event] = []
    while core.has_work:
        events += core.step()
    assert core.scheduler.pool.num_held == 0
    return events


def tokens_of(events: list[Event], request_id: str, index: int) -> list[int]:
    return [
        token
        for event in events
        if isinstance(event, TokensGenerated)
        and (event.request_id, event.index) == (request_id, index)
        for token in event.token_ids
    ]


def saving(events: list[Event]) -> float:
    """Share of the blocks that sharing saved, over the group's life."""
    (group,) = [event for event in events if isinstance(event, GroupFinished)]
    return 1 - group.block_steps / group.unshared_block_steps


def oracle_beams(
    oracle: PreTrainedModel, prompt: Sequence[int], eos: Sequence[int], **settings: object
) -> tuple[list[list[int]], list[float]]:
    """Hypotheses without padding, best first, and their scores."""
    ids = torch.tensor([list(prompt)])
    with torch.inference_mode():
        output = oracle.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            num_beams=WIDTH,
            num_return_sequences=WIDTH,
            do_sample=False,
            eos_token_id=list(eos),
            pad_token_id=0,
            return_dict_in_generate=True,
            output_scores=True,
            **settings,
        )
    found = []
    for row in output.sequences[:, len(prompt) :].tolist():
        end = min((row.index(token) + 1 for token in eos if token in row), default=len(row))
        found.append(row[:end])
    return found, output.sequences_scores.tolist()


def check_beams(
    model: LoadedModel,
    oracle: PreTrainedModel,
    prompt: Sequence[int],
    num_tokens: int,
    search: BeamSearch,
    eos: frozenset[int],
) -> list[SequenceFinished]:
    core = make_core(model)
    params = SamplingParams(
        max_tokens=num_tokens, beam=search, stop_token_ids=eos - model.eos_token_ids
    )
    add(core, "r", prompt, params)
    events = run(core)

    expected, scores = oracle_beams(
        oracle,
        prompt,
        sorted(eos),
        max_new_tokens=num_tokens,
        length_penalty=search.length_penalty,
        early_stopping=search.early_stopping,
    )
    assert [tokens_of(events, "r", i) for i in range(WIDTH)] == expected
    ends = sorted(
        (event for event in events if isinstance(event, SequenceFinished)), key=lambda e: e.index
    )
    assert [end.cumulative_logprob for end in ends] == pytest.approx(scores, abs=1e-4)
    for end, tokens in zip(ends, expected, strict=True):
        assert end.reason == ("stop" if tokens[-1] in eos else "length")
    return ends


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[LoadedModel, PreTrainedModel]:
    folder: Path = tmp_path_factory.mktemp("tiny")
    oracle = save_tiny_llama(folder)
    return load_model(folder, device="cpu", dtype="float32"), oracle


@pytest.mark.parametrize("length_penalty", [0.0, 1.0, 2.5])
@pytest.mark.parametrize("early_stopping", [False, True])
def test_beams_equal_transformers(
    tiny: tuple[LoadedModel, PreTrainedModel], length_penalty: float, early_stopping: bool
) -> None:
    """Several end tokens, some of them likely, so that hypotheses end early, late and never."""
    model, oracle = tiny
    search = BeamSearch(width=WIDTH, length_penalty=length_penalty, early_stopping=early_stopping)
    reasons = []
    for start in range(8):
        prompt = [(start * 37 + i * 11) % 250 for i in range(5 + 4 * start)]
        eos = model.eos_token_ids | {start, start + 60, start + 120, start + 180}
        reasons += [
            end.reason for end in check_beams(model, oracle, prompt, 24, search, frozenset(eos))
        ]
    assert {"stop", "length"} == set(reasons)


@pytest.mark.model
def test_beams_on_the_default_model_equal_transformers() -> None:
    model = default_model()
    prompt = model.tokenizer.encode(TEXT)
    new_tokens = 32 if os.environ.get("HEADRACE_FULL") == "1" else 12
    ends = check_beams(
        model, default_oracle(), prompt, new_tokens, BeamSearch(width=WIDTH), model.eos_token_ids
    )
    assert [end.usage.prompt_tokens for end in ends] == [len(prompt), 0, 0, 0]
    assert ends[0].usage.output_tokens == WIDTH * new_tokens


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
def test_preempted_beams_are_the_same(
    tiny: tuple[LoadedModel, PreTrainedModel], preemption: str
) -> None:
    model, _ = tiny
    prompts = [[(7 * i + j) % 250 for j in range(20)] for i in range(3)]
    params = SamplingParams(max_tokens=40, beam=BeamSearch(width=3), ignore_eos=True)

    def beams(num_blocks: int, at_once: int) -> tuple[list[list[int]], int]:
        core = make_core(model, num_blocks, max_seqs=at_once, watermark=0.0, preemption=preemption)
        for i, prompt in enumerate(prompts):
            add(core, str(i), prompt, params)
        events = run(core)
        swapped = [e.swapped for e in events if isinstance(e, SequencePreempted)]
        assert set(swapped) <= {preemption == "swap"}
        found = [tokens_of(events, str(i), j) for i in range(len(prompts)) for j in range(3)]
        return found, len(swapped)

    calm, none = beams(256, at_once=3)
    pressed, preemptions = beams(16, at_once=9)
    assert none == 0
    assert preemptions > 0
    assert pressed == calm


@pytest.mark.model
def test_parallel_samples_share_their_prompt_and_equal_lone_ones() -> None:
    """Each child draws what a request of its own with the child's seed draws."""
    model = default_model()
    prompt = model.tokenizer.encode(TEXT * 4)
    core = make_core(model)
    add(core, "r", prompt, SamplingParams(max_tokens=24, n=WIDTH, seed=5, ignore_eos=True))
    seeds = [seq.params.seed for seq in core._requests["r"]]
    events = run(core)
    children = [tokens_of(events, "r", i) for i in range(WIDTH)]

    alone = make_core(model)
    for i, seed in enumerate(seeds):
        add(alone, str(i), prompt, SamplingParams(max_tokens=24, seed=seed, ignore_eos=True))
    lone = run(alone)
    assert children == [tokens_of(lone, str(i), 0) for i in range(WIDTH)]
    assert len({tuple(child) for child in children}) == WIDTH
    # The prompt's full blocks are one for all; its end and the new tokens are each one's own.
    shared, own = len(prompt) // 16, -(-(len(prompt) + 24) // 16) - len(prompt) // 16
    least = 1 - (shared + WIDTH * own) / (WIDTH * (shared + own))
    assert shared >= 3
    assert saving(events) >= least
