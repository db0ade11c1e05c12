"""A runner without a model: it executes a plan by moving a clock. Everything else is real."""

from dataclasses import dataclass

from engine.cost_model import LinearCost
from engine.plan import StepOutput, StepPlan

TOKEN = 0  # every token that is drawn; requests end at `max_tokens`


@dataclass(slots=True)
class VirtualClock:
    """Seconds since the simulation began; stands still unless someone moves it."""

    now: float = 0.0

    def __call__(self) -> float:
        return self.now


@dataclass(frozen=True, slots=True)
class SimulatedRunner:
    """Give its clock to `EngineCore` too: a step then takes what the cost model says, and
    scheduling takes no time."""

    clock: VirtualClock
    cost: LinearCost

    def execute(self, plan: StepPlan) -> StepOutput:
        self.clock.now += self.cost.seconds(plan)
        return StepOutput({seq.id: TOKEN for chunk in plan.chunks for seq in chunk.draws})
