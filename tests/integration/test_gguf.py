"""GGUF files: a small one that we write, its numbers, and what is refused of damaged ones."""

import random
from collections.abc import Callable
from pathlib import Path

import gguf
import pytest
import torch
from transformers import LlamaForCausalLM

from engine.config import CacheConfig
from engine.errors import ModelLoadError
from engine.model.loader import load_model
from engine.model.runner import ModelRunner
from engine.sequence import SamplingParams
from tests.model_oracle import generate, oracle_greedy, save_tiny_llama
from tests.tiny_models import write_gguf


@pytest.fixture(scope="module", params=[True, False], ids=["tied", "untied"])
def oracle(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> LlamaForCausalLM:
    folder = tmp_path_factory.mktemp("oracle")
    # The sizes are multiples of a quantization block of 32; the vocabulary fits the token list.
    return save_tiny_llama(
        folder, tie_word_embeddings=request.param, hidden_size=96, intermediate_size=96
    )


def test_a_gguf_gives_the_tokens_of_the_model_it_was_made_from(
    oracle: LlamaForCausalLM, tmp_path: Path
) -> None:
    write_gguf(tmp_path / "tiny.gguf", oracle)
    model = load_model(tmp_path / "tiny.gguf", device="cpu")
    rng = random.Random(1)
    prompts = [[rng.randrange(256) for _ in range(n)] for n in (1, 20, 33)]

    got = generate(
        ModelRunner(model, CacheConfig(num_blocks=16)),
        prompts,
        [SamplingParams(max_tokens=16, temperature=0)] * 3,
    )

    assert got == [oracle_greedy(oracle, prompt, 16) for prompt in prompts]
    assert (model.name, model.eos_token_ids) == ("tiny", {257})
    assert model.chat_template is None


def test_quantized_tensors_are_read(oracle: LlamaForCausalLM, tmp_path: Path) -> None:
    write_gguf(tmp_path / "tiny.gguf", oracle, kind=gguf.GGMLQuantizationType.Q8_0)
    model = load_model(tmp_path / "tiny.gguf", device="cpu")

    embedding = oracle.state_dict()["model.embed_tokens.weight"]
    error = (model.network.embedding - embedding).abs().max()
    assert 0 < error < embedding.abs().max() / 127


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda w: w.add_tokenizer_pre("abacus"), "pre-tokenizer 'abacus'"),
        (lambda w: w.add_tokenizer_model("t5"), "tokenizer is of kind 't5'"),
        (lambda w: w.add_rope_scaling_type(gguf.RopeScalingType.LONGROPE), "type 'longrope'"),
        (lambda w: w.add_rope_scaling_type(gguf.RopeScalingType.YARN), "no usable .*factor"),
        (lambda w: w.add_expert_count(8), "a mixture of experts"),
        (lambda w: w.add_head_count_kv(4), "cannot share 4 KV heads"),
        (lambda w: w.add_block_count(2), "9 tensors of the checkpoint have no use"),
        (lambda w: w.add_tensor("rope_freqs.weight", torch.ones(7).numpy()), "holds 7 divisors"),
    ],
)
def test_a_variant_that_is_not_supported_is_refused(
    oracle: LlamaForCausalLM,
    tmp_path: Path,
    edit: Callable[[gguf.GGUFWriter], None],
    message: str,
) -> None:
    write_gguf(tmp_path / "tiny.gguf", oracle, edit)

    with pytest.raises(ModelLoadError, match=message):
        load_model(tmp_path / "tiny.gguf", device="cpu")


def test_a_file_cut_anywhere_is_refused(oracle: LlamaForCausalLM, tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    write_gguf(path, oracle)
    content = path.read_bytes()
    rng = random.Random(2)
    for length in [4, 8, 24, len(content) - 1, *(rng.randrange(len(content)) for _ in range(40))]:
        path.write_bytes(content[:length])

        with pytest.raises(ModelLoadError):
            load_model(path, device="cpu")
