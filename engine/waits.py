"""Why sequences wait, and what each step decided: frozen records. Times as in events.

What is for a tenant names no other tenant, and no request of one.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple


class WaitCause(StrEnum):
    """Why a sequence did not run."""

    # Of a queue head that a step looked at, or would have looked at next.
    SLOTS = "slots"  # as many sequences run as may
    KV = "kv"  # the pool has not enough blocks for it
    CAP = "cap"  # its tenant holds as many blocks as it may
    HEAD_HELD = "head held"  # what is freed is kept for a head before it
    TWIN = "twin"  # its tenant is about to compute most of it
    BUDGET = "budget"  # the step's tokens were spent
    NOT_REACHED = "not reached"  # too many heads before it did not fit: the step looked no further
    PREEMPTING = "preempting"  # the step preempted, and admitted nobody
    TOO_LATE = "too late"  # its deadline comes before its first token: it is ended
    # Of any other queue head.
    CLASS = "class"  # it was another class's turn
    FAIR_SHARE = "fair share"  # it was the turn of other tenants of its class
    # Of the rest.
    OWN_QUEUE = "own queue"  # earlier requests of its tenant and class wait before it
    STEP = "step"  # it came while a step ran
    PREEMPTED = "preempted"  # it gave way, until the next step
    HANDED_OVER = "handed over"  # its prompt is computed; until the decoding pool's next step
    UNRECORDED = "unrecorded"  # so long ago that it is no longer known


@dataclass(frozen=True, slots=True)
class Interval:
    """Part of a sequence's life: each begins where the one before it ends."""

    cause: WaitCause | None  # None while it ran
    start: float
    end: float
    detail: str = ""  # for people


@dataclass(frozen=True, slots=True)
class SequenceExplanation:
    """A sequence's life from its arrival to its end, or until now."""

    index: int  # which of its request's sequences
    is_finished: bool
    intervals: tuple[Interval, ...]


@dataclass(frozen=True, slots=True)
class Explanation:
    """Where a request's time went. Sequences that share a prompt share the wait for it."""

    request_id: str
    tenant: str
    sequences: tuple[SequenceExplanation, ...]


class LookedHead(NamedTuple):
    """A queue head that a step considered, with its tenant's virtual counter in its class."""

    sequence_id: str
    tenant: str
    rank: int
    counter: float
    cause: WaitCause | None  # None: admitted


class PromptChunk(NamedTuple):
    """Tokens of a prompt, or of what is computed again, in a step."""

    sequence_id: str
    tenant: str
    start: int
    num_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """What one step decided; for the operator, since it names tenants."""

    stage: str  # a StageName
    step: int
    at: float
    decodes: tuple[str, ...]  # sequence ids
    prompts: tuple[PromptChunk, ...]
    admitted: tuple[str, ...]
    preempted: tuple[str, ...]
    heads: tuple[LookedHead, ...]  # in the order of looking; the last may be the one not reached
    stopped_by: WaitCause | None  # why it admitted no more; None: no queue head was left
    num_running: int
    num_waiting: int
    num_free_blocks: int
