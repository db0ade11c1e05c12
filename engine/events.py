"""Facts that the engine reports: frozen records. Times are seconds on the engine's clock."""

from dataclasses import dataclass
from typing import Literal

StageName = Literal["all", "prefill", "decode"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Tokens of one sequence: what was asked, what came from cache, what was computed again."""

    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    computed_tokens: int = 0  # prompt tokens whose forward pass ran, once each
    recomputed_tokens: int = 0  # computed again after a preemption; charged to nobody
    # Time that its KV blocks were held, of a block that others held too its part.
    kv_block_seconds: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Timings:
    """A sequence's milestones; None where it never got there."""

    arrived: float
    admitted: float | None
    first_token: float | None
    finished: float


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probability of one token under the model itself, before any sampling parameter, and
    those of the likeliest tokens at its position, best first, as (token id, logprob)."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceAdmitted:
    """A sequence got its slot and blocks (again, after a preemption)."""

    request_id: str
    tenant: str
    at: float
    index: int = 0  # which of its request's sequences
    num_cached_tokens: int
    waited_seconds: float
    stage: StageName = "all"  # of the engine's two, if it has two


@dataclass(frozen=True, slots=True, kw_only=True)
class SequencePreempted:
    """A running sequence gave its blocks up and went back to its place in the queue."""

    request_id: str
    tenant: str
    at: float
    index: int = 0
    swapped: bool = False  # its KV waits in host memory, instead of being computed again


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptScored:
    """The prompt is computed, and its logprobs were asked for; comes before any token.

    logprobs[i] belongs to prompt token i + 1: nothing predicts the first.
    """

    request_id: str
    tenant: str
    at: float
    logprobs: tuple[TokenLogprobs, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TokensGenerated:
    """New tokens of one sequence, and the text that became safe to send (may be empty)."""

    request_id: str
    tenant: str
    at: float
    token_ids: tuple[int, ...]
    text: str
    index: int = 0
    logprobs: tuple[TokenLogprobs, ...] = ()  # one for each token, if they were asked for


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceFinished:
    """The one end of a sequence. Every sequence of every request gets exactly one.

    A prompt that several sequences share is in the usage of the first of them alone.
    """

    request_id: str
    tenant: str
    at: float
    reason: str  # a FinishReason
    text: str  # held-back text released at the end
    usage: Usage
    timings: Timings
    num_preemptions: int
    error: str | None = None
    index: int = 0
    # Sum over its tokens, where logprobs were asked for; a beam's score, where beams were.
    cumulative_logprob: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupFinished:
    """The last sequence of a request for several ended: what sharing their blocks saved."""

    request_id: str
    tenant: str
    at: float
    num_sequences: int
    block_steps: int  # blocks that they held together, summed over steps
    unshared_block_steps: int  # and what they would have held each for itself


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
    stage: StageName = "all"
    num_swapped_out_blocks: int = 0
    num_swapped_in_blocks: int = 0
    num_copied_blocks: int = 0  # on write
    num_received_blocks: int = 0  # from the prefill pool


SequenceEvent = (
    SequenceAdmitted | SequencePreempted | PromptScored | TokensGenerated | SequenceFinished
)
Event = SequenceEvent | GroupFinished | StepFinished
