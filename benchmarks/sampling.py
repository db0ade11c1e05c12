"""What choosing tokens costs, without the model: the median over steps, in milliseconds.

    OMP_WAIT_POLICY=passive python benchmarks/sampling.py [vocab_size]

32 sequences of 500 tokens over random logits; each line turns a feature on in no, one or all rows.
"""

import sys
import time
from statistics import median
from typing import Any

import torch

from engine.model.logprobs import select, tagged_logprobs, untagged
from engine.model.sampler import Sampler
from engine.sequence import SamplingParams, Sequence, TenantShare

NUM_SEQS, NUM_STEPS, PROMPT_TOKENS = 32, 20, 500
PENALTIES = {"repetition_penalty": 1.1, "frequency_penalty": 0.2, "presence_penalty": 0.1}
BARS = {
    "logit_bias": tuple((7 * i, 0.5) for i in range(300)),
    "bad_words": tuple((i, i + 1) for i in range(100)),
    "min_tokens": 100_000,
}
FEATURES: dict[str, dict[str, Any]] = {
    "min_p": {"min_p": 0.05},
    "top_k": {"top_k": 50},
    "top_p": {"top_p": 0.9},
    "penalties": PENALTIES,
    "bias, bad words, min_tokens": BARS,
    "logprobs": {"logprobs": 20},
    "all of them": {"min_p": 0.05, "top_k": 50, "top_p": 0.9, "logprobs": 20, **PENALTIES, **BARS},
}


def sequences(num_with: int, params: dict[str, Any]) -> list[Sequence]:
    return [
        Sequence(
            id=str(i),
            share=TenantShare(tenant="t"),
            namespace="t",
            token_ids=[(31 * i + 17 * j) % 32_000 for j in range(PROMPT_TOKENS)],
            params=SamplingParams(max_tokens=1, seed=i, **(params if i < num_with else {})),
            arrived=0.0,
        )
        for i in range(NUM_SEQS)
    ]


def step_seconds(sampler: Sampler, seqs: list[Sequence], logits: torch.Tensor) -> float:
    logits = logits.clone()
    began = time.perf_counter()
    asked = [i for i, seq in enumerate(seqs) if seq.params.logprobs is not None]
    tagged = tagged_logprobs(logits.index_select(0, torch.tensor(asked))) if asked else None
    chosen = sampler.next_tokens(logits, seqs)
    if tagged is not None:
        num_top = [seqs[i].params.logprobs or 0 for i in asked]
        untagged(select(tagged, chosen[asked], max(num_top)), num_top)
    token_ids = chosen.tolist()
    seconds = time.perf_counter() - began
    for seq, token_id in zip(seqs, token_ids, strict=True):
        seq.token_ids.append(token_id)
    return seconds


def median_ms(num_with: int, params: dict[str, Any], logits: torch.Tensor) -> float:
    sampler = Sampler(logits.shape[1], frozenset({0, 2}), logits.device)
    seqs = sequences(num_with, params)
    step_seconds(sampler, seqs, logits)  # fills the cache of counts
    return 1e3 * median(step_seconds(sampler, seqs, logits) for _ in range(NUM_STEPS))


def main() -> None:
    vocab_size = int(sys.argv[1]) if len(sys.argv) > 1 else 49_152
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    logits = torch.randn(NUM_SEQS, vocab_size, device=device) * 3
    print(f"{NUM_SEQS} rows, vocabulary {vocab_size}, {device}, {torch.get_num_threads()} threads")
    print(f"{'':28} {'no row':>8} {'one row':>8} {'all rows':>8}")
    cold = median_ms(NUM_SEQS, {"temperature": 0.0}, logits)
    print(f"{'greedy':28} {'':8} {'':8} {cold:8.1f}")
    none = median_ms(0, {}, logits)
    for name, params in FEATURES.items():
        one, every = (median_ms(n, params, logits) for n in (1, NUM_SEQS))
        print(f"{name:28} {none:8.1f} {one:8.1f} {every:8.1f}")


if __name__ == "__main__":
    with torch.inference_mode():
        main()
