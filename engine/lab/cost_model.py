"""How long one step takes on some device: a line over what the step computes and reads."""

from dataclasses import dataclass

from engine.plan import StepPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearCost:
    """Seconds of a step. Weights are read once, whatever the step mixes: that is `step`."""

    step: float
    prompt_token: float  # each token of a chunk of several: bound by arithmetic
    decode: float  # each sequence that computes one token
    context_token: float  # each earlier token whose keys and values are read

    def seconds(self, plan: StepPlan) -> float:
        prompt_tokens, decodes, context = 0, 0, 0
        for _, start, num_tokens, _ in plan.chunks:
            context += start
            if num_tokens == 1:
                decodes += 1
            else:
                prompt_tokens += num_tokens
        return (
            self.step
            + self.prompt_token * prompt_tokens
            + self.decode * decodes
            + self.context_token * context
        )
