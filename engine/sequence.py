"""Sequence: one prompt and what has been generated from it, as counters over one list of tokens."""

from dataclasses import dataclass, field
from enum import Enum, StrEnum

from engine.detokenizer import Detokenizer


class SequenceStatus(Enum):
    WAITING = "waiting"  # in a queue: new, or preempted
    RUNNING = "running"  # holds blocks and a slot
    FINISHED = "finished"


class FinishReason(StrEnum):
    STOP = "stop"  # end-of-sequence token, stop token or stop string
    LENGTH = "length"  # max_tokens, or the model's context is full
    ABORT = "abort"  # the client left, or the operator stopped it
    ERROR = "error"  # the engine failed on this sequence


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How the next token is chosen and when generation ends. Bounds are checked at the gateway."""

    max_tokens: int
    temperature: float = 1.0  # 0 is greedy
    top_k: int = 0  # 0 keeps the whole vocabulary
    top_p: float = 1.0
    seed: int = 0  # 64 bits; a client that gives none gets a random one at the gateway
    stop: tuple[str, ...] = ()
    stop_token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantShare:
    """What a tenant is entitled to; travels with each of its requests."""

    tenant: str
    weight: float = 1.0
    rank: int = 0  # of its priority class: lower ones go first


@dataclass(slots=True, eq=False)
class Sequence:
    """State of one sequence. No phases: `num_computed_tokens` catches up with `num_tokens`.

    token_ids      [prompt | generated]; a preempted sequence keeps all of them
    block_table    block_table[i] holds the KV of tokens [i * block_size, (i + 1) * block_size)
    """

    id: str
    share: TenantShare
    namespace: str  # root of its prefix-cache keys; from the API key, never from the request
    token_ids: list[int]
    params: SamplingParams
    arrived: float
    place: int = 0  # FIFO position among its tenant's sequences; kept across preemption
    use_prefix_cache: bool = True
    detokenizer: Detokenizer | None = None

    status: SequenceStatus = SequenceStatus.WAITING
    num_prompt_tokens: int = field(init=False)
    num_computed_tokens: int = 0
    num_reached_tokens: int = 0  # most ever computed; below it, work is recomputation
    # Tokens of the prompt charged so far: recomputation after a preemption charges nothing.
    num_charged_tokens: int = 0
    num_cached_tokens: int = 0  # of the prompt, found in the prefix cache instead of computed
    num_preemptions: int = 0
    num_recomputed_tokens: int = 0
    num_bypasses: int = 0
    blocked_since: float | None = None
    block_table: list[int] = field(default_factory=list)
    block_keys: list[bytes] = field(default_factory=list)  # of its full blocks, grown lazily

    queued: float = field(init=False)
    admitted: float | None = None
    first_token: float | None = None

    def __post_init__(self) -> None:
        self.num_prompt_tokens = len(self.token_ids)
        self.queued = self.arrived

    @property
    def tenant(self) -> str:
        return self.share.tenant

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
        return self.num_uncomputed_tokens == 1 and self.num_output_tokens > 0

    def __repr__(self) -> str:
        return (
            f"<Sequence {self.id} {self.tenant} {self.status.value} "
            f"{self.num_computed_tokens}/{self.num_tokens}>"
        )
