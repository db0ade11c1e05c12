"""Facts that the engine reports: frozen records. Times are seconds on the engine's clock."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Tokens of one sequence: what was asked, what came from cache, what was computed again."""

    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    computed_tokens: int = 0  # prompt tokens whose forward pass ran, once each
    recomputed_tokens: int = 0  # computed again after a preemption; charged to nobody


@dataclass(frozen=True, slots=True, kw_only=True)
class Timings:
    """A sequence's milestones; None where it never got there."""

    arrived: float
    admitted: float | None
    first_token: float | None
    finished: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceAdmitted:
    """A sequence got its slot and blocks (again, after a preemption)."""

    seq_id: str
    tenant: str
    at: float
    num_cached_tokens: int
    waited_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SequencePreempted:
    """A running sequence gave its blocks up and went back to its place in the queue."""

    seq_id: str
    tenant: str
    at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TokensGenerated:
    """New tokens of one sequence, and the text that became safe to send (may be empty)."""

    seq_id: str
    tenant: str
    at: float
    token_ids: tuple[int, ...]
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceFinished:
    """The one end of a sequence. Every submitted sequence gets exactly one."""

    seq_id: str
    tenant: str
    at: float
    reason: str  # a FinishReason
    text: str  # held-back text released at the end
    usage: Usage
    timings: Timings
    num_preemptions: int
    error: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFinished:
    """One executed step, for metrics and the step view."""

    step: int
    started: float
    scheduled: float  # planning done
    executed: float  # the runner came back
    num_prefill_tokens: int
    num_decode_tokens: int
    num_running: int
    num_waiting: int
    num_preempted: int
    free_blocks: int
    cached_blocks: int
    held_blocks: int


Event = SequenceAdmitted | SequencePreempted | TokensGenerated | SequenceFinished | StepFinished
