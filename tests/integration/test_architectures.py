"""Every family: the same numbers as transformers' on the same weights, from a folder and a GGUF."""

from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from engine.config import CacheConfig
from engine.kernels import Span
from engine.model.loader import LoadedModel, load_model
from engine.model.runner import ModelRunner
from engine.sequence import SamplingParams
from tests.model_oracle import BLOCK_SIZE, generate, oracle_greedy, oracle_logits, sequence
from tests.tiny_models import save_folder, tiny_oracle, write_gguf

CACHE = CacheConfig(num_blocks=160, block_size=BLOCK_SIZE)


def chunked_logits(model: LoadedModel, prompt: list[int], chunk_tokens: int) -> torch.Tensor:
    """Logits after each token of a prompt that is computed in chunks of this size."""
    runner = ModelRunner(model, CACHE)
    params = SamplingParams(max_tokens=1, temperature=0)
    table = sequence("s", prompt, params, count()).block_table
    logits = []
    with torch.inference_mode():
        for tokens in torch.arange(len(prompt)).split(chunk_tokens):
            span = Span(int(tokens[0]), len(tokens), table)
            batch = runner._attention.prepare([span], runner.cache.layers[0])
            hidden = model.network.forward(
                torch.tensor(prompt)[tokens], tokens, runner.cache, runner._attention, batch
            )
            logits.append(model.network.logits(hidden))
    return torch.cat(logits)


def prompt_of(num_tokens: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(256, (num_tokens,), generator=generator).tolist()


def check(model: LoadedModel, oracle: PreTrainedModel, num_tokens: int = 100) -> None:
    """Logits of a prompt whole and in chunks, and greedy tokens of a mixed batch."""
    prompt = prompt_of(num_tokens)
    expected = oracle_logits(oracle, prompt)
    for chunk_tokens in (num_tokens, 23, 1):
        torch.testing.assert_close(
            chunked_logits(model, prompt, chunk_tokens), expected, atol=1e-4, rtol=1e-4
        )
    prompts = [prompt_of(n, seed=n) for n in (1, 17, 40)]
    params = [SamplingParams(max_tokens=20, temperature=0)] * 3
    greedy = [oracle_greedy(oracle, p, 20) for p in prompts]
    assert len({tuple(tokens) for tokens in greedy}) == 3
    assert generate(ModelRunner(model, CACHE), prompts, params, chunk_tokens=9) == greedy


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "gemma3"])
def test_a_folder_and_a_gguf_equal_transformers(family: str, tied: bool, tmp_path: Path) -> None:
    oracle = tiny_oracle(family, tie_word_embeddings=tied)

    check(load_model(save_folder(oracle, tmp_path / "folder"), device="cpu"), oracle)
    from_gguf = load_model(write_gguf(tmp_path / "model.gguf", oracle), device="cpu")
    torch.testing.assert_close(
        chunked_logits(from_gguf, prompt_of(100), 23),
        oracle_logits(oracle, prompt_of(100)),
        atol=1e-4,
        rtol=1e-4,
    )
