"""The table of model families: how each is read from a file and which network runs it.

A family is added by adding its entry here; the readers and the loader look up and never branch.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, TypeVar

import torch

from engine.errors import ModelLoadError
from engine.model.config import ModelConfig
from engine.model.transformer import Transformer
from engine.model.weights import Weights

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """One family of models, under the name that config.json and GGUF both give it."""

    config_from_hf: Callable[[Mapping[str, Any]], ModelConfig]
    config_from_gguf: Callable[[Mapping[str, Any], frozenset[str]], ModelConfig]
    # GGUF tensor name -> Hugging Face name; {} is the layer.
    gguf_tensors: Mapping[str, str]
    # Undoes what the conversion to GGUF did to a tensor, by its GGUF name.
    restore_gguf: Callable[[str, torch.Tensor, ModelConfig], torch.Tensor]
    network: Callable[[ModelConfig, Weights], Transformer]


def find_architecture(name: str) -> Architecture:
    """The family of this name; ModelLoadError if it is not supported."""
    if name not in ARCHITECTURES:
        raise ModelLoadError(
            f"models of architecture {name!r} are not supported; "
            f"supported: {', '.join(sorted(ARCHITECTURES))}"
        )
    return ARCHITECTURES[name]


def _need(source: Mapping[str, Any], key: str, kind: type[T], default: T | None = None) -> T:
    """The value of `key` (or the default if absent), of this type; an integer will do for float."""
    value = source.get(key)
    if value is None:
        value = default
    if kind is float and type(value) is int:
        value = float(value)
    if not isinstance(value, kind) or isinstance(value, bool):
        raise ModelLoadError(
            f"the model's configuration has no usable {key} ({value!r}): it is damaged or "
            "incomplete; fetch the model again"
        )
    return value


def _llama_from_hf(config: Mapping[str, Any]) -> ModelConfig:
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    _refuse(not isinstance(rope, dict), f"rotary embedding {rope!r}")
    rope_type = rope.get("rope_type", rope.get("type", "default"))
    _refuse(rope_type != "default", f"rotary embedding of type {rope_type!r}")
    _refuse(config.get("hidden_act", "silu") != "silu", f"activation {config.get('hidden_act')!r}")
    for bias in ("attention_bias", "mlp_bias"):
        _refuse(bool(config.get(bias, False)), bias)
    num_heads = _need(config, "num_attention_heads", int)
    hidden_size = _need(config, "hidden_size", int)
    theta = rope if "rope_theta" in rope else config
    return ModelConfig(
        arch="llama",
        vocab_size=_need(config, "vocab_size", int),
        hidden_size=hidden_size,
        num_layers=_need(config, "num_hidden_layers", int),
        num_heads=num_heads,
        num_kv_heads=_need(config, "num_key_value_heads", int, num_heads),
        head_dim=_need(config, "head_dim", int, hidden_size // max(num_heads, 1)),
        intermediate_size=_need(config, "intermediate_size", int),
        rope_theta=_need(theta, "rope_theta", float, 10000.0),
        rms_norm_eps=_need(config, "rms_norm_eps", float),
        tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
        max_position=_need(config, "max_position_embeddings", int),
    )


def _llama_from_gguf(metadata: Mapping[str, Any], tensors: frozenset[str]) -> ModelConfig:
    scaling = metadata.get("llama.rope.scaling.type", "none")
    _refuse(scaling != "none", f"rotary embedding of type {scaling!r}")
    _refuse("rope_freqs.weight" in tensors, "scaled rotary frequencies")
    _refuse(bool(metadata.get("llama.expert_count", 0)), "a mixture of experts")
    num_heads = _need(metadata, "llama.attention.head_count", int)
    hidden_size = _need(metadata, "llama.embedding_length", int)
    per_head = hidden_size // max(num_heads, 1)
    head_dim = _need(metadata, "llama.attention.key_length", int, per_head)
    rotated = metadata.get("llama.rope.dimension_count", head_dim)
    _refuse(rotated != head_dim, f"rotation of {rotated} of {head_dim} dimensions")
    return ModelConfig(
        arch="llama",
        vocab_size=len(_need(metadata, "tokenizer.ggml.tokens", list)),
        hidden_size=hidden_size,
        num_layers=_need(metadata, "llama.block_count", int),
        num_heads=num_heads,
        num_kv_heads=_need(metadata, "llama.attention.head_count_kv", int, num_heads),
        head_dim=head_dim,
        intermediate_size=_need(metadata, "llama.feed_forward_length", int),
        rope_theta=_need(metadata, "llama.rope.freq_base", float, 10000.0),
        rms_norm_eps=_need(metadata, "llama.attention.layer_norm_rms_epsilon", float),
        # llama.cpp writes the output projection only where it is not the embedding.
        tie_word_embeddings="output.weight" not in tensors,
        max_position=_need(metadata, "llama.context_length", int),
    )


def _refuse(condition: bool, what: str) -> None:
    if condition:
        raise ModelLoadError(
            f"this model uses {what}, which is not supported; choose another model"
        )


def _restore_llama(name: str, tensor: torch.Tensor, config: ModelConfig) -> torch.Tensor:
    """Rows of q and k: GGUF pairs rotary dimension i with i + 1, Hugging Face with i + d/2."""
    if not name.endswith(("attn_q.weight", "attn_k.weight")) or len(tensor) % config.head_dim:
        return tensor  # not permuted; or of a wrong shape, which is refused where it is taken
    pairs = tensor.reshape(-1, config.head_dim // 2, 2, tensor.shape[1])
    return pairs.transpose(1, 2).reshape(tensor.shape)


_LAYER = "model.layers.{}."

ARCHITECTURES: Mapping[str, Architecture] = MappingProxyType(
    {
        "llama": Architecture(
            config_from_hf=_llama_from_hf,
            config_from_gguf=_llama_from_gguf,
            gguf_tensors=MappingProxyType(
                {
                    "token_embd.weight": "model.embed_tokens.weight",
                    "output_norm.weight": "model.norm.weight",
                    "output.weight": "lm_head.weight",
                    "blk.{}.attn_norm.weight": _LAYER + "input_layernorm.weight",
                    "blk.{}.attn_q.weight": _LAYER + "self_attn.q_proj.weight",
                    "blk.{}.attn_k.weight": _LAYER + "self_attn.k_proj.weight",
                    "blk.{}.attn_v.weight": _LAYER + "self_attn.v_proj.weight",
                    "blk.{}.attn_output.weight": _LAYER + "self_attn.o_proj.weight",
                    "blk.{}.ffn_norm.weight": _LAYER + "post_attention_layernorm.weight",
                    "blk.{}.ffn_gate.weight": _LAYER + "mlp.gate_proj.weight",
                    "blk.{}.ffn_up.weight": _LAYER + "mlp.up_proj.weight",
                    "blk.{}.ffn_down.weight": _LAYER + "mlp.down_proj.weight",
                }
            ),
            restore_gguf=_restore_llama,
            network=Transformer,
        ),
    }
)
