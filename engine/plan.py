"""The contract between the scheduler and what executes its plans."""

from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from engine.events import TokenLogprobs
from engine.sequence import Sequence


class ScheduledChunk(NamedTuple):
    """Tokens [start, start + num_tokens) of one sequence, to be computed in this step.

    Their KV goes to the blocks of `seq.block_table`, which already covers them; the KV of tokens
    [0, start) is there. `draws` are the sequences whose next token the chunk's last logits give:
    none unless the chunk ends at its sequence's last token, then itself, or at the end of a prompt
    that several sequences share, all of them.
    """

    seq: Sequence
    start: int
    num_tokens: int
    draws: tuple[Sequence, ...] = ()


BlockPairs = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class BlockCopies:
    """Copies of whole blocks before the step's computation, as (source, destination), in the
    order of the fields. Inside a field all sources are read before any destination is written."""

    swapped_out: BlockPairs = ()  # device -> host
    copied: BlockPairs = ()  # device -> device: copy on write
    swapped_in: BlockPairs = ()  # host -> device
    received: BlockPairs = ()  # the prefill pool -> device

    def __bool__(self) -> bool:
        return bool(self.swapped_out or self.copied or self.swapped_in or self.received)

    @property
    def written(self) -> frozenset[int]:
        """Blocks of the device that get their content here."""
        pairs = (*self.copied, *self.swapped_in, *self.received)
        return frozenset(target for _, target in pairs)


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step's batch: a mix of prefill chunks and decodes, decodes first."""

    step: int
    chunks: tuple[ScheduledChunk, ...]
    admitted: tuple[Sequence, ...] = ()
    preempted: tuple[Sequence, ...] = ()
    # Taken out of their queues instead of admitted: their deadline comes before their first token.
    too_late: tuple[Sequence, ...] = ()
    copies: BlockCopies = BlockCopies()

    @property
    def num_tokens(self) -> int:
        return sum(chunk.num_tokens for chunk in self.chunks)

    @property
    def is_empty(self) -> bool:
        return not self.chunks and not self.copies


@dataclass(frozen=True, slots=True)
class StepOutput:
    """Next token by id of each sequence that draws; or why it has none."""

    token_ids: dict[str, int]
    errors: dict[str, str] = field(default_factory=dict)  # e.g. the logits were not finite
    refusals: dict[str, str] = field(default_factory=dict)  # the logits are good, none is allowed
    # For sequences whose parameters ask for them. Of the prompt: of the tokens that follow each
    # of the chunk's, in order, as far as they are the prompt's.
    logprobs: dict[str, TokenLogprobs] = field(default_factory=dict)
    prompt_logprobs: dict[str, tuple[TokenLogprobs, ...]] = field(default_factory=dict)
    swap_seconds: float = 0.0  # what copying between host and device took


class Runner(Protocol):
    """Executes plans: the model runner on real tensors, the simulated runner on virtual time."""

    def execute(self, plan: StepPlan) -> StepOutput: ...
