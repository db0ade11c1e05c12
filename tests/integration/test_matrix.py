"""The same answers whatever happens on the way: the matrix of which the engine's exactness is made.

    {alone, a batch of 16} x {chunks of 16, 64, 512} x {no preemption, recompute, swap}
    x {prefix hits or none} x {one pool, two} x twelve sets of sampling parameters

Each cell runs all sets, as requests for 16 sequences in all, and its tokens, texts, ends and
logprobs are those of the plainest way: each request alone, its prompt in one chunk, nothing
cached, nothing preempted, one pool. Greedy rows equal transformers'. Each cell proves that what
it is named after did happen. A tiny model goes through a third of the cells, the default model
through two; with HEADRACE_FULL=1 both go through all.
"""

import itertools
import os
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import pytest
from transformers import LlamaForCausalLM

from engine.model.loader import LoadedModel
from engine.sequence import BeamSearch, SamplingParams
from tests.model_oracle import default_model, default_oracle, oracle_greedy
from tests.tiny import Request, Session, assert_same_answers, make_core, tiny_model

FULL = os.environ.get("HEADRACE_FULL") == "1"
NAMES = (
    *("greedy", "drawn", "top_k", "top_p", "min_p", "penalties"),
    *("bias", "barred", "stop", "n", "beams", "scored"),
)
NEW_TOKENS = 24
SHARED = 40  # tokens with which all prompts begin: two and a half blocks
LENGTHS = (45, 150, 64, 100, 41, 80, 97, 113, 48, 129, 42, 58)
NUM_SEQUENCES = 16
TEXT = (
    "The river falls eleven metres between the weir and the old mill. In spring, when the snow of "
    "the hills melts, its water turns the wheel day and night; in August it hardly moves. "
    "Question: who decides whose grain is ground first? Answer: whoever has waited longest, "
    "weighed by what the village owes him. 1, 1, 2, 3, 5, 8, 13, 21, 34, 55, 89. "
)
FORCED_AT = (3, 12, 30)  # steps of a request that runs alone: while it prefills, while it decodes


@dataclass(frozen=True)
class Cell:
    together: bool
    chunk: int
    preemption: str
    hits: bool
    two_pools: bool

    def __str__(self) -> str:
        return "-".join(
            (
                "batch" if self.together else "alone",
                str(self.chunk),
                self.preemption,
                "hits" if self.hits else "cold",
                "two_pools" if self.two_pools else "one_pool",
            )
        )


CHOICES = (
    (False, True),
    (16, 64, 512),
    ("never", "recompute", "swap"),
    (False, True),
    (False, True),
)
CELLS = [Cell(*choice) for choice in itertools.product(*CHOICES)]
# A third of them, in which every two choices meet.
THIRD = [
    Cell(*(choice[i] for choice, i in zip(CHOICES, levels, strict=True)))
    for levels in itertools.product(*(range(len(choice)) for choice in CHOICES))
    if sum(levels) % 3 == 0
]
SOME_CELLS = [  # for the default model, of which test_same_tokens.py has more
    Cell(together=True, chunk=64, preemption="swap", hits=True, two_pools=False),
    Cell(together=True, chunk=512, preemption="never", hits=False, two_pools=True),
]
PLAIN = Cell(together=False, chunk=512, preemption="never", hits=False, two_pools=False)


def test_a_third_of_the_cells_meets_every_two_choices() -> None:
    for one, other in itertools.combinations(range(len(CHOICES)), 2):
        met = {(tuple(vars(c).values())[one], tuple(vars(c).values())[other]) for c in THIRD}
        assert met == set(itertools.product(CHOICES[one], CHOICES[other]))
    assert len(THIRD) == len(CELLS) / 3


def run(model: LoadedModel, requests: Mapping[str, Request], cell: Cell) -> Session:
    """All requests through one core, in the way of the cell."""
    is_pressed = cell.together and cell.preemption != "never"
    core = make_core(
        model,
        num_blocks=small_pool(requests) if is_pressed else 256,
        prefill_blocks=64 if cell.two_pools else None,
        num_host_blocks=256 if cell.preemption == "swap" else 0,
        prefix_cache=cell.hits,
        max_step_tokens=cell.chunk,
        preemption="swap" if cell.preemption == "swap" else "recompute",
    )
    session = Session(core)
    if cell.hits:
        first = next(iter(requests.values())).prompt
        session.add("warm", Request(first[:SHARED], SamplingParams(max_tokens=1)))
        session.run()
    for request_id, request in requests.items():
        session.add(request_id, request)
        if not cell.together:
            run_alone(session, forced=cell.preemption != "never")
    session.run()
    return session


def small_pool(requests: Mapping[str, Request]) -> int:
    """Blocks for the longest sequence, or for beams that share nothing, and one more."""
    return 1 + max(
        -(-(len(request.prompt) + request.params.max_tokens) // 16)
        * (request.params.num_sequences if request.params.beam else 1)
        for request in requests.values()
    )


def run_alone(session: Session, *, forced: bool) -> None:
    for step in itertools.count(1):
        if not session.core.has_work:
            return
        if forced and step in FORCED_AT:
            session.force_preemptions()
        session.step()


def check(session: Session, expected: Session, cell: Cell, tolerance: float = 1e-5) -> None:
    """The cell's answers are the expected ones, and it was what its name says."""
    for request_id in expected.requests:
        assert_same_answers(session, expected, request_id, tolerance)
    happened, num_requests = session.happened, len(expected.requests)
    is_pressed = cell.together and cell.preemption != "never"
    num_prefills = num_requests + cell.hits  # and the one that came before
    if cell.together:
        # In small chunks, or from one pool to the other, they arrive where others have left.
        assert happened["most_running"] > 3
        if cell.chunk == 512 and not cell.two_pools and not is_pressed:
            assert happened["most_running"] == NUM_SEQUENCES
        if cell.two_pools:
            assert happened["mixed_steps"] == 0
        elif cell.chunk < 512:
            assert happened["mixed_steps"] > 0
    else:
        assert happened["most_running"] == 3  # of one request
    if cell.chunk == 16 or (cell.chunk == 64 and not cell.together):
        assert happened["prefill_steps"] > num_prefills  # prompts were split
    elif not cell.together and cell.preemption == "never":
        assert happened["prefill_steps"] == num_prefills
    assert (happened["swapped_in_blocks"] > 0) == (cell.preemption == "swap")
    assert (happened["swapped_out_blocks"] > 0) == (cell.preemption == "swap")
    assert (happened["recomputed_tokens"] > 0) == (cell.preemption == "recompute")
    if cell.hits and not is_pressed:
        # The one whose prompt is scored needs the logits of all of it.
        assert happened["cached_tokens"] >= (num_requests - 1) * (SHARED // 16) * 16
    else:
        assert (happened["cached_tokens"] > 0) == cell.hits
    assert (happened["received_blocks"] > 0) == cell.two_pools
    assert happened["groups"] == happened["shared"] == 2  # n and beams
    assert happened["copied_blocks"] > 0


# -- what is asked ---------------------------------------------------------------------------------


def parameter_sets(greedy: Callable[[int], list[int]], new_tokens: int) -> list[SamplingParams]:
    """One for each of NAMES; what must not be generated is in a prompt's greedy answer."""
    sets: list[dict[str, Any]] = [
        {},
        {"temperature": 1.0},
        {"temperature": 1.0, "top_k": 2},
        {"temperature": 1.0, "top_p": 0.4},
        {"temperature": 1.5, "min_p": 0.2},
        {"presence_penalty": 0.8, "frequency_penalty": 0.6, "repetition_penalty": 1.3},
        {"logit_bias": ((greedy(6)[0], -100.0), (greedy(6)[3], 2.0))},
        {
            "bad_words": ((greedy(7)[4],), tuple(greedy(7)[5:7])),
            "min_tokens": new_tokens // 2,
            "stop_token_ids": frozenset({greedy(7)[2]}),
        },
        {"stop_token_ids": frozenset({greedy(8)[new_tokens // 2]})},
        {"temperature": 0.7, "n": 3},
        {"beam": BeamSearch(width=3)},
        {"prompt_logprobs": 3, "logprobs": 5},
    ]
    defaults = {"max_tokens": new_tokens, "temperature": 0.0, "logprobs": 2, "ignore_eos": True}
    return [SamplingParams(**defaults | {"seed": i} | params) for i, params in enumerate(sets)]


def ask(model: LoadedModel, prompts: list[tuple[int, ...]], new_tokens: int) -> Session:
    """The answers that every cell is held to: those given in the plainest way."""

    def greedy(i: int) -> list[int]:
        params = SamplingParams(max_tokens=new_tokens, temperature=0.0, ignore_eos=True)
        session = run(model, {"greedy": Request(prompts[i], params)}, PLAIN)
        return session.answers["greedy", 0].tokens

    sets = parameter_sets(greedy, new_tokens)
    asked = {name: Request(*one) for name, *one in zip(NAMES, prompts, sets, strict=True)}
    assert sum(params.num_sequences for params in sets) == NUM_SEQUENCES
    return run(model, asked, PLAIN)


def check_effects(model: LoadedModel, session: Session) -> None:
    """Each set of parameters does something: without it, the same draws give another answer."""
    kept = ("max_tokens", "ignore_eos", "seed")
    simple = {
        name: Request(
            request.prompt,
            SamplingParams(
                temperature=1.0 if request.params.temperature else 0.0,
                **{field: getattr(request.params, field) for field in kept},
            ),
        )
        for name, request in session.requests.items()
    }
    before = run(model, simple, PLAIN)
    unchanged = [
        name for name in NAMES if session.answers[name, 0].tokens == before.answers[name, 0].tokens
    ]
    assert unchanged == ["greedy", "drawn", "scored"]
    for name in ("n", "beams"):
        assert len({tuple(session.answers[name, i].tokens) for i in range(3)}) == 3
    assert len(session.answers["stop", 0].tokens) < len(before.answers["stop", 0].tokens)


def check_greedy(session: Session, oracle: LlamaForCausalLM) -> None:
    for name in ("greedy", "scored"):
        answer = session.answers[name, 0].tokens
        assert answer == oracle_greedy(oracle, session.requests[name].prompt, len(answer))


# -- a tiny model, every cell ----------------------------------------------------------------------


@pytest.fixture(scope="module")
def tiny() -> Session:
    model, oracle = tiny_model()
    rng = random.Random(5)
    shared = [rng.randrange(256) for _ in range(SHARED)]
    prompts = [
        (*shared, *(rng.randrange(256) for _ in range(length - SHARED))) for length in LENGTHS
    ]
    session = ask(model, prompts, new_tokens=NEW_TOKENS)
    check_effects(model, session)
    check_greedy(session, oracle)
    return session


@pytest.mark.parametrize("cell", CELLS if FULL else THIRD, ids=str)
def test_tiny_model(tiny: Session, cell: Cell) -> None:
    check(run(tiny_model()[0], tiny.requests, cell), tiny, cell)


# -- the default model, a slice --------------------------------------------------------------------


@pytest.fixture(scope="module")
def real() -> Session:
    model = default_model()
    ids = model.tokenizer.encode(TEXT * 4)
    prompts = [
        (*ids[:SHARED], *ids[SHARED + 9 * i :][: (length - SHARED) // (1 if FULL else 2)])
        for i, length in enumerate(LENGTHS)
    ]
    session = ask(model, prompts, new_tokens=NEW_TOKENS if FULL else 12)
    check_greedy(session, default_oracle())
    return session


@pytest.mark.model
@pytest.mark.parametrize("cell", CELLS if FULL else SOME_CELLS, ids=str)
def test_default_model(real: Session, cell: Cell) -> None:
    # Its 30 layers round ten times as much as the tiny one's two.
    check(run(default_model(), real.requests, cell), real, cell, tolerance=1e-4)
