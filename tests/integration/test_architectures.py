"""Every family: the same numbers as transformers' on the same weights, from a folder and a GGUF."""

import json
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from transformers import (
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    Gemma3TextConfig,
    PreTrainedModel,
)

from engine.config import CacheConfig
from engine.errors import ModelLoadError
from engine.kernels import Span
from engine.model.loader import LoadedModel, load_model
from engine.model.runner import ModelRunner
from engine.sequence import SamplingParams
from tests.model_oracle import BLOCK_SIZE, generate, oracle_greedy, oracle_logits, sequence
from tests.tiny_models import GEMMA, SHAPE, save_folder, tiny_oracle, write_gguf

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


def assert_same_logits(model: LoadedModel, oracle: PreTrainedModel) -> None:
    prompt = prompt_of(100)
    torch.testing.assert_close(
        chunked_logits(model, prompt, 23), oracle_logits(oracle, prompt), atol=1e-4, rtol=1e-4
    )


FAMILIES = ["llama", "qwen2", "qwen3", "gemma3"]


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_folder_and_a_gguf_equal_transformers(family: str, tied: bool, tmp_path: Path) -> None:
    oracle = tiny_oracle(family, tie_word_embeddings=tied)

    check(load_model(save_folder(oracle, tmp_path / "folder"), device="cpu"), oracle)
    assert_same_logits(load_model(write_gguf(tmp_path / "tiny.gguf", oracle), device="cpu"), oracle)


@pytest.mark.parametrize("family", FAMILIES)
def test_bfloat16_is_close_to_float32(family: str, tmp_path: Path) -> None:
    oracle = tiny_oracle(family)
    half = load_model(save_folder(oracle, tmp_path), device="cpu", dtype="bfloat16")

    got, expected = chunked_logits(half, prompt_of(50), 20), oracle_logits(oracle, prompt_of(50))

    assert 0 < (got - expected).norm() / expected.norm() < 0.06


# -------------------------------------------------------------------------------- rotary scaling

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
LINEAR = {"rope_type": "linear", "factor": 8.0}
YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 32}


@pytest.mark.parametrize(
    ("family", "scaling", "trained", "context"),
    [
        ("llama", LLAMA3, 256, 256),
        ("llama", LINEAR, 32, 256),
        ("llama", YARN, 32, 256),
        ("qwen2", YARN, 256, 256),
        ("qwen3", YARN, 32, 256),
    ],
)
def test_scaled_positions_equal_transformers(
    family: str, scaling: dict[str, Any], trained: int, context: int, tmp_path: Path
) -> None:
    oracle = tiny_oracle(
        family,
        max_position_embeddings=trained,
        rope_parameters=scaling | {"rope_theta": 700.0},
    )
    model = load_model(save_folder(oracle, tmp_path / "folder"), device="cpu")

    check(model, oracle)
    assert model.config.max_position == context
    from_gguf = load_model(write_gguf(tmp_path / "tiny.gguf", oracle), device="cpu")
    assert_same_logits(from_gguf, oracle)
    assert from_gguf.config.max_position == context
    plain = {"rope_parameters": {"rope_theta": 700.0}, "max_position_embeddings": 256}
    _edit(tmp_path / "folder/config.json", **plain)
    with pytest.raises(AssertionError):  # without the scaling they differ
        assert_same_logits(load_model(tmp_path / "folder", device="cpu"), oracle)


@pytest.mark.parametrize(
    "changes",
    [
        {"attention_factor": 0.7},
        {"mscale": 0.8, "mscale_all_dim": 0.5},
        {"beta_fast": 8.0, "beta_slow": 2.0, "truncate": False},
    ],
    ids=str,
)
def test_the_settings_of_yarn_equal_transformers(changes: dict[str, Any], tmp_path: Path) -> None:
    rope = {**YARN, **changes, "rope_theta": 700.0}
    oracle = tiny_oracle("llama", max_position_embeddings=32, rope_parameters=rope)

    assert_same_logits(load_model(save_folder(oracle, tmp_path), device="cpu"), oracle)


def test_settings_of_older_files_mean_the_same(tmp_path: Path) -> None:
    """rope_theta and rope_scaling beside each other, its kind under "type"."""
    rope = LLAMA3 | {"rope_theta": 700.0}
    oracle = tiny_oracle("llama", rope_parameters=rope)
    save_folder(oracle, tmp_path)
    old = {k: v for k, v in LLAMA3.items() if k != "rope_type"} | {"type": "llama3"}
    _edit(tmp_path / "config.json", rope_parameters=None, rope_theta=700, rope_scaling=old)

    assert_same_logits(load_model(tmp_path, device="cpu"), oracle)


# ---------------------------------------------------------------------------------------- gemma


def gemma_ropes(factor: float) -> dict[str, Any]:
    return {
        "full_attention": {"rope_type": "linear", "factor": factor, "rope_theta": 900.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
    }


def test_gemma_scales_only_the_layers_that_see_all(tmp_path: Path) -> None:
    oracle = tiny_oracle("gemma3", rope_parameters=gemma_ropes(8.0))
    folder = save_folder(oracle, tmp_path / "folder")

    model = load_model(folder, device="cpu")
    check(model, oracle)
    assert model.config.max_position == 256  # which counts the scaling already
    _edit(
        folder / "config.json",
        rope_parameters=None,
        layer_types=None,
        rope_theta=900.0,
        rope_scaling={"rope_type": "linear", "factor": 8.0},
        rope_local_base_freq=50.0,
        sliding_window_pattern=2,
    )
    assert_same_logits(load_model(folder, device="cpu"), oracle)
    path = write_gguf(
        tmp_path / "tiny.gguf", oracle, lambda w: w.add_float32("gemma3.rope.freq_base_swa", 50.0)
    )
    assert_same_logits(load_model(path, device="cpu"), oracle)


def test_gemma_divides_its_scores_by_its_own_scalar(tmp_path: Path) -> None:
    oracle = tiny_oracle("gemma3", query_pre_attn_scalar=40)

    assert_same_logits(load_model(save_folder(oracle, tmp_path), device="cpu"), oracle)


def test_gemma_without_a_pattern_sees_all_in_each_sixth_layer(tmp_path: Path) -> None:
    kinds = [*["sliding_attention"] * 5, "full_attention", "sliding_attention"]
    oracle = tiny_oracle("gemma3", num_hidden_layers=7, layer_types=kinds)
    folder = save_folder(oracle, tmp_path / "folder")
    _edit(folder / "config.json", layer_types=None, sliding_window_pattern=None)
    path = write_gguf(
        tmp_path / "tiny.gguf",
        oracle,
        lambda w: w.kv_data[0].pop("gemma3.attention.sliding_window_pattern"),
    )

    for model in (load_model(folder, device="cpu"), load_model(path, device="cpu")):
        assert_same_logits(model, oracle)


def test_the_text_side_of_a_multimodal_gemma(tmp_path: Path) -> None:
    config = Gemma3Config(
        text_config=Gemma3TextConfig(**SHAPE | GEMMA).to_dict(),
        vision_config={
            "hidden_size": 16,
            "intermediate_size": 16,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "image_size": 28,
            "patch_size": 14,
        },
        mm_tokens_per_image=4,
    )
    torch.manual_seed(1)
    oracle = Gemma3ForConditionalGeneration(config).eval()

    model = load_model(save_folder(oracle, tmp_path), device="cpu")

    assert_same_logits(model, oracle)


# ------------------------------------------------------------------------------------- refusals


def _edit(path: Path, **changes: object) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {
        family: save_folder(tiny_oracle(family), tmp_path_factory.mktemp(family))
        for family in FAMILIES
    }


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("qwen3", {"model_type": "qwen3_moe"}, "'qwen3_moe' are not supported; supported: gemma3"),
        ("qwen2", {"use_sliding_window": True}, "uses use_sliding_window"),
        ("qwen3", {"attention_bias": True}, "uses attention_bias"),
        ("gemma3", {"final_logit_softcapping": 30.0}, "uses final_logit_softcapping"),
        ("gemma3", {"attn_logit_softcapping": 50.0}, "uses attn_logit_softcapping"),
        ("gemma3", {"use_bidirectional_attention": True}, "uses bidirectional attention"),
        ("gemma3", {"hidden_activation": "relu"}, "activation 'relu'"),
        ("gemma3", {"layer_types": ["chunked_attention"] * 4}, "layer_types"),
        ("gemma3", {"sliding_window": 0}, "sliding window is 0, not positive"),
        ("gemma3", {"rope_parameters": {"full_attention": {}}}, "rope_parameters"),
        (
            "llama",
            {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}},
            "rotary scaling of type 'dynamic', which is not supported; supported: default, linear",
        ),
        ("llama", {"rope_scaling": {"type": "longrope"}, "rope_parameters": None}, "'longrope'"),
        ("llama", {"partial_rotary_factor": 0.5}, "rotation of only 0.5 of each head"),
        ("llama", {"rope_parameters": {"rope_type": "linear"}}, "no usable factor"),
        ("llama", {"rope_parameters": LINEAR | {"factor": 0}}, "factor 0.0, where only a positive"),
        ("llama", {"rope_parameters": LLAMA3 | {"high_freq_factor": 1}}, "not above"),
        ("llama", {"rope_parameters": {"rope_theta": 1.0}}, "rope_theta 1.0 is not above 1"),
    ],
)
def test_a_variant_that_is_not_supported_is_refused(
    folders: dict[str, Path],
    tmp_path: Path,
    family: str,
    changes: dict[str, object],
    message: str,
) -> None:
    for file in folders[family].iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    _edit(tmp_path / "config.json", **changes)

    with pytest.raises(ModelLoadError, match=message):
        load_model(tmp_path, device="cpu")


@pytest.mark.parametrize(
    ("family", "edit", "message"),
    [
        ("qwen3", lambda w: w.add_expert_count(8), "a mixture of experts"),
        ("qwen3", lambda w: w.add_value_length(8), "values of 8 dimensions beside keys of 16"),
        ("gemma3", lambda w: w.add_final_logit_softcapping(30.0), "uses final_logit_softcapping"),
        ("qwen2", lambda w: w.add_rope_dimension_count(8), "rotation of 8 of 16 dimensions"),
        (
            "qwen2",
            lambda w: w.add_rope_scaling_type(gguf.RopeScalingType.LONGROPE),
            "rotary scaling of type 'longrope'",
        ),
    ],
)
def test_a_gguf_that_is_not_supported_is_refused(
    tmp_path: Path, family: str, edit: Callable[[gguf.GGUFWriter], None], message: str
) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", tiny_oracle(family), edit)

    with pytest.raises(ModelLoadError, match=message):
        load_model(path, device="cpu")
