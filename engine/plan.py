"""The contract between the scheduler and what executes its plans."""

from dataclasses import dataclass, field
from typing import Protocol

from engine.sequence import Sequence


@dataclass(frozen=True, slots=True)
class ScheduledChunk:
    """Tokens [start, start + num_tokens) of one sequence, to be computed in this step.

    Their KV goes to the blocks of `seq.block_table`, which already covers them; the KV of tokens
    [0, start) is there. When `samples`, the chunk ends at the sequence's last token and the step
    yields its next one.
    """

    seq: Sequence
    start: int
    num_tokens: int
    samples: bool


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step's batch: a mix of prefill chunks and decodes, decodes first."""

    step: int
    chunks: tuple[ScheduledChunk, ...]
    admitted: tuple[Sequence, ...] = ()
    preempted: tuple[Sequence, ...] = ()

    @property
    def num_tokens(self) -> int:
        return sum(chunk.num_tokens for chunk in self.chunks)


@dataclass(frozen=True, slots=True)
class StepOutput:
    """Next token by sequence id, for each chunk that samples; or why that sequence has none."""

    token_ids: dict[str, int]
    errors: dict[str, str] = field(default_factory=dict)  # e.g. the logits were not finite


class Runner(Protocol):
    """Executes plans: the model runner on real tensors, the simulated runner on virtual time."""

    def execute(self, plan: StepPlan) -> StepOutput: ...
