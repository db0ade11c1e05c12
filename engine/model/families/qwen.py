"""Qwen2 (and 2.5), whose q, k and v have biases, and Qwen3, whose heads are normalized instead."""

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from engine.model.config import ModelConfig
from engine.model.families.family import (
    GGUF_HEAD_NORMS,
    GGUF_TENSORS,
    LAYER,
    Family,
    GgufTensors,
    config_from_gguf,
    config_from_hf,
    rope_of_hf,
)
from engine.model.metadata import refuse
from engine.model.rope import stretched_context


def _from_hf(config: Mapping[str, Any], arch: str) -> ModelConfig:
    refuse(config.get("hidden_act", "silu") != "silu", f"activation {config.get('hidden_act')!r}")
    # Published models switch it off; llama.cpp does not know it.
    refuse(bool(config.get("use_sliding_window", False)), "use_sliding_window")
    read = config_from_hf(config, arch=arch, rope=rope_of_hf(config))
    return replace(read, max_position=stretched_context(read.rope, read.max_position))


def _from_gguf(metadata: Mapping[str, Any], tensors: GgufTensors, arch: str) -> ModelConfig:
    read = config_from_gguf(metadata, tensors, arch=arch)
    return replace(read, max_position=stretched_context(read.rope, read.max_position))


QWEN2 = Family(
    config_from_hf=lambda config: replace(_from_hf(config, "qwen2"), has_qkv_bias=True),
    config_from_gguf=lambda metadata, tensors: replace(
        _from_gguf(metadata, tensors, "qwen2"), has_qkv_bias=True
    ),
    gguf_tensors=MappingProxyType(
        {
            **GGUF_TENSORS,
            **{f"blk.{{}}.attn_{x}.bias": f"{LAYER}self_attn.{x}_proj.bias" for x in "qkv"},
        }
    ),
)

QWEN3 = Family(
    config_from_hf=lambda config: replace(_from_hf(config, "qwen3"), has_head_norms=True),
    config_from_gguf=lambda metadata, tensors: replace(
        _from_gguf(metadata, tensors, "qwen3"), has_head_norms=True
    ),
    gguf_tensors=MappingProxyType({**GGUF_TENSORS, **GGUF_HEAD_NORMS}),
)
