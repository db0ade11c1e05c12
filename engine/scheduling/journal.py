"""What happened to each sequence and why, recorded while scheduling, explained when somebody asks.

A step pays for the heads that it looks at, not for those that wait. A head that no step looked at
is explained by what each step leaves once for all of them: whose turn it was when it stopped.
"""

from bisect import bisect_right
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from engine.plan import StepPlan
from engine.scheduling.queues import WaitingQueues
from engine.sequence import Sequence as EngineSequence
from engine.sequence import SequenceStatus
from engine.waits import (
    Explanation,
    Interval,
    LookedHead,
    PromptChunk,
    SequenceExplanation,
    StepRecord,
    WaitCause,
)

MAX_ENDED_REQUESTS = 4096
MAX_STEPS = 1024
MAX_TURNS = 4096  # kept at least
MAX_MARKS = 256  # of one sequence
MAX_FIRST_MARKS = 64  # of these, the earliest that are never given up
OTHER_TENANTS = "other tenants"


class Turn(NamedTuple):
    """From `at` on, whose turn it was when admission stopped."""

    at: float
    cause: WaitCause | None  # of every head, whoever's turn it was
    rank: int | None  # of the next head; None: every head was looked at


@dataclass(slots=True, eq=False)
class Mark:
    """What became of a sequence at one instant.

    The cause holds until `until`, the next mark at the latest. After `until`, it waits as a queue
    head that no step looked at, or behind its own queue's head. None: not known yet, or never.
    """

    at: float
    cause: WaitCause | None  # None: it runs
    is_head: bool
    rank: int
    turns: list[Turn]  # of the scheduler where it waits
    detail: str = ""
    until: float | None = None


@dataclass(slots=True, eq=False)
class History:
    """One sequence; beams, which are admitted and preempted as one, share their marks."""

    marks: list[Mark]
    end: float | None = None


@dataclass(slots=True, eq=False)
class RequestHistory:
    """A request's sequences, by index, as far as they began."""

    tenant: str
    sequences: dict[int, History]


@dataclass(slots=True, eq=False)
class Histories:
    """By request: of live ones, and of those that ended last. And the last steps. Of an engine's
    schedulers together."""

    live: dict[str, RequestHistory] = field(default_factory=dict)
    ended: OrderedDict[str, RequestHistory] = field(default_factory=OrderedDict)
    steps: deque[StepRecord] = field(default_factory=lambda: deque(maxlen=MAX_STEPS))


class Journal:
    """Told by one scheduler what it decides. The prefill scheduler's journal is told what goes
    back to compute."""

    def __init__(
        self,
        queues: WaitingQueues,
        counter: Callable[[EngineSequence], float],
        prefill: "Journal | None" = None,
    ) -> None:
        self._queues = queues
        self._counter = counter
        self._prefill = prefill
        self._decode: Journal | None = None
        self._histories: Histories = prefill._histories if prefill else Histories()
        self._now = 0.0
        self._turns: list[Turn] = []
        self._open: list[Mark] = []  # that hold until the next step
        self._heads: list[LookedHead] = []  # of this step
        self._stopped_by: WaitCause | None = None
        if prefill is not None:
            prefill._decode = self

    # -- what a sequence lives through --------------------------------------------------------

    def arrived(self, seq: EngineSequence) -> None:
        """A new one has its place in the queue."""
        is_head = self._queues.is_head(seq)
        mark = Mark(seq.arrived, WaitCause.STEP, is_head, seq.rank, self._turns)
        if is_head:
            self._open.append(mark)
        else:
            num_ahead = self._queues.num_waiting(seq.rank, seq.tenant) - 1
            mark.cause, mark.detail = WaitCause.OWN_QUEUE, f"{num_ahead} before it at its arrival"
        history = RequestHistory(seq.tenant, {seq.index: History([mark])})
        self._histories.live[seq.request_id] = history

    def forked(self, leader: EngineSequence, child: EngineSequence) -> None:
        """The child begins where the first of its group is, which waited for both."""
        sequences = self._histories.live[leader.request_id].sequences
        marks = sequences[leader.index].marks
        sequences[child.index] = History(marks if child.is_beam else list(marks))

    def preempted(
        self,
        members: Sequence[EngineSequence],
        now: float,
        *,
        swapped: bool,
        whom: EngineSequence | None,
    ) -> None:
        """These, of which the first stands in the queue for all, gave way to `whom`, or to
        nobody: they could not grow, or a step failed."""
        first = members[0]
        if whom is None:
            reason = "its blocks were lost when a step failed"
        elif whom in members:
            reason = "it could not grow, and nobody had to give way before it"
        else:
            reason = f"for {first.tenant if whom.tenant == first.tenant else OTHER_TENANTS}"
        how = "swapped out" if swapped else "to be computed again"
        journal = self if swapped or self._prefill is None else self._prefill
        journal._requeue(first, now, WaitCause.PREEMPTED, f"{how}: {reason}")

    def handed_over(self, first: EngineSequence, now: float) -> None:
        """To the decoding scheduler's queue."""
        assert self._decode is not None
        self._decode._requeue(first, now, WaitCause.HANDED_OVER, "")

    def ended(self, seq: EngineSequence, now: float) -> None:
        history = self._history(seq)
        if history is not None:  # else it never began
            history.end = now

    def closed(self, request_id: str) -> None:
        """All sequences of a request have ended."""
        ended = self._histories.ended
        ended[request_id] = self._histories.live.pop(request_id)
        ended.move_to_end(request_id)
        if len(ended) > MAX_ENDED_REQUESTS:
            ended.popitem(last=False)

    # -- one step -----------------------------------------------------------------------------

    def begin(self, now: float) -> None:
        """A step begins: what was found before holds until here."""
        self._now = now
        for mark in self._open:
            mark.until = now
        self._open.clear()
        self._heads = []

    def take_new_heads(self) -> list[EngineSequence]:
        """Those of the queues, noted."""
        heads = self._queues.take_new_heads()
        for seq in heads:
            last = self._last_mark(seq)
            if last is None or last.turns is not self._turns:
                continue  # it has ended, or went to the other pool
            is_head = self._queues.is_head(seq)
            is_new = (is_head, seq.rank) != (last.is_head, last.rank)
            if is_new and seq.status is SequenceStatus.WAITING:
                self._mark_place(seq, self._now, is_head=is_head)
        return heads

    def looked(self, head: EngineSequence, cause: WaitCause | None) -> None:
        """The step considered a head: why it waits, or None when it was admitted."""
        self._heads.append(LookedHead(head.id, head.tenant, head.rank, self._counter(head), cause))
        last = self._last_mark(head)
        assert last is not None
        if cause is None:
            self._add(head, Mark(self._now, None, False, head.rank, self._turns))
        elif last.cause is cause and last.until in (None, self._now):
            last.until = None
            self._open.append(last)
        else:
            mark = Mark(self._now, cause, last.is_head, head.rank, self._turns)
            self._open.append(mark)
            self._add(head, mark)

    def stopped(self, cause: WaitCause | None, head: EngineSequence | None) -> None:
        """The step admits no more. `head`: whose turn would have been next."""
        if head is None or cause is None:
            cause = head = None
        else:
            self.looked(head, cause)
        self._stopped_by = cause
        turn = Turn(
            self._now,
            cause if cause is WaitCause.PREEMPTING else None,
            head.rank if head is not None else None,
        )
        if not self._turns or self._turns[-1][1:] != turn[1:]:
            self._turns.append(turn)
            if len(self._turns) > 2 * MAX_TURNS:
                del self._turns[:MAX_TURNS]

    def planned(
        self, plan: StepPlan, num_decodes: int, num_running: int, num_free_blocks: int
    ) -> None:
        """The step's plan is made."""
        stage = "decode" if self._prefill else "prefill" if self._decode else "all"
        record = StepRecord(
            stage=stage,
            step=plan.step,
            at=self._now,
            decodes=tuple([chunk.seq.id for chunk in plan.chunks[:num_decodes]]),
            prompts=tuple(
                PromptChunk(seq.id, seq.tenant, start, num_tokens)
                for seq, start, num_tokens, _ in plan.chunks[num_decodes:]
            ),
            admitted=tuple([seq.id for seq in plan.admitted]),
            preempted=tuple([seq.id for seq in plan.preempted]),
            heads=tuple(self._heads),
            stopped_by=self._stopped_by,
            num_running=num_running,
            num_waiting=len(self._queues),
            num_free_blocks=num_free_blocks,
        )
        self._histories.steps.append(record)

    # -- what is asked ------------------------------------------------------------------------

    def recent_steps(self, limit: int) -> tuple[StepRecord, ...]:
        """The newest, oldest first, of all the engine's schedulers."""
        return tuple(self._histories.steps)[-limit:]

    def explain(self, request_id: str, now: float) -> Explanation | None:
        """Of a live request, or one that ended not long ago."""
        histories = self._histories
        request = histories.live.get(request_id) or histories.ended.get(request_id)
        if request is None:
            return None
        sequences = (
            SequenceExplanation(
                index,
                history.end is not None,
                _merged(_intervals(history.marks, now if history.end is None else history.end)),
            )
            for index, history in sorted(request.sequences.items())
        )
        return Explanation(request_id, request.tenant, tuple(sequences))

    # -- marks --------------------------------------------------------------------------------

    def _requeue(self, first: EngineSequence, now: float, cause: WaitCause, detail: str) -> None:
        """Back in this scheduler's queue, perhaps before whoever was its head."""
        is_head = self._queues.is_head(first)
        mark = Mark(now, cause, is_head, first.rank, self._turns, detail)
        self._open.append(mark)
        self._add(first, mark)
        behind = self._queues.next_head(first, {first.id}) if is_head else None
        if behind is not None:
            last = self._last_mark(behind)
            if last is not None and last.is_head and last.until is None:
                last.is_head = False
            elif last is not None and last.is_head:
                self._mark_place(behind, now, is_head=False)

    def _mark_place(self, seq: EngineSequence, now: float, *, is_head: bool) -> None:
        """It became its queue's head, which no step has looked at yet, or is it no longer."""
        until = now if is_head else None
        mark = Mark(now, WaitCause.OWN_QUEUE, is_head, seq.rank, self._turns, until=until)
        self._add(seq, mark)

    def _history(self, seq: EngineSequence) -> History | None:
        request = self._histories.live.get(seq.request_id)
        return request.sequences.get(seq.index) if request is not None else None

    def _last_mark(self, seq: EngineSequence) -> Mark | None:
        history = self._history(seq)
        return history.marks[-1] if history is not None else None

    def _add(self, seq: EngineSequence, mark: Mark) -> None:
        marks = self._histories.live[seq.request_id].sequences[seq.index].marks
        marks.append(mark)
        if len(marks) > MAX_MARKS:
            first = marks[MAX_FIRST_MARKS]
            forgotten = Mark(first.at, WaitCause.UNRECORDED, False, first.rank, first.turns)
            marks[MAX_FIRST_MARKS : MAX_MARKS // 2] = [forgotten]


def _intervals(marks: Sequence[Mark], end: float) -> Iterator[Interval]:
    """Each from where the one before ends, from the first mark to the end; some are empty."""
    ends = [*(mark.at for mark in marks[1:]), end]
    for mark, following in zip(marks, ends, strict=True):
        until = following if mark.until is None else min(mark.until, following)
        yield Interval(mark.cause, mark.at, until, mark.detail)
        if not mark.is_head:
            yield Interval(WaitCause.OWN_QUEUE, until, following)
        elif until < following:
            yield from _passed_over(mark, until, following)


def _passed_over(mark: Mark, start: float, end: float) -> Iterator[Interval]:
    """What befell a queue head that no step looked at meanwhile."""
    turns = mark.turns
    index = bisect_right(turns, start, key=lambda turn: turn.at) - 1
    if index < 0:
        index = 0
        known = min(end, turns[0].at) if turns else end
        yield Interval(WaitCause.UNRECORDED, start, known)
        start = known
    while start < end:
        turn = turns[index]
        index += 1
        until = min(end, turns[index].at) if index < len(turns) else end
        if turn.cause is not None:
            cause = turn.cause
        elif turn.rank is None:
            cause = WaitCause.UNRECORDED
        else:
            cause = WaitCause.FAIR_SHARE if turn.rank == mark.rank else WaitCause.CLASS
        yield Interval(cause, start, until)
        start = until


def _merged(intervals: Iterator[Interval]) -> tuple[Interval, ...]:
    """Without empty ones, and equal neighbours as one."""
    merged: list[Interval] = []
    for one in intervals:
        if one.start == one.end:
            continue
        last = merged[-1] if merged else None
        if last is not None and (last.cause, last.detail) == (one.cause, one.detail):
            one = Interval(one.cause, last.start, one.end, one.detail)
            merged.pop()
        merged.append(one)
    return tuple(merged)
