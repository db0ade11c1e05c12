"""Small random models of every family, through transformers, as a folder or as a GGUF file."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import torch
from tokenizers import pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)

from tests.model_oracle import save_byte_tokenizer

CONFIGS = {
    "llama": LlamaConfig,
    "qwen2": Qwen2Config,
    "qwen3": Qwen3Config,
    "gemma3": Gemma3TextConfig,
}
SHAPE: dict[str, Any] = {
    "vocab_size": 258,
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 256,
    "eos_token_id": 257,
    "pad_token_id": None,
    "initializer_range": 0.2,  # wide, so that greedy choices differ
}
GEMMA: dict[str, Any] = {
    "sliding_window": 12,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "query_pre_attn_scalar": 16,
}


def tiny_oracle(family: str, **changes: Any) -> PreTrainedModel:
    """A random model whose norms and biases are random too: a fresh one has ones and zeros."""
    shape = SHAPE | (GEMMA if family == "gemma3" else {})
    if family == "qwen2":  # head_dim is not a setting of it
        shape = {k: v for k, v in shape.items() if k != "head_dim"} | {"hidden_size": 96}
    torch.manual_seed(1)
    oracle = AutoModelForCausalLM.from_config(CONFIGS[family](**shape | changes)).eval()
    with torch.no_grad():
        for name, parameter in oracle.named_parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter) * 0.3)
            if "embed_tokens" in name or "lm_head" in name:
                parameter.mul_(2)
    return oracle


def save_folder(oracle: PreTrainedModel, folder: Path) -> Path:
    oracle.save_pretrained(folder)
    save_byte_tokenizer(folder)
    return folder


def write_gguf(
    path: Path,
    oracle: PreTrainedModel,
    edit: Callable[[gguf.GGUFWriter], None] = lambda writer: None,
    kind: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
) -> Path:
    """The oracle's weights as llama.cpp's conversion writes them."""
    config = oracle.config
    arch = config.model_type.removesuffix("_text")
    writer = gguf.GGUFWriter(path, arch)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    if arch != "qwen2":
        writer.add_key_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    _add_rope(writer, config)
    if arch == "gemma3":
        writer.add_sliding_window(config.sliding_window)
        writer.add_sliding_window_pattern([kind.startswith("s") for kind in config.layer_types])
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt2")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    writer.add_token_list([*alphabet[:-1], "Ġa", "<s>", "</s>"])
    writer.add_token_types([1] * 256 + [3, 3])
    writer.add_token_merges(["Ġ a"])
    writer.add_bos_token_id(256)
    writer.add_eos_token_id(257)
    edit(writer)
    names = gguf.get_tensor_name_map(writer_arch(arch), config.num_hidden_layers)
    for name, tensor in oracle.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        if arch == "gemma3" and name.endswith("norm.weight"):
            tensor = tensor + 1
        if arch == "llama" and (part := re.search(r"self_attn\.([qk])_proj\.weight", name)):
            heads = {"q": config.num_attention_heads, "k": config.num_key_value_heads}[part[1]]
            # Each head's halves, row by row in turn.
            halves = tensor.reshape(heads, 2, -1, tensor.shape[1])
            tensor = halves.swapaxes(1, 2).reshape(tensor.shape)
        stem, _, suffix = name.rpartition(".")
        new_name = f"{names.get_name(stem)}.{suffix}"
        data = tensor.contiguous().numpy()
        if data.ndim == 2 and kind != gguf.GGMLQuantizationType.F32:
            data = gguf.quants.quantize(data, kind)
            writer.add_tensor(new_name, data, raw_dtype=kind)
        else:
            writer.add_tensor(new_name, data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def writer_arch(arch: str) -> gguf.MODEL_ARCH:
    return gguf.MODEL_ARCH[arch.upper()]


def _add_rope(writer: gguf.GGUFWriter, config: Any) -> None:
    rope = config.rope_parameters
    rope = rope.get("full_attention", rope)
    writer.add_rope_freq_base(rope["rope_theta"])
    if rope["rope_type"] == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(rope["factor"])
    elif rope["rope_type"] == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    elif rope["rope_type"] == "llama3":
        writer.add_tensor("rope_freqs.weight", _llama3_divisors(rope, config.head_dim).numpy())


def _llama3_divisors(rope: dict[str, Any], head_dim: int) -> torch.Tensor:
    """How llama.cpp's conversion tells Llama 3.1's scaling, pair by pair."""
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    context, factor = rope["original_max_position_embeddings"], rope["factor"]
    divisors = []
    for i in range(0, head_dim, 2):
        wavelength = 2 * torch.pi * rope["rope_theta"] ** (i / head_dim)
        if wavelength < context / high:
            divisors.append(1.0)
        elif wavelength > context / low:
            divisors.append(factor)
        else:
            smooth = (context / wavelength - low) / (high - low)
            divisors.append(1 / ((1 - smooth) / factor + smooth))
    return torch.tensor(divisors, dtype=torch.float32)
