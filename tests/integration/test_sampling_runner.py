"""The runner's part of sampling: forks, logprobs of tokens and prompts, and who fails alone."""

import random
from collections.abc import Sequence
from itertools import count
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from engine.config import CacheConfig
from engine.events import TokenLogprobs
from engine.model.loader import LoadedModel, load_model
from engine.model.runner import ModelRunner
from engine.model.structured import GrammarCompiler
from engine.model.transformer import Transformer
from engine.plan import ScheduledChunk, StepOutput, StepPlan
from engine.sequence import Grammar, SamplingParams, child_seed
from engine.sequence import Sequence as EngineSequence
from tests.model_oracle import (
    BLOCK_SIZE,
    advance,
    generate,
    next_chunk,
    oracle_logits,
    save_tiny_llama,
    sequence,
)

CACHE = CacheConfig(num_blocks=160, block_size=BLOCK_SIZE)
VOCAB = 258


@pytest.fixture(scope="module")
def tiny(
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[LoadedModel, LlamaForCausalLM]:
    folder = tmp_path_factory.mktemp("tiny")
    # A flatter distribution than the oracle's default: so that parameters matter.
    oracle = save_tiny_llama(folder, initializer_range=0.12)
    return load_model(folder, device="cpu"), oracle


@pytest.fixture
def runner(tiny: tuple[LoadedModel, LlamaForCausalLM]) -> ModelRunner:
    return ModelRunner(tiny[0], CACHE)


def prompt_of(num_tokens: int, seed: int = 5) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(256) for _ in range(num_tokens)]


def params(num_tokens: int = 20, **changes: Any) -> SamplingParams:
    return SamplingParams(max_tokens=num_tokens, **{"seed": 9, **changes})


def run(runner: ModelRunner, *chunks: ScheduledChunk) -> StepOutput:
    return runner.execute(StepPlan(0, chunks))


def scored(
    runner: ModelRunner, seqs: Sequence[EngineSequence], chunk_tokens: int
) -> dict[str, Any]:
    """Prompt logprobs of each, its prompt computed in chunks of this size."""
    found: dict[str, tuple[TokenLogprobs, ...]] = {seq.id: () for seq in seqs}
    while running := [seq for seq in seqs if seq.num_uncomputed_tokens]:
        chunks = [next_chunk(seq, chunk_tokens)._replace(draws=()) for seq in running]
        output = run(runner, *chunks)
        assert output.errors == output.token_ids == {}
        for seq in running:
            found[seq.id] += output.prompt_logprobs.get(seq.id, ())
            advance(seq, chunk_tokens, None)
    return found


def expected_logprobs(row: torch.Tensor, token_id: int, num_top: int) -> TokenLogprobs:
    best, ids = row.topk(num_top)
    top = zip(ids.tolist(), best.tolist(), strict=True)
    return TokenLogprobs(token_id, row[token_id].item(), tuple(top))


def assert_close(found: TokenLogprobs, expected: TokenLogprobs) -> None:
    assert found.token_id == expected.token_id
    assert found.logprob == pytest.approx(expected.logprob, abs=1e-4)
    assert [i for i, _ in found.top] == [i for i, _ in expected.top]
    assert [x for _, x in found.top] == pytest.approx([x for _, x in expected.top], abs=1e-4)


# ---------------------------------------------------------------------- parameters matter

SETS: list[dict[str, Any]] = [
    {},
    {"temperature": 0},
    {"temperature": 0.8},
    {"top_k": 3},
    {"top_p": 0.6},
    {"min_p": 0.3},
    {"top_k": 3, "presence_penalty": 1.0},
    {"top_k": 3, "frequency_penalty": 1.0},
    {"top_k": 3, "repetition_penalty": 1.5},
    {"logit_bias": tuple((i, 5.0) for i in range(60, 90))},
    {"seed": 10},
    {"temperature": 0, "repetition_penalty": 3.0},
    {"temperature": 0, "frequency_penalty": 0.1},
]


def test_every_set_of_parameters_gives_other_tokens(runner: ModelRunner) -> None:
    prompts = [prompt_of(20)] * len(SETS)

    together = generate(runner, prompts, [params(40, **changes) for changes in SETS])

    assert len({tuple(tokens) for tokens in together}) == len(SETS)


def test_bad_words_and_min_tokens_change_what_would_come(runner: ModelRunner) -> None:
    (plain,) = generate(runner, [prompt_of(20)], [params()])
    assert len(set(plain[:5])) == 5

    (barred,) = generate(runner, [prompt_of(20)], [params(bad_words=(tuple(plain[3:5]),))])
    (later,) = generate(
        runner,
        [prompt_of(20)],
        [params(stop_token_ids=frozenset({plain[2]}), min_tokens=4)],
    )

    assert barred[:4] == plain[:4]
    assert barred[4] != plain[4]
    assert later[:2] == plain[:2]
    assert plain[2] not in later[:4]


@pytest.mark.parametrize("changes", SETS[6:9])
def test_penalties_survive_recomputation_at_every_step(
    runner: ModelRunner, changes: dict[str, Any]
) -> None:
    made = params(30, logprobs=3, **changes)
    (expected,) = generate(runner, [prompt_of(20)], [made])
    seq = sequence("s", prompt_of(20), made, count(100))
    logprobs = []

    while seq.num_output_tokens < 30:
        seq.num_computed_tokens = 0
        seq.token_ids = list(seq.token_ids)
        chunk = next_chunk(seq, 10_000)
        assert chunk.num_tokens == seq.num_tokens
        output = run(runner, chunk)
        logprobs.append(output.logprobs["s"])
        advance(seq, 10_000, output.token_ids["s"])

    assert seq.token_ids[20:] == expected
    assert [found.token_id for found in logprobs] == expected


def test_a_grammar_masks_its_own_row_and_bad_words_count_too(
    tiny: tuple[LoadedModel, LlamaForCausalLM], runner: ModelRunner
) -> None:
    model, _ = tiny
    a, b = model.tokenizer.encode("ab")
    compiler = GrammarCompiler(model.tokenizer, model.config.vocab_size)
    wanted: list[tuple[str, dict[str, Any]]] = [
        ("free", {"logprobs": 0}),
        ("masked", {"logprobs": 0}),
        ("forced", {"logprobs": 0, "bad_words": ((a,),), "temperature": 0}),
        ("none", {"logprobs": 0, "bad_words": ((a,), (b,))}),
    ]
    seqs = [
        sequence(name, prompt_of(12), params(1, **changes), count(4 * i))
        for i, (name, changes) in enumerate(wanted)
    ]
    for seq in seqs[1:]:
        seq.constraint = compiler.compile(Grammar("regex", "[ab]{5}"))

    output = run(runner, *(ScheduledChunk(seq, 0, 12, (seq,)) for seq in seqs))

    assert output.token_ids["masked"] in (a, b)
    assert output.token_ids["forced"] == b
    assert output.token_ids["free"] not in (a, b)
    assert set(output.refusals) == {"none"}
    # Under the model itself, not under the grammar.
    assert output.logprobs["forced"].logprob < -1


# --------------------------------------------------------------------------------- forks


def test_a_fork_draws_for_each_child_what_it_would_draw_alone(runner: ModelRunner) -> None:
    prompt = prompt_of(21)
    made = [params(1, seed=child_seed(3, i), logprobs=2, presence_penalty=1.0) for i in range(6)]
    alone = generate(runner, [prompt] * 6, made)
    children = [sequence(f"c{i}", prompt, p, count(50)) for i, p in enumerate(made)]
    mate = sequence("mate", prompt_of(9, seed=6), params(1), count(100))
    (mates_own,) = generate(runner, [mate.token_ids], [mate.params], first_block=120)

    output = run(
        runner,
        ScheduledChunk(mate, 0, 9, (mate,)),
        ScheduledChunk(children[0], 0, 21, tuple(children)),
    )

    assert [output.token_ids[f"c{i}"] for i in range(6)] == [tokens[0] for tokens in alone]
    assert len({tokens[0] for tokens in alone}) > 3
    assert output.token_ids["mate"] == mates_own[0]
    assert {output.logprobs[f"c{i}"].top for i in range(6)} == {output.logprobs["c0"].top}
    assert [output.logprobs[f"c{i}"].token_id for i in range(6)] == [t[0] for t in alone]


# ------------------------------------------------------------------------------- logprobs


def test_logprobs_are_the_models_own_whatever_the_parameters(
    tiny: tuple[LoadedModel, LlamaForCausalLM], runner: ModelRunner
) -> None:
    prompt = prompt_of(20)
    sets = [{**changes, "logprobs": i} for i, changes in enumerate(SETS)]
    seqs = [sequence(str(i), prompt, params(1, **p), count(4 * i)) for i, p in enumerate(sets)]
    silent = sequence("silent", prompt, params(1), count(4 * len(sets)))
    row = oracle_logits(tiny[1], prompt)[-1].log_softmax(-1)

    output = run(runner, *(ScheduledChunk(seq, 0, 20, (seq,)) for seq in [*seqs, silent]))

    assert set(output.logprobs) == {seq.id for seq in seqs}
    for i, seq in enumerate(seqs):
        expected = expected_logprobs(row, output.token_ids[seq.id], i)
        assert_close(output.logprobs[seq.id], expected)
    assert len({found.token_id for found in output.logprobs.values()}) > 3


@pytest.fixture
def head_rows(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many rows the head got each time."""
    rows: list[int] = []
    logits = Transformer.logits

    def recorded(self: Transformer, hidden: torch.Tensor) -> torch.Tensor:
        rows.append(len(hidden))
        return logits(self, hidden)

    monkeypatch.setattr(Transformer, "logits", recorded)
    return rows


def test_prompt_logprobs_are_the_same_in_one_piece_in_chunks_and_beside_others(
    tiny: tuple[LoadedModel, LlamaForCausalLM], runner: ModelRunner, head_rows: list[int]
) -> None:
    prompt = prompt_of(150)
    wanted = params(0, prompt_logprobs=3)

    def alone() -> list[EngineSequence]:
        return [sequence("s", prompt, wanted, count())]

    whole = scored(runner, alone(), 10_000)["s"]
    largest = max(head_rows)
    mates = [
        sequence("other", prompt_of(70, seed=8), params(0, prompt_logprobs=20), count(40)),
        sequence("silent", prompt_of(90, seed=9), params(0), count(80)),
        sequence("short", [7], params(0, prompt_logprobs=1), count(120)),
    ]
    beside = scored(runner, [mates[0], *alone(), *mates[1:]], 40)

    assert beside["s"] == scored(runner, alone(), 40)["s"]
    for chunk_tokens in (1, 16, 40, 64, 149):
        # Attention adds up in another order where the chunk is another.
        for found, expected in zip(scored(runner, alone(), chunk_tokens)["s"], whole, strict=True):
            assert_close(found, expected)
    assert (len(beside["other"]), beside["silent"], beside["short"]) == (69, (), ())
    assert largest == 64
    rows = oracle_logits(tiny[1], prompt)[:-1].log_softmax(-1)
    for token_id, row, found in zip(prompt[1:], rows, whole, strict=True):
        assert_close(found, expected_logprobs(row, token_id, 3))


def test_prompt_logprobs_end_where_the_prompt_does(runner: ModelRunner) -> None:
    """Also where prompt and output are computed again in one chunk."""
    seq = sequence("s", prompt_of(30), params(5, prompt_logprobs=0, logprobs=0), count())
    first = run(runner, ScheduledChunk(seq, 0, 30, (seq,)))
    seq.token_ids.append(first.token_ids["s"])

    again = run(runner, ScheduledChunk(seq, 0, 31, (seq,)))
    last = run(runner, ScheduledChunk(seq, 29, 2, (seq,)))
    middle = run(runner, ScheduledChunk(seq, 27, 4, (seq,)))

    assert len(first.prompt_logprobs["s"]) == 29
    assert again.prompt_logprobs == first.prompt_logprobs
    assert last.prompt_logprobs == {}
    assert middle.prompt_logprobs["s"] == first.prompt_logprobs["s"][27:]
    assert again.token_ids == last.token_ids == middle.token_ids


# ---------------------------------------------------------------------------- who fails alone


def test_a_sequence_that_nothing_is_left_to_fails_alone(runner: ModelRunner) -> None:
    nothing = tuple((i, float("-inf")) for i in range(VOCAB))
    seqs = [
        sequence("none", prompt_of(9), params(1, logit_bias=nothing, logprobs=2), count()),
        sequence("good", prompt_of(9), params(1, logprobs=2), count(10)),
    ]
    expected = generate(runner, [prompt_of(9)], [params(1)], first_block=20)[0][0]

    output = run(runner, *(ScheduledChunk(seq, 0, 9, (seq,)) for seq in seqs))

    assert output.token_ids == {"good": expected}
    assert set(output.logprobs) == {"good"}
    assert list(output.refusals) == ["none"]
    assert output.refusals["none"].startswith("no token is allowed")


def test_broken_logits_yield_no_logprobs_but_an_error(runner: ModelRunner) -> None:
    wanted = params(5, prompt_logprobs=2, logprobs=2, repetition_penalty=2.0, top_p=0.5)
    seqs = [
        sequence(name, prompt_of(30), wanted, count(b)) for name, b in (("good", 0), ("bad", 9))
    ]
    healthy = run(runner, *(ScheduledChunk(seq, 0, 16) for seq in seqs))
    runner.cache.layers[0][seqs[1].block_table[0]] = float("nan")

    output = run(runner, *(ScheduledChunk(seq, 16, 14, (seq,)) for seq in seqs))

    assert set(healthy.prompt_logprobs) == {"good", "bad"}
    assert set(output.token_ids) == set(output.logprobs) == set(output.prompt_logprobs) == {"good"}
    assert output.errors == {"bad": "the model's logits are not finite"}
