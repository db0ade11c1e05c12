"""Weights, tokenizer, transformer and sampler: from a StepPlan to token ids."""

import os

# torch's OpenMP threads otherwise spin while they wait for one another. Where the process shares
# its cores, with its own event loop too, a spinning thread keeps the one it waits for off the
# core: measured on two cores beside one busy process, a step took twelve times as long. OpenMP
# reads this once, when torch is first imported, and every import of this package comes before.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
