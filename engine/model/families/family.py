"""What a family says of itself, and what all of them share."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch

from engine.model.config import ModelConfig
from engine.model.metadata import need, refuse
from engine.model.rope import Rope, rope_from_gguf, rope_from_hf


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufTensors:
    """What a configuration depends on of a GGUF's tensors."""

    names: frozenset[str]
    rope_divisors: tuple[float, ...] | None  # rope_freqs.weight


def _as_named(name: str) -> str | None:
    return name


def _as_stored(name: str, tensor: torch.Tensor, config: ModelConfig) -> torch.Tensor:
    return tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """How one family of models is read."""

    config_from_hf: Callable[[Mapping[str, Any]], ModelConfig]
    config_from_gguf: Callable[[Mapping[str, Any], GgufTensors], ModelConfig]
    # A folder's tensor name -> the name that the network asks for; None: knowingly not used.
    hf_tensor: Callable[[str], str | None] = _as_named
    # GGUF tensor name -> Hugging Face name; {} is the layer.
    gguf_tensors: Mapping[str, str]
    # Undoes what the conversion to GGUF did to a tensor, by its GGUF name.
    restore_gguf: Callable[[str, torch.Tensor, ModelConfig], torch.Tensor] = _as_stored


LAYER = "model.layers.{}."

GGUF_TENSORS: Mapping[str, str] = MappingProxyType(
    {
        "token_embd.weight": "model.embed_tokens.weight",
        "output_norm.weight": "model.norm.weight",
        "output.weight": "lm_head.weight",
        "blk.{}.attn_norm.weight": LAYER + "input_layernorm.weight",
        "blk.{}.attn_q.weight": LAYER + "self_attn.q_proj.weight",
        "blk.{}.attn_k.weight": LAYER + "self_attn.k_proj.weight",
        "blk.{}.attn_v.weight": LAYER + "self_attn.v_proj.weight",
        "blk.{}.attn_output.weight": LAYER + "self_attn.o_proj.weight",
        "blk.{}.ffn_norm.weight": LAYER + "post_attention_layernorm.weight",
        "blk.{}.ffn_gate.weight": LAYER + "mlp.gate_proj.weight",
        "blk.{}.ffn_up.weight": LAYER + "mlp.up_proj.weight",
        "blk.{}.ffn_down.weight": LAYER + "mlp.down_proj.weight",
    }
)
GGUF_HEAD_NORMS: Mapping[str, str] = MappingProxyType(
    {
        "blk.{}.attn_q_norm.weight": LAYER + "self_attn.q_norm.weight",
        "blk.{}.attn_k_norm.weight": LAYER + "self_attn.k_norm.weight",
    }
)


def config_from_hf(config: Mapping[str, Any], *, arch: str, rope: Rope) -> ModelConfig:
    """What config.json says under the same keys in every family."""
    for bias in ("attention_bias", "mlp_bias"):
        refuse(bool(config.get(bias, False)), bias)
    num_heads = need(config, "num_attention_heads", int)
    hidden_size = need(config, "hidden_size", int)
    return ModelConfig(
        arch=arch,
        vocab_size=need(config, "vocab_size", int),
        hidden_size=hidden_size,
        num_layers=need(config, "num_hidden_layers", int),
        num_heads=num_heads,
        num_kv_heads=need(config, "num_key_value_heads", int, num_heads),
        head_dim=need(config, "head_dim", int, hidden_size // max(num_heads, 1)),
        intermediate_size=need(config, "intermediate_size", int),
        rope=rope,
        rms_norm_eps=need(config, "rms_norm_eps", float),
        tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
        max_position=need(config, "max_position_embeddings", int),
    )


def rope_of_hf(config: Mapping[str, Any]) -> Rope:
    """The one rope of a model all of whose layers are alike."""
    parameters = config.get("rope_parameters") or config.get("rope_scaling") or {}
    refuse(not isinstance(parameters, dict), f"rotary embedding {parameters!r}")
    outside = {key: config.get(key) for key in ("rope_theta", "partial_rotary_factor")}
    return rope_from_hf(
        outside | parameters,
        default_theta=10_000.0,
        max_position=need(config, "max_position_embeddings", int),
    )


def config_from_gguf(
    metadata: Mapping[str, Any], tensors: GgufTensors, *, arch: str, default_theta: float = 10_000.0
) -> ModelConfig:
    """What GGUF says under the same keys, but for their prefix `arch`, in every family."""
    refuse(bool(metadata.get(f"{arch}.expert_count", 0)), "a mixture of experts")
    num_heads = need(metadata, f"{arch}.attention.head_count", int)
    hidden_size = need(metadata, f"{arch}.embedding_length", int)
    per_head = hidden_size // max(num_heads, 1)
    head_dim = need(metadata, f"{arch}.attention.key_length", int, per_head)
    value_dim = metadata.get(f"{arch}.attention.value_length", head_dim)
    refuse(value_dim != head_dim, f"values of {value_dim} dimensions beside keys of {head_dim}")
    rotated = metadata.get(f"{arch}.rope.dimension_count", head_dim)
    refuse(rotated != head_dim, f"rotation of {rotated} of {head_dim} dimensions")
    max_position = need(metadata, f"{arch}.context_length", int)
    return ModelConfig(
        arch=arch,
        vocab_size=len(need(metadata, "tokenizer.ggml.tokens", list)),
        hidden_size=hidden_size,
        num_layers=need(metadata, f"{arch}.block_count", int),
        num_heads=num_heads,
        num_kv_heads=need(metadata, f"{arch}.attention.head_count_kv", int, num_heads),
        head_dim=head_dim,
        intermediate_size=need(metadata, f"{arch}.feed_forward_length", int),
        rope=rope_from_gguf(
            metadata,
            arch,
            default_theta=default_theta,
            max_position=max_position,
            divisors=tensors.rope_divisors,
        ),
        rms_norm_eps=need(metadata, f"{arch}.attention.layer_norm_rms_epsilon", float),
        # llama.cpp writes the output projection only where it is not the embedding.
        tie_word_embeddings="output.weight" not in tensors.names,
        max_position=max_position,
    )
