"""Output tokens per second of the model runner alone, without scheduler and server.

    OMP_WAIT_POLICY=passive python benchmarks/decode.py [context]

Sequences of `context` tokens (200) decode greedily side by side; the median step counts.
"""

import sys
import time
from statistics import median

import torch

from engine.config import CacheConfig
from engine.model.default_model import find_default_model
from engine.model.loader import load_model
from engine.model.runner import ModelRunner
from engine.plan import ScheduledChunk, StepPlan
from engine.sequence import SamplingParams, Sequence, TenantShare

BLOCK_SIZE, NUM_STEPS = 16, 30


def sequences(num_seqs: int, context: int) -> list[Sequence]:
    """Sequences whose blocks lie interleaved in the pool, as they do after concurrent growth."""
    num_blocks = (context + NUM_STEPS) // BLOCK_SIZE + 1
    made = []
    for i in range(num_seqs):
        seq = Sequence(
            id=str(i),
            share=TenantShare(tenant="t"),
            namespace="t",
            token_ids=[100 + (31 * i + 17 * j) % 40_000 for j in range(context)],
            params=SamplingParams(max_tokens=NUM_STEPS + 1, temperature=0),
            arrived=0.0,
        )
        seq.block_table = [i + j * num_seqs for j in range(num_blocks)]
        made.append(seq)
    return made


def step(runner: ModelRunner, seqs: list[Sequence]) -> float:
    """Compute all that is uncomputed, append a token to each; seconds that it took."""
    chunks = [ScheduledChunk(s, s.num_computed_tokens, s.num_uncomputed_tokens, (s,)) for s in seqs]
    began = time.perf_counter()
    output = runner.execute(StepPlan(0, tuple(chunks)))
    seconds = time.perf_counter() - began
    for seq in seqs:
        seq.num_computed_tokens = seq.num_tokens
        seq.token_ids.append(output.token_ids[seq.id])
    return seconds


def main() -> None:
    context = int(sys.argv[1]) if len(sys.argv) > 1 else 200
    model = load_model(find_default_model())
    num_blocks = 32 * ((context + NUM_STEPS) // BLOCK_SIZE + 1)
    runner = ModelRunner(model, CacheConfig(num_blocks=num_blocks, block_size=BLOCK_SIZE))
    print(f"{model.name}, {model.dtype}, {torch.get_num_threads()} threads, context {context}")
    for num_seqs in (1, 4, 16, 32):
        seqs = sequences(num_seqs, context)
        prefill = sum(step(runner, [seq]) for seq in seqs)
        decode = median(step(runner, seqs) for _ in range(NUM_STEPS))
        print(
            f"{num_seqs:2} sequences: prefill {num_seqs * context / prefill:6.0f} tok/s, "
            f"step {decode * 1e3:6.1f} ms, decode {num_seqs / decode:6.0f} tok/s"
        )


if __name__ == "__main__":
    main()
