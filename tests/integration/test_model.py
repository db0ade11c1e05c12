"""Numbers of the model: the same as transformers' on the same weights, in every way of batching."""

import json
import random
import shutil
from itertools import count
from pathlib import Path

import pytest
import torch
from transformers import LlamaForCausalLM

from engine.config import CacheConfig
from engine.errors import ConfigError, ModelLoadError
from engine.kernels import Span, attention_for
from engine.model.loader import LoadedModel, load_model
from engine.model.runner import ModelRunner, blocks_for_memory
from engine.plan import ScheduledChunk, StepPlan
from engine.sequence import SamplingParams
from tests.model_oracle import (
    BLOCK_SIZE,
    default_model,
    default_oracle,
    generate,
    oracle_greedy,
    oracle_logits,
    save_tiny_llama,
    sequence,
)

CACHE = CacheConfig(num_blocks=160, block_size=BLOCK_SIZE)


def greedy(num_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=num_tokens, temperature=0)


def drawn(num_tokens: int, seed: int) -> SamplingParams:
    return SamplingParams(max_tokens=num_tokens, seed=seed, temperature=1.3, top_p=0.98)


def logits_of(model: LoadedModel, prompt: list[int]) -> torch.Tensor:
    """Logits after each token of a prompt that is computed as one chunk."""
    runner = ModelRunner(model, CACHE)
    attention = attention_for(model.device)
    seq = sequence("s", prompt, greedy(1), count())
    span = Span(0, len(prompt), seq.block_table)
    positions = torch.arange(len(prompt))
    with torch.inference_mode():
        batch = attention.prepare([span], runner.cache.layers[0])
        hidden = model.network.forward(
            torch.tensor(prompt), positions, runner.cache, attention, batch
        )
        return model.network.logits(hidden)


def random_prompts(lengths: list[int], vocab_size: int = 256) -> list[list[int]]:
    rng = random.Random(5)
    return [[rng.randrange(vocab_size) for _ in range(length)] for length in lengths]


# ------------------------------------------------------------------------- a tiny random llama


@pytest.fixture(scope="module", params=["tied", "untied", "one-kv-head", "sharded"])
def tiny(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[LoadedModel, LlamaForCausalLM]:
    folder = tmp_path_factory.mktemp("tiny")
    oracle = save_tiny_llama(
        folder,
        tie_word_embeddings=request.param == "tied",
        num_key_value_heads=1 if request.param == "one-kv-head" else 2,
        rope_theta=500.0,
        max_shard_size="100KB" if request.param == "sharded" else "1GB",
    )
    assert (folder / "model.safetensors.index.json").exists() == (request.param == "sharded")
    return load_model(folder, device="cpu"), oracle


def test_tiny_logits_equal_the_oracle(tiny: tuple[LoadedModel, LlamaForCausalLM]) -> None:
    model, oracle = tiny
    (prompt,) = random_prompts([70])

    torch.testing.assert_close(
        logits_of(model, prompt), oracle_logits(oracle, prompt), atol=1e-4, rtol=1e-4
    )


@pytest.mark.parametrize("chunk_tokens", [10_000, 16, 7, 1])
def test_tiny_greedy_tokens_equal_the_oracle(
    tiny: tuple[LoadedModel, LlamaForCausalLM], chunk_tokens: int
) -> None:
    model, oracle = tiny
    prompts = random_prompts([1, 15, 16, 17, 60])

    got = generate(ModelRunner(model, CACHE), prompts, [greedy(24)] * 5, chunk_tokens=chunk_tokens)

    expected = [oracle_greedy(oracle, prompt, 24) for prompt in prompts]
    assert len({tuple(tokens) for tokens in expected}) > 1
    assert got == expected


def test_drawn_tokens_do_not_depend_on_batch_or_chunks(
    tiny: tuple[LoadedModel, LlamaForCausalLM],
) -> None:
    model, _ = tiny
    prompts = random_prompts([1, 15, 16, 17, 60])
    params = [drawn(24, 1), greedy(24), drawn(24, 2), drawn(24, 3), drawn(24, 2)]

    together = generate(ModelRunner(model, CACHE), prompts, params, chunk_tokens=9)
    alone = [
        generate(ModelRunner(model, CACHE), [prompt], [param])[0]
        for prompt, param in zip(prompts, params, strict=True)
    ]

    assert together == alone
    assert together[2] != together[4]


def test_what_a_block_held_before_never_matters(
    tiny: tuple[LoadedModel, LlamaForCausalLM],
) -> None:
    model, _ = tiny
    prompts, params = random_prompts([5, 40]), [greedy(20)] * 2
    runner, poisoned = ModelRunner(model, CACHE), ModelRunner(model, CACHE)
    for layer in poisoned.cache.layers:
        layer.fill_(float("nan"))

    assert generate(poisoned, prompts, params) == generate(runner, prompts, params)


def test_a_sequence_with_broken_logits_fails_alone(
    tiny: tuple[LoadedModel, LlamaForCausalLM],
) -> None:
    model, _ = tiny
    runner = ModelRunner(model, CACHE)
    blocks = count()
    seqs = [sequence(name, [1, 2, 3], greedy(4), blocks) for name in ("good", "bad")]
    chunks = tuple(ScheduledChunk(seq, 0, 3, (seq,)) for seq in seqs)
    healthy = runner.execute(StepPlan(0, chunks))
    runner.cache.layers[0][seqs[1].block_table[0]] = float("inf")
    for seq in seqs:
        seq.token_ids.append(healthy.token_ids[seq.id])

    output = runner.execute(StepPlan(1, tuple(ScheduledChunk(s, 3, 1, (s,)) for s in seqs)))

    assert set(output.token_ids) == {"good"}
    assert output.errors == {"bad": "the model's logits are not finite"}


def test_a_step_where_no_chunk_draws_yields_nothing(
    tiny: tuple[LoadedModel, LlamaForCausalLM],
) -> None:
    model, _ = tiny
    runner = ModelRunner(model, CACHE)
    seq = sequence("s", [1, 2, 3, 4], greedy(1), count())

    assert runner.execute(StepPlan(0, (ScheduledChunk(seq, 0, 3),))).token_ids == {}
    assert runner.execute(StepPlan(1, ())).token_ids == {}


def test_bfloat16_is_close_to_float32(
    tiny: tuple[LoadedModel, LlamaForCausalLM], tmp_path: Path
) -> None:
    _, oracle = tiny
    save_tiny_llama(tmp_path, **_shape_of(oracle))
    half = load_model(tmp_path, device="cpu", dtype="bfloat16")
    (prompt,) = random_prompts([50])

    got, expected = logits_of(half, prompt), oracle_logits(oracle, prompt)

    assert half.network.embedding.dtype == torch.bfloat16
    assert 0 < (got - expected).norm() / expected.norm() < 0.05


def _shape_of(oracle: LlamaForCausalLM) -> dict[str, object]:
    return {
        "tie_word_embeddings": oracle.config.tie_word_embeddings,
        "num_key_value_heads": oracle.config.num_key_value_heads,
        "rope_theta": 500.0,
    }


def test_blocks_for_memory_counts_keys_and_values_of_all_layers(
    tiny: tuple[LoadedModel, LlamaForCausalLM],
) -> None:
    model, _ = tiny
    block_bytes = 16 * 3 * 2 * model.config.num_kv_heads * 16 * 4

    assert blocks_for_memory(model, 10 * block_bytes + 1, 16) == 10
    assert sum(t.nbytes for t in ModelRunner(model, CACHE).cache.layers) == 160 * block_bytes
    with pytest.raises(ConfigError, match="hold no block of 16 tokens"):
        blocks_for_memory(model, block_bytes - 1, 16)


# ---------------------------------------------------------------------------- files that fail


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    save_tiny_llama(folder)
    return folder


@pytest.fixture
def folder(saved: Path, tmp_path: Path) -> Path:
    shutil.copytree(saved, tmp_path / "model")
    return tmp_path / "model"


def _edit(path: Path, **changes: object) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "mamba"}, "architecture 'mamba' are not supported; supported: .*llama"),
        ({"hidden_size": 64}, "has shape .* where the configuration says"),
        ({"num_hidden_layers": 4}, "has no tensor model.layers.3"),
        ({"num_hidden_layers": 2}, "9 tensors of the checkpoint have no use"),
        ({"hidden_size": None}, "no usable hidden_size"),
        ({"num_key_value_heads": 4}, "6 attention heads cannot share 4 KV heads"),
        ({"attention_bias": True}, "this model uses attention_bias, which is not supported"),
        ({"rope_parameters": {"rope_type": "dynamic"}}, "rotary scaling of type 'dynamic'"),
    ],
)
def test_a_config_that_does_not_fit_is_refused(
    folder: Path, changes: dict[str, object], message: str
) -> None:
    _edit(folder / "config.json", **changes)

    with pytest.raises(ModelLoadError, match=message):
        load_model(folder, device="cpu")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("config.json", "config.json cannot be read"),
        ("tokenizer.json", "fetch the model"),
        ("model.safetensors", "not a readable safetensors file"),
    ],
)
def test_a_damaged_file_is_refused(folder: Path, name: str, message: str) -> None:
    content = (folder / name).read_bytes()
    (folder / name).write_bytes(content[: len(content) // 2])

    with pytest.raises(ModelLoadError, match=message):
        load_model(folder, device="cpu")


def test_an_index_that_points_out_of_the_folder_is_refused(folder: Path) -> None:
    index = {"weight_map": {"lm_head.weight": "../elsewhere.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))

    with pytest.raises(ModelLoadError, match="outside of"):
        load_model(folder, device="cpu")


def test_a_missing_path_an_unknown_device_and_dtype_are_refused(folder: Path) -> None:
    with pytest.raises(ModelLoadError, match="does not exist"):
        load_model(folder / "nowhere")
    with pytest.raises(ModelLoadError, match="device 'abacus' cannot be used"):
        load_model(folder, device="abacus")
    with pytest.raises(ModelLoadError, match="dtype 'float8' is not one of"):
        load_model(folder, device="cpu", dtype="float8")


@pytest.mark.parametrize("content", [b"", b"GGUF", b"GGUF" + bytes(range(256)) * 8, b"\0" * 4096])
def test_a_file_that_is_no_gguf_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(content)

    with pytest.raises(ModelLoadError, match="GGUF"):
        load_model(path, device="cpu")


# --------------------------------------------------------------------------- the default model


@pytest.fixture
def model() -> LoadedModel:
    return default_model()


@pytest.fixture
def oracle() -> LlamaForCausalLM:
    return default_oracle()


@pytest.fixture
def prompts(model: LoadedModel) -> list[list[int]]:
    texts = (
        "The",
        "def fibonacci(n):\n    if n",
        "In the year 1815, the painter and the miller met at the river, and",
        "1, 1, 2, 3, 5, 8, 13, 21, 34, 55, 89, 144, 233, 377, " * 3,
    )
    return [model.tokenizer.encode(text) for text in texts]


@pytest.mark.model
def test_prefill_logits_equal_transformers(
    model: LoadedModel, oracle: LlamaForCausalLM, prompts: list[list[int]]
) -> None:
    for prompt in prompts[1:]:
        torch.testing.assert_close(
            logits_of(model, prompt), oracle_logits(oracle, prompt), atol=2e-3, rtol=1e-3
        )


@pytest.mark.model
@pytest.mark.parametrize("chunk_tokens", [10_000, 13])
def test_greedy_tokens_equal_transformers(
    model: LoadedModel, oracle: LlamaForCausalLM, prompts: list[list[int]], chunk_tokens: int
) -> None:
    got = generate(ModelRunner(model, CACHE), prompts, [greedy(20)] * 4, chunk_tokens=chunk_tokens)

    assert got == [oracle_greedy(oracle, prompt, 20) for prompt in prompts]


@pytest.mark.model
def test_the_capital_of_france(model: LoadedModel) -> None:
    assert model.chat_template is not None
    text = model.chat_template.render(
        [{"role": "user", "content": "What is the capital of France?"}]
    )
    prompt = model.tokenizer.encode(text, add_special_tokens=False)

    (tokens,) = generate(ModelRunner(model, CACHE), [prompt], [greedy(8)])

    assert model.tokenizer.decode(tokens) == "The capital of France is Paris."
    assert tokens[-1] in model.eos_token_ids
    assert model.name == "smollm2-135m-instruct"
