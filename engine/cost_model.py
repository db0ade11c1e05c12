"""How long one step takes: a line over what the step computes and reads, given or learned."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from engine.plan import StepPlan

FORGETTING = 0.99  # weight of a step when another of its kind has come
MIN_STEPS = 8  # before anything is said
REFIT_EVERY = 32  # steps
STALE_AFTER = 32  # steps without a prompt
MAX_SWEEPS = 200
CONVERGED = 1e-4  # relative change of a price in one sweep


class Work(NamedTuple):
    """What a step does."""

    steps: float
    prompt_tokens: float
    decodes: float
    context_tokens: float


def work_of(plan: StepPlan) -> Work:
    """Of a plan. A lone token of a prompt costs what a decode does."""
    prompt_tokens, decodes, context = 0, 0, 0
    for _, start, num_tokens, _ in plan.chunks:
        context += start
        if num_tokens == 1:
            decodes += 1
        else:
            prompt_tokens += num_tokens
    return Work(1, prompt_tokens, decodes, context)


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearCost:
    """Seconds of a step. Weights are read once, whatever the step mixes: that is `step`."""

    step: float
    prompt_token: float  # each token of a chunk of several: bound by arithmetic
    decode: float  # each sequence that computes one token
    context_token: float  # each earlier token whose keys and values are read

    def seconds(self, plan: StepPlan) -> float:
        return self.of(work_of(plan))

    def of(self, work: Work) -> float:
        return (
            self.step * work.steps
            + self.prompt_token * work.prompt_tokens
            + self.decode * work.decodes
            + self.context_token * work.context_tokens
        )

    def prompt_seconds(self, num_tokens: int, max_step_tokens: int) -> float:
        """Of so many tokens of one prompt, alone and in chunks as large as may be."""
        num_chunks = -(-num_tokens // max_step_tokens)
        context = max_step_tokens * num_chunks * (num_chunks - 1) // 2
        return self.of(Work(num_chunks, num_tokens, 0, context))


class StepTimes:
    """Learns a LinearCost from steps as they run: least squares of the relative error, no price
    below zero, recent steps first. Steps with prompts and without are forgotten apart, so that an
    hour of decodes leaves the price of prompts known."""

    def __init__(self) -> None:
        self._sums = {True: _Sums(), False: _Sums()}  # by whether prompts were computed
        self._num_new = 0  # steps since the last fit
        self._num_decodes = 0  # steps since the last one with a prompt
        self._is_given = False
        self._cost: LinearCost | None = None

    def assume(self, cost: LinearCost) -> None:
        """Learn nothing: this is what steps take."""
        self._cost, self._is_given = cost, True

    def observe(self, plan: StepPlan, seconds: float) -> None:
        """A step took so long."""
        if seconds <= 0 or self._is_given:
            return
        work = work_of(plan)
        has_prompts = work.prompt_tokens > 0
        self._sums[has_prompts].add(work, seconds)
        self._num_decodes = 0 if has_prompts else self._num_decodes + 1
        self._num_new += 1

    @property
    def cost(self) -> LinearCost | None:
        """None until enough was seen. Fitted when asked for: nobody may want it."""
        if self._num_new >= (MIN_STEPS if self._cost is None else REFIT_EVERY):
            self._cost, self._num_new = _fit(list(self._sums.values())), 0
        return self._cost

    @property
    def knows_prompts(self) -> bool:
        """Whether prompts were computed lately: else what they cost by now is to be found out."""
        return self._num_decodes < STALE_AFTER


class _Sums:
    """Normal equations of `price . work = seconds`, each step weighted by 1 / seconds²."""

    def __init__(self) -> None:
        size = len(Work._fields)
        self.products = [[0.0] * size for _ in range(size)]
        self.targets = [0.0] * size

    def add(self, work: Work, seconds: float) -> None:
        scaled = [part / seconds for part in work]
        for row, left in zip(self.products, scaled, strict=True):
            for column, right in enumerate(scaled):
                row[column] = FORGETTING * row[column] + left * right
        self.targets = [
            FORGETTING * target + part for target, part in zip(self.targets, scaled, strict=True)
        ]


def _fit(sums: Sequence[_Sums]) -> LinearCost:
    """Non-negative least squares by coordinate descent. What never occurred costs nothing."""
    size = range(len(Work._fields))
    products = [[sum(one.products[i][j] for one in sums) for j in size] for i in size]
    targets = [sum(one.targets[i] for one in sums) for i in size]
    prices = [0.0 for _ in size]
    for _ in range(MAX_SWEEPS):
        before = list(prices)
        for i in size:
            if products[i][i] > 0:
                others = sum(products[i][j] * prices[j] for j in size if j != i)
                prices[i] = max(0.0, (targets[i] - others) / products[i][i])
        if all(abs(new - old) <= CONVERGED * new for new, old in zip(prices, before, strict=True)):
            break
    step, prompt_token, decode, context_token = prices
    return LinearCost(
        step=step, prompt_token=prompt_token, decode=decode, context_token=context_token
    )
