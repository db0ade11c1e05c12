"""What the prefix cache holds after a random day of traffic is what a cold engine computes.

Conversations of three tenants come back turn by turn, ask for several answers, leave early, and
press one another out of a small pool. Then every chain of blocks that the cache can still find is
asked for twice: through the cache, and from a fresh core that has none.
"""

import math
import random
from collections.abc import Iterator

import pytest
import torch

from engine.core import EngineCore
from engine.events import TokenLogprobs
from engine.memory.block_pool import Block
from engine.memory.prefix_cache import PUBLIC, _enter_namespace, block_key, root_key
from engine.sequence import BeamSearch, SamplingParams, TenantShare
from tests.tiny import Request, Session, make_core, tiny_model

BLOCK, VOCAB = 16, 258
NUM_BLOCKS, NUM_PREFILL_BLOCKS = 64, 64
DAY = 700  # steps
TENANTS = ("a", "b", "c")
MAX_TOKENS = 160  # of a conversation, before its user begins another
Chain = tuple[Block, ...]


class Day:
    """Conversations: each turn's prompt is all that was said before, and something new."""

    def __init__(self, session: Session, public: tuple[int, ...], rng: random.Random) -> None:
        self.session = session
        self._rng = rng
        self._beginnings = {tenant: self._tokens(35) for tenant in TENANTS}
        self._public = public
        self._talks: dict[str, tuple[int, ...]] = {}  # what was said, by tenant and user
        self._asked: dict[str, str] = {}  # request: whose turn it is
        self._num_turns = 0

    def _tokens(self, num: int) -> tuple[int, ...]:
        return tuple(self._rng.randrange(256) for _ in range(num))

    def play(self) -> None:
        rng = self._rng
        for step in range(DAY):
            if step % 100 == 0:
                compare_kv(self.session.core)
            if rng.random() < 0.6:
                self._speak(rng.choice(TENANTS) + rng.choice("rstuvwxyz"))
            if self._asked and rng.random() < 0.05:
                self.session.abort(rng.choice(list(self._asked)))
                self.session.happened["aborted"] += 1
            self.session.step()
            self._listen()
        self.session.run()

    def _speak(self, who: str) -> None:
        if who in self._asked.values():
            return
        rng, tenant = self._rng, who[0]
        said = self._talks.get(who, ())
        if not said or len(said) > MAX_TOKENS:
            said = self._public if rng.random() < 0.3 else self._beginnings[tenant]
        kinds = ({"temperature": 0.0}, {}, {"n": 3}, {"beam": BeamSearch(width=2)})
        params = SamplingParams(
            max_tokens=rng.randint(1, 40), seed=self._num_turns, **rng.choice(kinds)
        )
        request_id = f"turn{self._num_turns}"
        self._num_turns += 1
        prompt = said + self._tokens(rng.randint(1, 20))
        self.session.add(request_id, Request(prompt, params, tenant))
        self._asked[request_id] = who

    def _listen(self) -> None:
        for request_id, who in list(self._asked.items()):
            answer = self.session.answers[request_id, 0]
            if answer.end is not None:
                del self._asked[request_id]
                prompt = self.session.requests[request_id].prompt
                self._talks[who] = (*prompt, *answer.tokens)


def chains(core: EngineCore, stage: int) -> Iterator[tuple[str, Chain]]:
    """Every way from the root of a namespace through the cached blocks, to its end."""
    cached = [b for b in core.stages[stage].scheduler.pool.blocks if b.key is not None]
    found = {block.key: block for block in cached}

    def follow(namespace: str, parent: bytes, chain: Chain) -> Iterator[tuple[str, Chain]]:
        following = [
            found[key]
            for block in cached
            for key in keys_after(parent, namespace, list(block.tokens), chain)
            if found.get(key) is block
        ]
        for block in following:
            assert block.key is not None
            yield from follow(namespace, block.key, (*chain, block))
        if chain and not following:
            yield namespace, chain

    for namespace in TENANTS:
        yield from follow(namespace, b"", ())


def keys_after(parent: bytes, namespace: str, tokens: list[int], chain: Chain) -> list[bytes]:
    """Keys that a block with these tokens can have there: public as far as what was before is."""
    if not chain:
        return [block_key(root_key(root), tokens) for root in (namespace, PUBLIC)]
    if chain[-1].namespace is not PUBLIC:
        return [block_key(parent, tokens)]
    return [block_key(parent, tokens), block_key(_enter_namespace(parent, namespace), tokens)]


def tokens_of(chain: Chain) -> tuple[int, ...]:
    return tuple(token for block in chain for token in block.tokens)


def kl(expected: TokenLogprobs, found: TokenLogprobs) -> float:
    """KL divergence of two whole distributions, in nats."""
    q = dict(found.top)
    assert len(q) == len(expected.top) == VOCAB
    return sum(math.exp(p) * (p - q[token]) for token, p in expected.top)


@pytest.mark.parametrize("two_pools", [False, True], ids=["one_pool", "two_pools"])
def test_cache_after_a_day_equals_a_cold_engine(two_pools: bool) -> None:
    model, _ = tiny_model()
    rng = random.Random(1)
    public = tuple(rng.randrange(256) for _ in range(36))
    core = make_core(
        model,
        num_blocks=NUM_BLOCKS,
        prefill_blocks=NUM_PREFILL_BLOCKS if two_pools else None,
        num_host_blocks=12,
        prefix_cache=True,
        public_prompts=(public,),
        max_step_tokens=32,
        preemption="swap",
    )
    session = Session(core)
    Day(session, public, rng).play()
    happened, memory = session.happened, core.scheduler.memory
    assert happened["aborted"] > 5
    assert happened["swapped"] > 3
    assert happened["recomputed"] > 3
    assert happened["shared"] > 10
    assert memory.hit_tokens.total() > 1000
    assert memory.pool.evicted_by_tenant.total() > 100

    num_blocks = compare_kv(core)
    worst, num_positions = compare_distributions(session)

    assert num_blocks > NUM_BLOCKS // 3
    assert worst <= 1e-5
    assert num_positions > 100


def compare_kv(core: EngineCore) -> int:
    """Keys and values themselves, of each block that each pool's cache can find; how many."""
    num_blocks = 0
    for number, stage in enumerate(core.stages):
        found = dict.fromkeys(chains(core, number))
        for _, chain in found:
            cold = make_core(tiny_model()[0])
            kept = compute(cold, tokens_of(chain))
            for layer, expected in zip(
                stage.runner.cache.layers,  # type: ignore[attr-defined]
                cold.stages[0].runner.cache.layers,  # type: ignore[attr-defined]
                strict=True,
            ):
                ids = [block.id for block in chain]
                torch.testing.assert_close(layer[ids], expected[kept], atol=1e-4, rtol=0)
        num_blocks += len({block for _, chain in found for block in chain})
    return num_blocks


def compute(core: EngineCore, tokens: tuple[int, ...]) -> list[int]:
    """The blocks in which a core computes these tokens' KV."""
    session = Session(core)
    session.add("cold", Request(tokens, SamplingParams(max_tokens=2)))
    session.step()
    (seq,) = core.scheduler.running.values()
    assert seq.num_computed_tokens == len(tokens)
    return seq.block_table[: len(tokens) // BLOCK]


def compare_distributions(session: Session) -> tuple[float, int]:
    """Of the next token, at six places after each cached block; the greatest KL divergence."""
    core = session.core
    # What it computes is nobody's afterwards: room for what follows, which then evicts nothing.
    params = SamplingParams(max_tokens=1, ignore_eos=True)
    session.core.add(
        "room",
        tuple(range(200)),
        params,
        share=TenantShare(tenant="a"),
        namespace="a",
        use_prefix_cache=False,
    )
    session.run()
    worst, num_positions = 0.0, 0
    for number, (namespace, chain) in enumerate(chains(core, 0)):
        tokens = tokens_of(chain)
        cold = Session(make_core(tiny_model()[0]))
        scoring = SamplingParams(max_tokens=0, prompt_logprobs=VOCAB)
        cold.add("cold", Request((*tokens, 0), scoring))
        cold.run()
        ends = [
            depth * BLOCK + beyond
            for depth in range(1, len(chain) + 1)
            for beyond in (1, 4, 7, 10, 13, 16)
            if depth * BLOCK + beyond <= len(tokens)
        ]
        for end in ends:
            request_id = f"{number}-{end}"
            params = SamplingParams(max_tokens=1, logprobs=VOCAB)
            session.add(request_id, Request(tokens[:end], params, namespace))
            session.run()
            answer = session.answers[request_id, 0]
            assert answer.end is not None
            assert answer.end.usage.cached_tokens == (end - 1) // BLOCK * BLOCK
            worst = max(worst, kl(cold.scored["cold"][end - 1], answer.logprobs[0]))
            num_positions += 1
    return worst, num_positions
