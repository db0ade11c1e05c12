"""Gemma 3, its text side: five layers of a sliding window, then one that sees all, and again."""

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import torch

from engine.model.config import ModelConfig, Sliding
from engine.model.families.family import (
    GGUF_HEAD_NORMS,
    GGUF_TENSORS,
    LAYER,
    Family,
    GgufTensors,
    config_from_gguf,
    config_from_hf,
)
from engine.model.metadata import need, need_positive, refuse
from engine.model.rope import Rope, rope_from_hf

_THETA, _SLIDING_THETA = 1_000_000.0, 10_000.0
_PATTERN = 6  # each sixth layer sees all
_NUM_LAYERS_27B = 62
_SOFTCAPS = ("attn_logit_softcapping", "final_logit_softcapping")

# A multimodal model's text_config leaves out what equals these.
_DEFAULTS: Mapping[str, Any] = MappingProxyType(
    {
        "vocab_size": 262_208,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "max_position_embeddings": 131_072,
        "rms_norm_eps": 1e-6,
        "sliding_window": 4096,
        "query_pre_attn_scalar": 256,
        "tie_word_embeddings": True,
    }
)


def _from_hf(config: Mapping[str, Any]) -> ModelConfig:
    config = {**_DEFAULTS, **config, **(config.get("text_config") or {})}
    activation = config.get("hidden_activation") or "gelu_pytorch_tanh"
    refuse(activation != "gelu_pytorch_tanh", f"activation {activation!r}")
    refuse(bool(config.get("use_bidirectional_attention", False)), "bidirectional attention")
    for key in _SOFTCAPS:
        refuse(config.get(key) is not None, key)
    rope, sliding_rope = _ropes_of_hf(config)
    read = config_from_hf(config, arch="gemma3", rope=rope)
    num_layers, pattern = read.num_layers, need(config, "sliding_window_pattern", int, _PATTERN)
    kinds = config.get("layer_types") or [
        "sliding_attention" if (layer + 1) % max(pattern, 1) else "full_attention"
        for layer in range(num_layers)
    ]
    unknown = set(kinds) - {"sliding_attention", "full_attention"}
    refuse(bool(unknown) or len(kinds) != num_layers, f"layer_types {kinds!r}")
    layers = [layer for layer, kind in enumerate(kinds) if kind == "sliding_attention"]
    return _gemma(
        read,
        window=need(config, "sliding_window", int),
        layers=layers,
        sliding_rope=sliding_rope,
        query_scalar=need_positive(config, "query_pre_attn_scalar"),
    )


def _ropes_of_hf(config: Mapping[str, Any]) -> tuple[Rope, Rope]:
    """Of the layers that see all, and of the sliding ones, which are never scaled in old files."""
    old = {"rope_theta": config.get("rope_theta")} | (config.get("rope_scaling") or {})
    parameters = config.get("rope_parameters") or {
        "full_attention": old,
        "sliding_attention": {"rope_theta": config.get("rope_local_base_freq")},
    }
    full, sliding = (parameters.get(f"{kind}_attention") for kind in ("full", "sliding"))
    refuse(
        not isinstance(full, dict) or not isinstance(sliding, dict), f"rope_parameters {parameters}"
    )
    max_position = need(config, "max_position_embeddings", int)
    return (
        rope_from_hf(full or {}, default_theta=_THETA, max_position=max_position),
        rope_from_hf(sliding or {}, default_theta=_SLIDING_THETA, max_position=max_position),
    )


def _from_gguf(metadata: Mapping[str, Any], tensors: GgufTensors) -> ModelConfig:
    for key in _SOFTCAPS:
        refuse(bool(metadata.get(f"gemma3.{key}")), key)
    read = config_from_gguf(metadata, tensors, arch="gemma3", default_theta=_THETA)
    window = metadata.get("gemma3.attention.sliding_window") or 0
    pattern = metadata.get("gemma3.attention.sliding_window_pattern", _PATTERN)
    if isinstance(pattern, list):
        layers = [layer for layer, slides in enumerate(pattern) if slides]
    else:
        layers = [layer for layer in range(read.num_layers) if (layer + 1) % max(pattern, 1)]
    # The one size whose scalar is not head_dim is told by its depth: GGUF does not hold the scalar.
    is_27b = read.num_layers == _NUM_LAYERS_27B
    return _gemma(
        read,
        window=window,
        layers=layers if window else [],
        sliding_rope=Rope(need_positive(metadata, "gemma3.rope.freq_base_swa", _SLIDING_THETA)),
        query_scalar=read.hidden_size // read.num_heads if is_27b else read.head_dim,
    )


def _gemma(
    read: ModelConfig, *, window: int, layers: list[int], sliding_rope: Rope, query_scalar: float
) -> ModelConfig:
    return replace(
        read,
        activation="gelu_tanh",
        has_head_norms=True,
        has_branch_norms=True,
        has_shifted_norms=True,
        has_scaled_embedding=True,
        query_scale=(read.head_dim / query_scalar) ** 0.5,
        sliding=Sliding(window, frozenset(layers), sliding_rope) if layers else None,
    )


def _hf_tensor(name: str) -> str | None:
    """In a multimodal model the text side is one part, and the parts that see are not run."""
    if name.startswith(("vision_tower.", "multi_modal_projector.")):
        return None
    return name.removeprefix("language_model.")


def _restore(name: str, tensor: torch.Tensor, config: ModelConfig) -> torch.Tensor:
    """GGUF holds 1 + the weight of a norm."""
    return tensor - 1 if name.endswith("norm.weight") else tensor


GEMMA3 = Family(
    config_from_hf=_from_hf,
    config_from_gguf=_from_gguf,
    hf_tensor=_hf_tensor,
    gguf_tensors=MappingProxyType(
        {
            **GGUF_TENSORS,
            **GGUF_HEAD_NORMS,
            "blk.{}.post_attention_norm.weight": LAYER + "post_attention_layernorm.weight",
            "blk.{}.ffn_norm.weight": LAYER + "pre_feedforward_layernorm.weight",
            "blk.{}.post_ffw_norm.weight": LAYER + "post_feedforward_layernorm.weight",
        }
    ),
    restore_gguf=_restore,
)
