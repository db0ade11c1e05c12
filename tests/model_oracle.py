"""The same weights through another implementation, and the simplest driver of a ModelRunner."""

from collections.abc import Iterator, Sequence
from functools import cache
from itertools import count
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
)
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from engine.model.default_model import find_default_model
from engine.model.loader import LoadedModel, load_model
from engine.model.runner import ModelRunner
from engine.plan import ScheduledChunk, StepPlan
from engine.sequence import SamplingParams, TenantShare
from engine.sequence import Sequence as EngineSequence

BLOCK_SIZE = 16


@cache
def default_model() -> LoadedModel:
    """The default model in float32, loaded once for all tests; running it changes nothing in it."""
    return load_model(find_default_model(), device="cpu", dtype="float32")


@cache
def default_oracle() -> PreTrainedModel:
    """transformers' model of the same file."""
    return oracle_from_gguf(find_default_model())


def oracle_from_gguf(path: Path) -> PreTrainedModel:
    """transformers' model of a GGUF in float32, its head being the embedding.

    Its from_pretrained does the same, but asks for the accelerate package, which this needs not.
    """
    config = AutoConfig.for_model(**load_gguf_checkpoint(str(path), return_tensors=False)["config"])
    oracle = AutoModelForCausalLM.from_config(config).eval()
    read: dict[str, Any] = load_gguf_checkpoint(
        str(path), return_tensors=True, model_to_load=oracle, torch_dtype=torch.float32
    )
    missing, unexpected = oracle.load_state_dict(read["tensors"], strict=False)
    assert (missing, unexpected) == (["lm_head.weight"], [])
    oracle.tie_weights()
    return oracle


def save_tiny_llama(
    folder: Path, *, max_shard_size: str = "1GB", **changes: Any
) -> LlamaForCausalLM:
    """A random llama of a few layers, saved as a Hugging Face folder with a byte tokenizer."""
    shape: dict[str, Any] = {
        "vocab_size": 258,
        "hidden_size": 48,
        "intermediate_size": 80,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "bos_token_id": 256,
        "eos_token_id": 257,
        "tie_word_embeddings": False,
        "initializer_range": 0.3,  # wide, so that greedy choices differ
    }
    torch.manual_seed(0)
    oracle = LlamaForCausalLM(LlamaConfig(**shape | changes)).eval()
    oracle.save_pretrained(folder, max_shard_size=max_shard_size)
    save_byte_tokenizer(folder)
    return oracle


def save_byte_tokenizer(folder: Path) -> None:
    """tokenizer.json whose tokens are the 256 bytes, <s> and </s>."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {character: i for i, character in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.save(str(folder / "tokenizer.json"))


def oracle_logits(oracle: PreTrainedModel, token_ids: Sequence[int]) -> torch.Tensor:
    """Logits [len(token_ids), vocab_size] after each token."""
    with torch.inference_mode():
        return oracle(torch.tensor([token_ids])).logits[0].float()


def oracle_greedy(oracle: PreTrainedModel, prompt: Sequence[int], num_tokens: int) -> list[int]:
    """The next `num_tokens` greedy tokens, an end-of-sequence token among them or not."""
    ids = torch.tensor([list(prompt)])
    with torch.inference_mode():
        output = oracle.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=num_tokens,
            min_new_tokens=num_tokens,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
    return output[0, len(prompt) :].tolist()


def sequence(
    name: str, token_ids: Sequence[int], params: SamplingParams, blocks: Iterator[int]
) -> EngineSequence:
    """A sequence with blocks for its prompt and all the tokens it may generate."""
    made = EngineSequence(
        id=name,
        share=TenantShare(tenant="t"),
        namespace="t",
        token_ids=list(token_ids),
        params=params,
        arrived=0.0,
    )
    num_blocks = -(-(len(token_ids) + params.max_tokens) // BLOCK_SIZE)
    made.block_table = [next(blocks) for _ in range(num_blocks)]
    return made


def generate(
    runner: ModelRunner,
    prompts: Sequence[Sequence[int]],
    params: Sequence[SamplingParams],
    *,
    chunk_tokens: int = 10_000,
    first_block: int = 0,
) -> list[list[int]]:
    """max_tokens tokens of each prompt, all in one batch, prompts in chunks of this size."""
    blocks = count(first_block)
    seqs = [
        sequence(str(i), prompt, param, blocks)
        for i, (prompt, param) in enumerate(zip(prompts, params, strict=True))
    ]
    while running := [s for s in seqs if s.num_output_tokens < s.params.max_tokens]:
        output = runner.execute(StepPlan(0, tuple(next_chunk(s, chunk_tokens) for s in running)))
        assert output.errors == {}
        for s in running:
            advance(s, chunk_tokens, output.token_ids.get(s.id))
    return [s.token_ids[s.num_prompt_tokens :] for s in seqs]


def next_chunk(seq: EngineSequence, chunk_tokens: int) -> ScheduledChunk:
    num_tokens = min(seq.num_uncomputed_tokens, chunk_tokens)
    draws = (seq,) if num_tokens == seq.num_uncomputed_tokens else ()
    return ScheduledChunk(seq, seq.num_computed_tokens, num_tokens, draws)


def advance(seq: EngineSequence, chunk_tokens: int, token_id: int | None) -> None:
    """What a scheduler's update does, of which this driver needs two lines."""
    seq.num_computed_tokens += min(seq.num_uncomputed_tokens, chunk_tokens)
    if token_id is not None:
        seq.token_ids.append(token_id)
