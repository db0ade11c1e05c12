"""The decoder transformer of the llama family over a flat batch of tokens.

Tokens of all sequences lie side by side, [num_tokens, hidden_size]; only attention knows which
sequence a token belongs to.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from engine.kernels import Attention, AttentionBatch, Linear
from engine.model.config import ModelConfig
from engine.model.kv_cache import KVCache
from engine.model.weights import Weights


class Transformer:
    """Weights of one model; `forward` changes nothing but the KV cache."""

    def __init__(self, config: ModelConfig, weights: Weights) -> None:
        self.config = config
        self.embedding = weights.take(
            "model.embed_tokens.weight", config.vocab_size, config.hidden_size
        )
        self.layers = tuple(_Layer(config, weights, i) for i in range(config.num_layers))
        self.norm = weights.take("model.norm.weight", config.hidden_size)
        if config.tie_word_embeddings:
            weights.drop("lm_head.weight")
            self.head = Linear(self.embedding)
        else:
            self.head = Linear(
                weights.take("lm_head.weight", config.vocab_size, config.hidden_size)
            )
        self._rotation = _rotation_table(config, self.embedding.device)

    def forward(
        self,
        token_ids: Tensor,
        positions: Tensor,
        cache: KVCache,
        attention: Attention,
        batch: AttentionBatch,
    ) -> Tensor:
        """Hidden states [num_tokens, hidden_size] after each token; `logits` reads them.

        token_ids, positions  [num_tokens], of the whole step
        """
        hidden = F.embedding(token_ids, self.embedding)
        rotation = self._rotation[positions].unsqueeze(1)
        for layer, kv in zip(self.layers, cache.layers, strict=True):
            layer.forward(hidden, rotation, kv, attention, batch)
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [rows, vocab_size], in float32, of rows of `forward`'s hidden states."""
        if len(hidden) == 0:
            return hidden.new_empty((0, self.config.vocab_size), dtype=torch.float32)
        normed = F.rms_norm(hidden, self.norm.shape, self.norm, self.config.rms_norm_eps)
        return self.head(normed).float()


class _Layer:
    def __init__(self, config: ModelConfig, weights: Weights, number: int) -> None:
        self._config = config
        hidden, q, kv, inner = (
            config.hidden_size,
            config.q_size,
            config.kv_size,
            config.intermediate_size,
        )

        def take(name: str, *shape: int) -> Tensor:
            return weights.take(f"model.layers.{number}.{name}.weight", *shape)

        self.attention_norm = take("input_layernorm", hidden)
        self.qkv = _fused(
            _interleave(take("self_attn.q_proj", q, hidden), config.head_dim),
            _interleave(take("self_attn.k_proj", kv, hidden), config.head_dim),
            take("self_attn.v_proj", kv, hidden),
        )
        self.out = Linear(take("self_attn.o_proj", hidden, q))
        self.mlp_norm = take("post_attention_layernorm", hidden)
        self.gate_up = _fused(
            take("mlp.gate_proj", inner, hidden), take("mlp.up_proj", inner, hidden)
        )
        self.down = Linear(take("mlp.down_proj", hidden, inner))

    def forward(
        self,
        hidden: Tensor,
        rotation: Tensor,
        kv: Tensor,
        attention: Attention,
        batch: AttentionBatch,
    ) -> None:
        """Add this layer's two residual branches to `hidden`, in place."""
        config = self._config
        num_heads, num_kv_heads = config.num_heads, config.num_kv_heads
        qkv = self.qkv(self._normed(hidden, self.attention_norm))
        heads = qkv.view(len(qkv), -1, config.head_dim)
        _rotate(heads[:, : num_heads + num_kv_heads], rotation)
        new_kv = heads[:, num_heads:].view(len(qkv), 2, num_kv_heads, -1)
        hidden += self.out(attention.attend(heads[:, :num_heads], new_kv, kv, batch))
        gate, up = self.gate_up(self._normed(hidden, self.mlp_norm)).chunk(2, dim=-1)
        hidden += self.down(F.silu(gate).mul_(up))

    def _normed(self, hidden: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(hidden, weight.shape, weight, self._config.rms_norm_eps)


def _fused(*weights: Tensor) -> Linear:
    """Layers of one input as one layer, their outputs side by side."""
    return Linear(torch.cat(weights))


def _interleave(weight: Tensor, head_dim: int) -> Tensor:
    """Rows of q or k so that rotary pairs (i, i + d/2) lie side by side, as complex numbers do.

    Scores are dot products of q with k: one order for both changes none of them.
    """
    halves = weight.view(-1, 2, head_dim // 2, weight.shape[1])
    return halves.transpose(1, 2).reshape(weight.shape)


def _rotation_table(config: ModelConfig, device: torch.device) -> Tensor:
    """Unit complex numbers [max_position, head_dim / 2]: by what a position rotates each pair."""
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
    frequencies = 1.0 / config.rope_theta**exponents
    angles = torch.outer(torch.arange(config.max_position, dtype=torch.float32), frequencies)
    return torch.polar(torch.ones_like(angles), angles).to(device)


def _rotate(heads: Tensor, rotation: Tensor) -> None:
    """Rotate [num_tokens, heads, head_dim] in place by [num_tokens, 1, head_dim / 2]."""
    wide = heads.float()  # itself where it is float32 already
    pairs = torch.view_as_complex(wide.view(*wide.shape[:-1], -1, 2))
    pairs.mul_(rotation)
    if wide is not heads:
        heads.copy_(wide)
