"""EngineCore: one step is schedule, execute, update. Everything else is bookkeeping of events."""

from collections.abc import Callable
from dataclasses import dataclass

from engine.arrival import make_sequences
from engine.beam_search import BeamScorer
from engine.config import EngineConfig
from engine.deadlines import Deadlines
from engine.detokenizer import TokenBytes
from engine.errors import ConfigError, DuplicateRequestError
from engine.events import (
    Event,
    PromptScored,
    StageName,
    TokenLogprobs,
    TokensGenerated,
)
from engine.outcome import admissions, finished, group_finished, preemptions, step_finished
from engine.output_lengths import OutputLengths
from engine.plan import Runner, ScheduledChunk, StepOutput, StepPlan
from engine.scheduling.policies import Policy
from engine.scheduling.scheduler import Scheduler
from engine.sequence import (
    Constraint,
    FinishReason,
    SamplingParams,
    Sequence,
    SequenceGroup,
    SequenceStatus,
    TenantShare,
)
from engine.waits import Explanation, StepRecord


@dataclass(frozen=True, slots=True)
class Stage:
    """A scheduler and the runner that executes its plans."""

    name: StageName
    scheduler: Scheduler
    runner: Runner


class EngineCore:
    """Drives one scheduler and one runner, or two of each; single-threaded.

    `clock` is called for every timestamp: time.monotonic in a server, a virtual clock that the
    runner advances in a simulation. `token_bytes` may be None where nobody reads text.

    With `config.prefill_cache`, prompts are computed by `prefill_runner` in a pool of their own,
    and their KV is handed over to the other pool, where `runner` decodes (DistServe, OSDI'24).
    What decodes slowly holds its blocks of the prefill pool, and so holds prefills back.
    """

    def __init__(
        self,
        config: EngineConfig,
        runner: Runner,
        *,
        clock: Callable[[], float],
        token_bytes: TokenBytes | None = None,
        eos_token_ids: frozenset[int] = frozenset(),
        prefill_runner: Runner | None = None,
    ) -> None:
        self.config = config
        self._clock = clock
        self._token_bytes = token_bytes
        self._eos_token_ids = eos_token_ids
        self._requests: dict[str, tuple[Sequence, ...]] = {}
        self._scorers: dict[str, BeamScorer] = {}
        self._deadlines = Deadlines()
        self.output_lengths = OutputLengths()
        self.stages = _stages(config, runner, prefill_runner)
        self.scheduler = self.stages[0].scheduler  # where sequences arrive
        self._journal = self.scheduler.journal  # all stages' journals answer the same

    @property
    def has_work(self) -> bool:
        return bool(self._requests)

    def add(
        self,
        request_id: str,
        prompt_token_ids: tuple[int, ...],
        params: SamplingParams,
        *,
        share: TenantShare,
        namespace: str,
        use_prefix_cache: bool = True,
        constraint: Constraint | None = None,
        deadline_seconds: float | None = None,
    ) -> None:
        """Queue the sequences of a request. Raises NeverFitsError or DuplicateRequestError.

        constraint        `params.grammar`, compiled, at its beginning
        deadline_seconds  from now on; what is not done by then is of no use, and is ended
        """
        if request_id in self._requests:
            raise DuplicateRequestError(f"request {request_id} is already in the engine")
        for stage in self.stages:
            stage.scheduler.check_fits(len(prompt_token_ids), params, share)
        arrived = self._clock()
        ends = params.stop_token_ids | (frozenset() if params.ignore_eos else self._eos_token_ids)
        sequences = make_sequences(
            request_id,
            prompt_token_ids,
            params,
            share=share,
            namespace=namespace,
            arrived=arrived,
            deadline=None if deadline_seconds is None else arrived + deadline_seconds,
            use_prefix_cache=use_prefix_cache,
            end_token_ids=ends,
            token_bytes=self._token_bytes,
            constraint=constraint,
        )
        self.scheduler.add(sequences[0])
        self._requests[request_id] = sequences
        if params.beam is not None:
            self._scorers[request_id] = BeamScorer(params.beam, ends, params.max_tokens)
        if sequences[0].deadline is not None:
            self._deadlines.set(request_id, sequences[0].deadline)

    def adopt(self, sequences: tuple[Sequence, ...]) -> None:
        """Take over a request as another core had it, for a look at what comes next."""
        self.scheduler.adopt(sequences[0])
        self._requests[sequences[0].id] = sequences
        if sequences[0].deadline is not None:
            self._deadlines.set(sequences[0].id, sequences[0].deadline)

    def abort(self, request_id: str) -> list[Event]:
        """End a request at once, wherever it is; no events if no such request is live."""
        return self._finish_all(self._requests.get(request_id, ()), FinishReason.ABORT)

    def reset_prefix_cache(self, tenant: str | None = None) -> int:
        """Forget cached prefixes, of one tenant or of all; how many blocks became free."""
        return sum(stage.scheduler.memory.reset_cache(tenant) for stage in self.stages)

    def explain(self, request_id: str) -> Explanation | None:
        """Where a request's time went; None if it is unknown, or ended long ago."""
        return self._journal.explain(request_id, self._clock())

    def recent_steps(self, limit: int) -> tuple[StepRecord, ...]:
        """What the last steps decided, oldest first."""
        return self._journal.recent_steps(limit)

    def switch_policy(self, policy: Policy) -> None:
        """Schedule by another policy from the next step on; nothing is lost."""
        for stage in self.stages:
            stage.scheduler.switch_policy(policy)

    # -- one step -----------------------------------------------------------------------------

    def step(self) -> list[Event]:
        """Run one step. A failure of the runner ends that step's sequences, not the loop."""
        events = self._expire()
        for stage in self.stages:
            events += self._step(stage)
        if self.config.check_invariants:
            for stage in self.stages:
                stage.scheduler.check()
        return events

    def _expire(self) -> list[Event]:
        """End what nobody waits for any more, wherever it is."""
        return [
            event
            for request_id in self._deadlines.passed(self._clock())
            for event in self._finish_all(self._requests[request_id], FinishReason.DEADLINE)
        ]

    def _step(self, stage: Stage) -> list[Event]:
        scheduler = stage.scheduler
        if not scheduler.has_work:
            return []
        started = self._clock()
        plan = scheduler.schedule(started)
        scheduled = self._clock()
        events = preemptions(plan.preempted, started) + admissions(stage.name, plan, started)
        for seq in plan.too_late:
            events += self._finish_all(self._requests[seq.request_id], FinishReason.DEADLINE)
        output = StepOutput({})
        if not plan.is_empty:
            try:
                output = stage.runner.execute(plan)
            except Exception as error:  # the boundary to tensors: whatever it is, it ends here
                return events + self._fail(scheduler, plan, error)
        executed = self._clock()
        events += self._update(scheduler, plan, output, executed)
        if stage is not self.stages[-1]:
            scheduler.hand_over(executed)
        if not plan.is_empty:
            scheduler.costs.observe(plan, executed - scheduled, output.swap_seconds)
            scheduler.step_times.observe(plan, self._clock() - started - output.swap_seconds)
            times = (started, scheduled, executed)
            events.append(step_finished(stage.name, scheduler, plan, times))
        return events

    def _fail(self, scheduler: Scheduler, plan: StepPlan, error: Exception) -> list[Event]:
        """A step that was not executed ends its sequences; others it touched compute again."""
        message = f"{type(error).__name__}: {error}"
        events: list[Event] = []
        now = self._clock()
        scheduler.memory.commit(now)  # before an end says what its sequence held
        for chunk in plan.chunks:
            events += self._finish_all(chunk.seq.gang, FinishReason.ERROR, message, discard=True)
        return events + preemptions(scheduler.fail(plan, now), now)

    def _update(
        self, scheduler: Scheduler, plan: StepPlan, output: StepOutput, executed: float
    ) -> list[Event]:
        scheduler.update(plan, output.token_ids, executed)
        events: list[Event] = []
        searches: dict[str, SequenceGroup] = {}
        for chunk in plan.chunks:
            if chunk.seq.id in output.errors and chunk.seq.scores_prompt:
                # All that share the prompt share what is wrong with it.
                group, error = chunk.seq.group, output.errors[chunk.seq.id]
                sharing = (chunk.seq,) if group is None else group.sequences
                events += self._finish_all(sharing, FinishReason.ERROR, error, discard=True)
                continue
            events += self._score_prompt(chunk, output)
            if chunk.seq.params.max_tokens == 0:
                if chunk.seq.num_uncomputed_tokens == 0:
                    events += self._finish_all(chunk.seq.gang, FinishReason.LENGTH)
                continue
            for seq in chunk.draws:
                if seq.id not in output.token_ids:
                    refusal = output.refusals.get(seq.id)
                    error = refusal or output.errors.get(seq.id, "the model returned no token")
                    ended = seq.gang if seq.is_beam else (seq,)
                    discard = refusal is None
                    events += self._finish_all(ended, FinishReason.ERROR, error, discard=discard)
                elif seq.is_beam:
                    assert seq.group is not None
                    searches[seq.request_id] = seq.group
                else:
                    events += self._accept(seq, output)
        for group in searches.values():
            events += self._search(scheduler, group, output)
        return events

    def _score_prompt(self, chunk: ScheduledChunk, output: StepOutput) -> list[Event]:
        """Collect logprobs of prompt tokens; after a preemption they come again and are dropped."""
        seq = chunk.seq
        if not seq.scores_prompt:
            return []
        found = output.prompt_logprobs.get(seq.id, ())
        seq.prompt_logprobs += found[len(seq.prompt_logprobs) - chunk.start :]
        if seq.num_computed_tokens < seq.num_prompt_tokens:
            return []
        seq.is_prompt_scored = True
        return [
            PromptScored(
                request_id=seq.request_id,
                tenant=seq.tenant,
                at=self._clock(),
                logprobs=tuple(seq.prompt_logprobs),
            )
        ]

    # -- tokens -------------------------------------------------------------------------------

    def _accept(self, seq: Sequence, output: StepOutput) -> list[Event]:
        """What a new token means: its text, and whether it is the last."""
        token_id, params = output.token_ids[seq.id], seq.params
        logprobs = output.logprobs.get(seq.id)
        if logprobs is not None:
            seq.cumulative_logprob += logprobs.logprob
        may_stop = seq.num_output_tokens >= params.min_tokens
        ends = may_stop and token_id in seq.end_token_ids
        # The token that ends a sequence is counted but not shown.
        text = ""
        if seq.detokenizer and not ends:
            text = seq.detokenizer.push(token_id, may_stop=may_stop)
        events = [
            self._generated(seq, (token_id,), text, (logprobs,) if logprobs is not None else ())
        ]
        if ends or (seq.detokenizer is not None and seq.detokenizer.stopped):
            return events + self._finish(seq, FinishReason.STOP)
        if seq.constraint is not None and not seq.constraint.accept(token_id):
            error = f"the grammar does not allow token {token_id}, which was drawn"
            return events + self._finish(seq, FinishReason.ERROR, error)
        if seq.constraint is not None and seq.constraint.is_finished:
            return events + self._finish(seq, FinishReason.STOP)
        if seq.num_output_tokens >= params.max_tokens:
            return events + self._finish(seq, FinishReason.LENGTH)
        return events

    def _generated(
        self,
        seq: Sequence,
        token_ids: tuple[int, ...],
        text: str,
        logprobs: tuple[TokenLogprobs, ...] = (),
    ) -> Event:
        now = self._clock()
        if seq.first_token is None:
            seq.first_token = now
        return TokensGenerated(
            request_id=seq.request_id,
            index=seq.index,
            tenant=seq.tenant,
            at=now,
            token_ids=token_ids,
            text=text,
            logprobs=logprobs,
        )

    def _search(
        self, scheduler: Scheduler, group: SequenceGroup, output: StepOutput
    ) -> list[Event]:
        """Extend all beams by one token, or end the search with its hypotheses, best first."""
        beams = group.sequences
        if any(beam.id not in output.logprobs for beam in beams):
            return []  # one failed, and all ended
        scorer = self._scorers[beams[0].request_id]
        outputs = [beam.token_ids[beam.num_prompt_tokens :] for beam in beams]
        choices = scorer.advance(outputs, [output.logprobs[beam.id].top for beam in beams])
        if choices:
            scheduler.memory.extend_beams(beams, choices)
            return []
        events: list[Event] = []
        for beam, hypothesis in zip(beams, scorer.finished, strict=False):
            shown = hypothesis.token_ids[:-1] if hypothesis.is_stopped else hypothesis.token_ids
            decoder = beam.detokenizer
            text = "".join(map(decoder.push, shown)) if decoder is not None else ""
            events.append(self._generated(beam, hypothesis.token_ids, text))
            beam.cumulative_logprob = hypothesis.score
            reason = FinishReason.STOP if hypothesis.is_stopped else FinishReason.LENGTH
            events += self._finish(beam, reason)
        return events + self._finish_all(beams, FinishReason.LENGTH)

    # -- ends ---------------------------------------------------------------------------------

    def _finish_all(
        self,
        sequences: tuple[Sequence, ...],
        reason: FinishReason,
        error: str | None = None,
        *,
        discard: bool = False,
    ) -> list[Event]:
        return [
            event
            for seq in sequences
            if seq.status is not SequenceStatus.FINISHED
            for event in self._finish(seq, reason, error, discard=discard)
        ]

    def _finish(
        self,
        seq: Sequence,
        reason: FinishReason,
        error: str | None = None,
        *,
        discard: bool = False,
    ) -> list[Event]:
        """The one end of a sequence. With `discard`, what it computed before may be bad as well,
        and nobody may find it again."""
        now = self._clock()
        for stage in self.stages:
            if stage.scheduler.owns(seq):
                stage.scheduler.finish(seq, now, discard=discard)
        seq.status = SequenceStatus.FINISHED
        self._journal.ended(seq, now)
        if reason in (FinishReason.STOP, FinishReason.LENGTH) and seq.params.max_tokens:
            stopped = reason is FinishReason.STOP
            self.output_lengths.observe(seq.tenant, seq.num_output_tokens, stopped=stopped)
        events: list[Event] = [finished(seq, reason, now, error)]
        group = seq.group
        if group is not None:
            group.num_live -= 1
            if group.num_live:
                return events
            if group.is_forked:
                events.append(group_finished(group, self._clock()))
        del self._requests[seq.request_id]
        self._scorers.pop(seq.request_id, None)
        self._deadlines.drop(seq.request_id)
        self._journal.closed(seq.request_id)
        return events


def _stages(
    config: EngineConfig, runner: Runner, prefill_runner: Runner | None
) -> tuple[Stage, ...]:
    if (prefill_runner is None) != (config.prefill_cache is None):
        raise ConfigError("prefill_cache and a prefill runner go together: give both or neither")
    if prefill_runner is None or config.prefill_cache is None:
        return (Stage("all", Scheduler(config.scheduler, config.cache), runner),)
    prefill = Scheduler(config.scheduler, config.prefill_cache)
    decode = Scheduler(config.scheduler, config.cache, prefill)
    return (Stage("prefill", prefill, prefill_runner), Stage("decode", decode, runner))
