"""The same tokens as transformers, whatever the batch, chunking, preemption, prefix hit or pools.

24 prompts of 1 to 400 tokens, greedy, float32, on the same GGUF file. HEADRACE_FULL=1
(make test-full) runs every cell of the matrix on all prompts with 64 new tokens, against
transformers' own generate. Otherwise all cells take the first eight prompts, those that decode one
sequence at a time stop after 8 tokens, and the oracle is transformers' choice after each prefix
of what was generated, which is the same thing in one forward pass per prompt.
"""

import itertools
import os
import random
import time
from collections import Counter
from dataclasses import dataclass, replace

import pytest
import torch

from engine.config import CacheConfig, EngineConfig, SchedulerConfig
from engine.core import EngineCore
from engine.events import (
    SequenceAdmitted,
    SequenceFinished,
    SequencePreempted,
    TokensGenerated,
)
from engine.model.loader import LoadedModel
from engine.model.runner import ModelRunner
from engine.sequence import SamplingParams, TenantShare
from tests.model_oracle import default_model, default_oracle, oracle_greedy

pytestmark = [pytest.mark.model, pytest.mark.timeout(900)]

NUM_PROMPTS, LONGEST = 24, 400
FULL = os.environ.get("HEADRACE_FULL") == "1"
NEW_TOKENS = 64 if FULL else 24
FEW_TOKENS = NEW_TOKENS if FULL else 8
FEW_PROMPTS = NUM_PROMPTS if FULL else 8
TEXT = (
    "The river falls eleven metres between the weir and the old mill. In spring, when the snow of "
    "the hills melts, its water turns the wheel day and night; in August it hardly moves. "
    "def headrace(flow, share):\n    return {name: flow * part for name, part in share.items()}\n"
    "Der Müller schläft, das Wasser nicht. 水は流れる。 1, 1, 2, 3, 5, 8, 13, 21, 34, 55, 89. "
    "Question: who decides whose grain is ground first? Answer: whoever has waited longest, "
    "weighed by what the village owes him. "
)


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    return default_model()


@pytest.fixture(scope="module")
def prompts(model: LoadedModel) -> list[tuple[int, ...]]:
    """24 prompts of 1 to 400 tokens; every third repeats the beginning of the one before."""
    ids = model.tokenizer.encode(TEXT * 8)
    rng = random.Random(7)
    lengths = [1, 2, 15, 16, 17, LONGEST] + [rng.randint(3, LONGEST) for _ in range(18)]
    made: list[tuple[int, ...]] = []
    for i, length in enumerate(lengths):
        start = rng.randrange(len(ids) - LONGEST)
        tokens = ids[start : start + length]
        if i % 3 == 2 and len(made[-1]) >= 16:
            tokens = [*made[-1][: length // 2], *tokens[length // 2 :]]
        made.append(tuple(tokens))
    assert len(made) == NUM_PROMPTS
    return made


@pytest.fixture(scope="module")
def expected(model: LoadedModel, prompts: list[tuple[int, ...]]) -> list[list[int]]:
    """What transformers generates greedily after each prompt."""
    oracle = default_oracle()
    if FULL:
        return [oracle_greedy(oracle, prompt, NEW_TOKENS) for prompt in prompts]
    some = prompts[:FEW_PROMPTS]
    answers = generate(model, some, max_step_tokens=64, at_once=8).tokens
    for prompt, answer in zip(some, answers, strict=True):
        with torch.inference_mode():
            ids = torch.tensor([[*prompt, *answer[:-1]]])
            logits = oracle(ids, logits_to_keep=NEW_TOKENS).logits[0]
        assert logits.argmax(-1).tolist() == answer
    return answers


@dataclass
class Result:
    tokens: list[list[int]]
    happened: Counter[str]


def generate(
    model: LoadedModel,
    prompts: list[tuple[int, ...]],
    *,
    max_step_tokens: int,
    at_once: int,
    num_blocks: int = 1024,
    prefix_cache: bool = False,
    new_tokens: int = NEW_TOKENS,
    rounds: int = 1,
    swap: bool = False,
    two_pools: bool = False,
) -> Result:
    """Run all prompts through scheduler, KV memory and model; at most `at_once` at a time."""
    cache = CacheConfig(
        num_blocks=num_blocks,
        enable_prefix_cache=prefix_cache,
        num_host_blocks=1024 if swap else 0,
    )
    prefill_cache = replace(cache, num_host_blocks=0) if two_pools else None
    prefill_runner = ModelRunner(model, prefill_cache) if prefill_cache else None
    config = EngineConfig(
        cache=cache,
        scheduler=SchedulerConfig(
            max_step_tokens=max_step_tokens,
            max_seqs=at_once,
            max_model_len=2048,
            watermark=0.0,
            preemption="swap" if swap else "recompute",
        ),
        prefill_cache=prefill_cache,
        check_invariants=True,
    )
    core = EngineCore(
        config,
        ModelRunner(model, cache, prefill=prefill_runner),
        prefill_runner=prefill_runner,
        clock=time.monotonic,
        token_bytes=model.tokenizer.token_bytes,
        eos_token_ids=model.eos_token_ids,
    )
    happened: Counter[str] = Counter()
    tokens: dict[str, list[int]] = {}
    for turn, (i, prompt) in itertools.product(range(rounds), enumerate(prompts)):
        tokens[f"{turn}-{i}"] = []
        core.add(
            f"{turn}-{i}",
            prompt,
            SamplingParams(max_tokens=new_tokens, temperature=0, ignore_eos=True),
            share=TenantShare(tenant=f"tenant{i % 2}"),
            namespace="shared",
        )
    while core.has_work:
        for event in core.step():
            match event:
                case TokensGenerated():
                    tokens[event.request_id] += event.token_ids
                case SequenceAdmitted(num_cached_tokens=hit):
                    happened["hits"] += hit > 0
                    happened["admissions"] += 1
                case SequencePreempted():
                    happened["preemptions"] += 1
                    happened["swaps"] += event.swapped
                case SequenceFinished():
                    assert event.reason == "length", event
                case _:
                    happened["steps"] += 1
                    happened["prefill_steps"] += event.num_prefill_tokens > 0
                    happened["mixed_steps"] += (
                        event.num_prefill_tokens > 0 and event.num_decode_tokens > 0
                    )
                    happened["received_blocks"] += event.num_received_blocks
    assert all(stage.scheduler.pool.num_held == 0 for stage in core.stages)
    return Result(list(tokens.values()), happened)


@pytest.mark.parametrize("max_step_tokens", [16, 64, 512] if FULL else [64])
def test_alone(
    model: LoadedModel,
    prompts: list[tuple[int, ...]],
    expected: list[list[int]],
    max_step_tokens: int,
) -> None:
    some = prompts[:FEW_PROMPTS]
    result = generate(
        model, some, max_step_tokens=max_step_tokens, at_once=1, new_tokens=FEW_TOKENS
    )

    assert result.tokens == [answer[:FEW_TOKENS] for answer in expected[:FEW_PROMPTS]]
    chunks = sum(-(-len(prompt) // max_step_tokens) for prompt in some)
    assert result.happened["prefill_steps"] == chunks
    assert (chunks > FEW_PROMPTS) == (max_step_tokens < LONGEST)  # prompts were split
    assert result.happened["mixed_steps"] == 0


@pytest.mark.parametrize("max_step_tokens", [16, 64, 512] if FULL else [16, 512])
def test_eight_at_a_time(
    model: LoadedModel,
    prompts: list[tuple[int, ...]],
    expected: list[list[int]],
    max_step_tokens: int,
) -> None:
    some = prompts[:FEW_PROMPTS]
    result = generate(model, some, max_step_tokens=max_step_tokens, at_once=8)

    assert result.tokens == expected[:FEW_PROMPTS]
    assert result.happened["mixed_steps"] > 0


@pytest.mark.parametrize("at_once", [1, 8])
@pytest.mark.parametrize("max_step_tokens", [16, 64, 512])
def test_with_prefix_hits(
    model: LoadedModel,
    prompts: list[tuple[int, ...]],
    expected: list[list[int]],
    max_step_tokens: int,
    at_once: int,
) -> None:
    """Everything twice: the second round finds the first one's blocks."""
    if not FULL and at_once == 1:
        pytest.skip("alone and with hits is in test_matrix.py too; HEADRACE_FULL=1 runs it here")
    some = prompts[:FEW_PROMPTS]
    result = generate(
        model,
        some,
        max_step_tokens=max_step_tokens,
        at_once=at_once,
        new_tokens=FEW_TOKENS,
        prefix_cache=True,
        rounds=2,
    )

    assert result.tokens == [answer[:FEW_TOKENS] for answer in expected[:FEW_PROMPTS]] * 2
    num_long = sum(len(prompt) > 16 for prompt in some)
    # Side by side, a prompt may start before its twin of the first round has published.
    assert result.happened["hits"] >= (num_long if at_once == 1 else num_long // 2)


SMALL_POOL = -(-(LONGEST + NEW_TOKENS) // 16) + 4  # holds the longest sequence and little more


@pytest.mark.parametrize("max_step_tokens", [16, 64, 512])
@pytest.mark.parametrize("prefix_cache", [False, True])
@pytest.mark.parametrize("swap", [False, True], ids=["recompute", "swap"])
def test_with_preemptions(
    model: LoadedModel,
    prompts: list[tuple[int, ...]],
    expected: list[list[int]],
    swap: bool,
    prefix_cache: bool,
    max_step_tokens: int,
) -> None:
    some_cells = {(16, True, False), (64, False, False), (64, True, True)}
    if not FULL and (max_step_tokens, prefix_cache, swap) not in some_cells:
        pytest.skip("three cells, with hits and without; HEADRACE_FULL=1 runs all")
    some = prompts[:FEW_PROMPTS]
    result = generate(
        model,
        some,
        max_step_tokens=max_step_tokens,
        at_once=8,
        num_blocks=SMALL_POOL,
        prefix_cache=prefix_cache,
        swap=swap,
    )

    assert result.tokens == expected[:FEW_PROMPTS]
    happened = result.happened
    assert happened["preemptions"] > 0
    assert happened["swaps"] == (happened["preemptions"] if swap else 0)
    assert happened["admissions"] == len(some) + happened["preemptions"]
    assert (happened["hits"] > 0) == (prefix_cache or swap)  # what comes back is not cold


@pytest.mark.parametrize("max_step_tokens", [16, 64, 512])
@pytest.mark.parametrize("swap", [False, True], ids=["recompute", "swap"])
def test_with_two_pools(
    model: LoadedModel,
    prompts: list[tuple[int, ...]],
    expected: list[list[int]],
    swap: bool,
    max_step_tokens: int,
) -> None:
    """Prompts are computed in one pool and handed over to another, which is small as well."""
    if not FULL and (max_step_tokens, swap) != (64, False):
        pytest.skip("one cell; HEADRACE_FULL=1 runs all")
    some = prompts[:FEW_PROMPTS]
    result = generate(
        model,
        some,
        max_step_tokens=max_step_tokens,
        at_once=8,
        num_blocks=SMALL_POOL,
        swap=swap,
        two_pools=True,
    )

    assert result.tokens == expected[:FEW_PROMPTS]
    assert result.happened["received_blocks"] >= sum(-(-len(prompt) // 16) for prompt in some)
    assert result.happened["mixed_steps"] == 0
    if FULL:
        assert result.happened["preemptions"] > 0
        assert result.happened["swaps"] == (result.happened["preemptions"] if swap else 0)
