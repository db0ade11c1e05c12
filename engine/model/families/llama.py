"""Llama 2 and 3, SmolLM2 and what else goes under model type llama."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from engine.model.config import ModelConfig
from engine.model.families.family import (
    GGUF_TENSORS,
    Family,
    GgufTensors,
    config_from_gguf,
    config_from_hf,
    rope_of_hf,
)
from engine.model.metadata import refuse
from engine.model.rope import stretched_context


def _from_hf(config: Mapping[str, Any]) -> ModelConfig:
    refuse(config.get("hidden_act", "silu") != "silu", f"activation {config.get('hidden_act')!r}")
    read = config_from_hf(config, arch="llama", rope=rope_of_hf(config))
    return replace(read, max_position=stretched_context(read.rope, read.max_position))


def _from_gguf(metadata: Mapping[str, Any], tensors: GgufTensors) -> ModelConfig:
    read = config_from_gguf(metadata, tensors, arch="llama")
    return replace(read, max_position=stretched_context(read.rope, read.max_position))


def _restore(name: str, tensor: torch.Tensor, config: ModelConfig) -> torch.Tensor:
    """Rows of q and k: GGUF pairs rotary dimension i with i + 1, Hugging Face with i + d/2."""
    if not name.endswith(("attn_q.weight", "attn_k.weight")) or len(tensor) % config.head_dim:
        return tensor  # not permuted; or of a wrong shape, which is refused where it is taken
    pairs = tensor.reshape(-1, config.head_dim // 2, 2, tensor.shape[1])
    return pairs.transpose(1, 2).reshape(tensor.shape)


LLAMA = Family(
    config_from_hf=_from_hf,
    config_from_gguf=_from_gguf,
    gguf_tensors=GGUF_TENSORS,
    restore_gguf=_restore,
)
