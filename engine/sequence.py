"""Sequence: one prompt and what has been generated from it, as counters over one list of tokens."""

import hashlib
import math
import struct
from dataclasses import dataclass, field
from enum import Enum, StrEnum
from typing import Literal, Protocol

from engine.detokenizer import Detokenizer
from engine.errors import ConfigError
from engine.events import TokenLogprobs


class SequenceStatus(Enum):
    PENDING = "pending"  # begins when the prompt that it shares is computed
    WAITING = "waiting"  # in a queue: new, preempted, or handed over
    RUNNING = "running"  # holds blocks and a slot
    FINISHED = "finished"


class FinishReason(StrEnum):
    STOP = "stop"  # end-of-sequence token, stop token or stop string
    LENGTH = "length"  # max_tokens, or the model's context is full
    ABORT = "abort"  # the client left, or the operator stopped it
    DEADLINE = "deadline"  # nobody would wait for the rest
    ERROR = "error"  # the engine failed on this sequence


@dataclass(frozen=True, slots=True)
class Grammar:
    """What the text of a sequence must match, as its author wrote it."""

    kind: Literal["json_schema", "regex", "lark"]
    source: str


class Constraint(Protocol):
    """A compiled grammar and how far one sequence has come in it. Which tokens may come next is
    between the implementation and the runner's sampler."""

    def accept(self, token_id: int) -> bool:
        """Advance by the token that was drawn; False if the grammar does not allow it."""
        ...

    @property
    def is_finished(self) -> bool:
        """Nothing can follow."""
        ...

    def fork(self) -> "Constraint":
        """An independent copy at the same point."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class BeamSearch:
    """Keep the `width` likeliest continuations and return them, best first, by
    logprob / length ** length_penalty."""

    width: int
    length_penalty: float = 1.0
    early_stopping: bool = False  # end as soon as `width` hypotheses are complete


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How the next token is chosen and when generation ends. Bounds are checked at the gateway."""

    max_tokens: int  # 0 only scores the prompt
    n: int = 1  # sequences drawn from one prompt
    beam: BeamSearch | None = None  # instead of drawing
    temperature: float = 1.0  # 0 is greedy
    top_k: int = 0  # 0 keeps the whole vocabulary
    top_p: float = 1.0
    min_p: float = 0.0  # drops tokens less likely than this times the likeliest
    presence_penalty: float = 0.0  # counts generated tokens only, like frequency_penalty
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0  # counts the prompt too
    logit_bias: tuple[tuple[int, float], ...] = ()  # (token id, what is added)
    bad_words: tuple[tuple[int, ...], ...] = ()  # token sequences that must not appear
    seed: int = 0  # 64 bits; a client that gives none gets a random one at the gateway
    min_tokens: int = 0  # before, neither end of sequence nor stop token can be drawn
    stop: tuple[str, ...] = ()
    stop_token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False
    logprobs: int | None = None  # of how many likeliest tokens, beside the drawn one's
    prompt_logprobs: int | None = None
    grammar: Grammar | None = None

    @property
    def num_sequences(self) -> int:
        """How many sequences run at once for this request."""
        return self.beam.width if self.beam is not None else self.n


def child_seed(seed: int, index: int) -> int:
    """Seed of a request's sequence `index`: the first has the request's own."""
    if index == 0:
        return seed
    digest = hashlib.sha256(b"headrace.seed\0" + struct.pack("<QQ", seed % 2**64, index)).digest()
    return int.from_bytes(digest[:8], "little")


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantShare:
    """What a tenant is entitled to; travels with each of its requests. Raises ConfigError."""

    tenant: str
    weight: float = 1.0
    rank: int = 0  # of its priority class: lower ones go first
    is_preemptible: bool = False  # a higher class that does not fit may take its place
    class_weight: float = 1.0  # where classes share by weight
    max_wait_seconds: float | None = None  # after which its class's turn is brought forward
    # KV blocks that it can always have, whoever holds them now, and the most that it may hold.
    kv_floor_blocks: int = 0
    kv_cap_blocks: int | None = None

    def __post_init__(self) -> None:
        if not 0 < self.weight < math.inf:
            raise ConfigError(
                f"weight of {self.tenant} must be a positive number, not {self.weight}"
            )
        if not 0 < self.class_weight < math.inf:
            raise ConfigError(f"class weight must be a positive number, not {self.class_weight}")
        cap = self.kv_cap_blocks
        if self.kv_floor_blocks < 0 or (cap is not None and cap < max(1, self.kv_floor_blocks)):
            raise ConfigError(
                f"{self.tenant}: a KV floor of {self.kv_floor_blocks} blocks and a cap of {cap} do "
                "not go together: the floor is >= 0, the cap >= 1 and no lower than the floor"
            )


ParkedSource = Literal["host", "prefill"]


class BlockStore(Protocol):
    """Where a waiting sequence's KV is kept."""

    def free(self, block_ids: list[int]) -> float:
        """The block-seconds that their holder owes for them; so does `owed`, and frees nothing."""
        ...

    def owed(self, block_ids: list[int]) -> float: ...


@dataclass(frozen=True, slots=True)
class ParkedKV:
    """KV of a waiting sequence, outside the pool in which it will run."""

    store: BlockStore
    source: ParkedSource
    block_ids: list[int]  # block_ids[i] holds tokens [i * block_size, (i + 1) * block_size)


@dataclass(slots=True, eq=False)
class SequenceGroup:
    """Sequences of one request. The first computes the prompt; at its end they fork: all share
    its full blocks, and each copies the partial one when it first writes to it.

    Drawn sequences then go their own ways. Beams stay together: they are scheduled, preempted and
    ended as one.
    """

    sequences: tuple["Sequence", ...]
    is_beam: bool
    is_forked: bool = False
    num_live: int = field(init=False)
    num_drawn: int = 0  # tokens, of all sequences together
    # Distinct blocks that they hold; None when it must be counted again.
    num_blocks: int | None = None
    block_steps: int = 0  # summed over steps since the fork
    unshared_block_steps: int = 0

    def __post_init__(self) -> None:
        self.num_live = len(self.sequences)

    def measure(self) -> None:
        """Account for one step's blocks."""
        if self.num_blocks is None:
            self.num_blocks = len({b for seq in self.sequences for b in seq.block_table})
        self.block_steps += self.num_blocks
        self.unshared_block_steps += sum(len(seq.block_table) for seq in self.sequences)


@dataclass(slots=True, eq=False)
class Sequence:
    """State of one sequence. No phases: `num_computed_tokens` catches up with `num_tokens`.

    token_ids      [prompt | generated]; a preempted sequence keeps all of them
    block_table    block_table[i] holds the KV of tokens [i * block_size, (i + 1) * block_size)
    """

    id: str  # unique; the first sequence of a request has the request's own
    share: TenantShare
    namespace: str  # root of its prefix-cache keys; from the API key, never from the request
    token_ids: list[int]
    params: SamplingParams
    arrived: float
    deadline: float | None = None  # from which on it is of no use
    place: int = 0  # FIFO position among its tenant's sequences; kept across preemption
    use_prefix_cache: bool = True
    end_token_ids: frozenset[int] = frozenset()  # drawing one of them ends it
    detokenizer: Detokenizer | None = None
    constraint: Constraint | None = None
    index: int = 0  # which of its request's sequences
    group: SequenceGroup | None = None

    status: SequenceStatus = SequenceStatus.WAITING
    num_prompt_tokens: int = field(init=False)
    num_computed_tokens: int = 0
    num_reached_tokens: int = 0  # most ever computed; below it, work is recomputation
    # Tokens of the prompt charged so far: recomputation after a preemption charges nothing.
    num_charged_tokens: int = 0
    num_cached_tokens: int = 0  # of the prompt, found in the prefix cache instead of computed
    num_hit_tokens: int = 0  # found at its last admission
    num_preemptions: int = 0
    # Of these, in a row, those before it had come any further than before.
    num_fruitless: int = 0
    num_tokens_at_preemption: int = 0  # the most ever computed, when it was preempted last
    num_recomputed_tokens: int = 0
    num_bypasses: int = 0
    num_prefix_delays: int = 0
    # What was owed for its blocks when it gave them up, less what was owed when it got them: its
    # KV-block-seconds once it holds none.
    kv_block_seconds: float = 0.0
    num_public_blocks: int = 0  # its first ones, whose content every tenant may share
    parked: ParkedKV | None = None
    blocked_since: float | None = None
    block_table: list[int] = field(default_factory=list)
    block_keys: list[bytes] = field(default_factory=list)  # of its full blocks, grown lazily
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    is_prompt_scored: bool = False
    cumulative_logprob: float = 0.0

    rank: int = field(init=False)  # of its class, as the policy sees it: 0 where it has none
    queued: float = field(init=False)
    admitted: float | None = None
    first_token: float | None = None

    def __post_init__(self) -> None:
        self.num_prompt_tokens = len(self.token_ids)
        self.rank = self.share.rank
        self.queued = self.arrived

    @property
    def tenant(self) -> str:
        return self.share.tenant

    def fork_from(self, leader: "Sequence") -> None:
        """Begin where the first of its group is, whose prompt is computed and charged."""
        self.token_ids = list(leader.token_ids)
        self.place, self.rank, self.admitted = leader.place, leader.rank, leader.admitted
        self.num_computed_tokens = self.num_reached_tokens = leader.num_computed_tokens
        self.num_charged_tokens = leader.num_prompt_tokens

    @property
    def request_id(self) -> str:
        return self.id if self.group is None else self.group.sequences[0].id

    @property
    def gang(self) -> tuple["Sequence", ...]:
        """Those that are admitted, preempted and ended as one with this one, itself included."""
        group = self.group
        return group.sequences if group and (group.is_beam or not group.is_forked) else (self,)

    @property
    def is_beam(self) -> bool:
        """One of several beams, after the fork."""
        return self.group is not None and self.group.is_beam and self.group.is_forked

    @property
    def scores_prompt(self) -> bool:
        """Logprobs of its prompt are wanted and not all there yet."""
        return self.params.prompt_logprobs is not None and not self.is_prompt_scored

    @property
    def num_slots(self) -> int:
        """Places among the running that it takes: those of its whole group until the fork."""
        return 1 if self.group is None or self.group.is_forked else len(self.group.sequences)

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_uncomputed_tokens(self) -> int:
        return len(self.token_ids) - self.num_computed_tokens

    @property
    def is_decoding(self) -> bool:
        """All but the newest generated token is computed. A prompt's last token is prefill."""
        num_tokens = len(self.token_ids)  # asked of all that run, twice a step
        return num_tokens - self.num_computed_tokens == 1 and num_tokens > self.num_prompt_tokens

    def __repr__(self) -> str:
        return (
            f"<Sequence {self.id} {self.tenant} {self.status.value} "
            f"{self.num_computed_tokens}/{self.num_tokens}>"
        )
