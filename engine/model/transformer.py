"""The decoder transformer over a flat batch of tokens: llama's, with what other families change.

Tokens of all sequences lie side by side, [num_tokens, hidden_size]; only attention knows which
sequence a token belongs to.
"""

from collections.abc import Callable
from functools import partial

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
        # In the model's precision, as it was trained: sqrt(640) is 25.25 in bfloat16.
        scale = torch.tensor(config.hidden_size**0.5, dtype=self.embedding.dtype).item()
        self._embedding_scale = scale if config.has_scaled_embedding else None
        self.layers = tuple(_Layer(config, weights, i) for i in range(config.num_layers))
        self._norm = _Norm(config, weights, "model.norm.weight", config.hidden_size)
        if config.tie_word_embeddings:
            weights.drop("lm_head.weight")
            self.head = Linear(self.embedding)
        else:
            self.head = Linear(
                weights.take("lm_head.weight", config.vocab_size, config.hidden_size)
            )
        # Of the layers that see all, then of the sliding ones where there are any.
        ropes = [config.rope] + ([config.sliding.rope] if config.sliding is not None else [])
        self._rotations = tuple(
            rope.table(config.max_position, config.head_dim, self.embedding.device)
            for rope in ropes
        )

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
        if self._embedding_scale is not None:
            hidden *= self._embedding_scale
        rotations = [table[positions].unsqueeze(1) for table in self._rotations]
        batches = [batch]
        if self.config.sliding is not None:
            batches.append(attention.within(batch, self.config.sliding.window))
        for layer, kv in zip(self.layers, cache.layers, strict=True):
            kind = layer.is_sliding
            layer.forward(hidden, rotations[kind], kv, attention, batches[kind])
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [rows, vocab_size], in float32, of rows of `forward`'s hidden states."""
        if len(hidden) == 0:
            return hidden.new_empty((0, self.config.vocab_size), dtype=torch.float32)
        return self.head(self._norm(hidden)).float()


class _Layer:
    def __init__(self, config: ModelConfig, weights: Weights, number: int) -> None:
        self._config = config
        self.is_sliding = config.sliding is not None and number in config.sliding.layers
        prefix = f"model.layers.{number}."

        def norm(name: str) -> _Norm:
            return _Norm(config, weights, f"{prefix}{name}.weight", config.hidden_size)

        self._attention_norm = norm("input_layernorm")
        self._qkv = _fused_qkv(config, weights, prefix + "self_attn.")
        self._head_norm = (
            _HeadNorm(config, weights, prefix + "self_attn.") if config.has_head_norms else None
        )
        self._out = Linear(
            weights.take(prefix + "self_attn.o_proj.weight", config.hidden_size, config.q_size)
        )
        self._attention_branch_norm = self._mlp_branch_norm = None
        if config.has_branch_norms:
            self._attention_branch_norm = norm("post_attention_layernorm")
            self._mlp_norm = norm("pre_feedforward_layernorm")
            self._mlp_branch_norm = norm("post_feedforward_layernorm")
        else:
            self._mlp_norm = norm("post_attention_layernorm")
        hidden, inner = config.hidden_size, config.intermediate_size
        gate, up = (
            weights.take(f"{prefix}mlp.{name}_proj.weight", inner, hidden)
            for name in ("gate", "up")
        )
        self._gate_up = Linear(torch.cat((gate, up)))
        self._activation: Callable[[Tensor], Tensor] = (
            F.silu if config.activation == "silu" else partial(F.gelu, approximate="tanh")
        )
        self._down = Linear(weights.take(f"{prefix}mlp.down_proj.weight", hidden, inner))

    def forward(
        self,
        hidden: Tensor,
        rotation: Tensor,
        kv: Tensor,
        attention: Attention,
        batch: AttentionBatch,
    ) -> None:
        """Add this layer's two residual branches to `hidden`, in place."""
        num_heads, num_kv_heads = self._config.num_heads, self._config.num_kv_heads
        qkv = self._qkv(self._attention_norm(hidden))
        heads = qkv.view(len(qkv), -1, self._config.head_dim)
        rotated = heads[:, : num_heads + num_kv_heads]
        if self._head_norm is not None:
            self._head_norm(rotated)
        _rotate(rotated, rotation)
        new_kv = heads[:, num_heads:].view(len(qkv), 2, num_kv_heads, -1)
        branch = self._out(attention.attend(heads[:, :num_heads], new_kv, kv, batch))
        if self._attention_branch_norm is not None:
            branch = self._attention_branch_norm(branch)
        hidden += branch
        gate, up = self._gate_up(self._mlp_norm(hidden)).chunk(2, dim=-1)
        branch = self._down(self._activation(gate).mul_(up))
        if self._mlp_branch_norm is not None:
            branch = self._mlp_branch_norm(branch)
        hidden += branch


class _Norm:
    """Division by the root mean square of each row, in the precision of the weight."""

    def __init__(self, config: ModelConfig, weights: Weights, name: str, size: int) -> None:
        self._weight = _norm_weight(config, weights, name, size)
        self._eps = config.rms_norm_eps

    def __call__(self, x: Tensor) -> Tensor:
        weight = self._weight
        return F.rms_norm(x.to(weight.dtype), weight.shape, weight, self._eps).to(x.dtype)


class _HeadNorm:
    """The same for each head of q and k by itself, in place, before they are rotated."""

    def __init__(self, config: ModelConfig, weights: Weights, prefix: str) -> None:
        q, k = (
            _interleave(
                _norm_weight(config, weights, f"{prefix}{part}_norm.weight", config.head_dim),
                config.head_dim,
            )
            for part in "qk"
        )
        # A factor of q is a factor of its scores, whatever the rotation between.
        q = q * config.query_scale
        self._weight = torch.cat(
            (q.expand(config.num_heads, -1), k.expand(config.num_kv_heads, -1))
        )
        self._eps = config.rms_norm_eps

    def __call__(self, heads: Tensor) -> None:
        wide = heads.to(self._weight.dtype)
        normed = F.rms_norm(wide, heads.shape[-1:], eps=self._eps)
        heads.copy_(normed.mul_(self._weight))


def _norm_weight(config: ModelConfig, weights: Weights, name: str, size: int) -> Tensor:
    if not config.has_shifted_norms:
        return weights.take(name, size)
    # In float32: bfloat16 has few digits left beside the one.
    return weights.take(name, size, dtype=torch.float32) + 1


def _fused_qkv(config: ModelConfig, weights: Weights, prefix: str) -> Linear:
    """The three projections as one, their outputs side by side."""
    sizes = {"q": config.q_size, "k": config.kv_size, "v": config.kv_size}

    def fused(kind: str, *columns: int) -> Tensor:
        q, k, v = (
            weights.take(f"{prefix}{part}_proj.{kind}", size, *columns)
            for part, size in sizes.items()
        )
        return torch.cat((_interleave(q, config.head_dim), _interleave(k, config.head_dim), v))

    bias = fused("bias") if config.has_qkv_bias else None
    return Linear(fused("weight", config.hidden_size), bias)


def _interleave(rows: Tensor, head_dim: int) -> Tensor:
    """Rows of q or k so that rotary pairs (i, i + d/2) lie side by side, as complex numbers do.

    Scores are dot products of q with k: one order for both changes none of them.
    """
    halves = rows.view(-1, 2, head_dim // 2, *rows.shape[1:])
    return halves.transpose(1, 2).reshape(rows.shape)


def _rotate(heads: Tensor, rotation: Tensor) -> None:
    """Rotate [num_tokens, heads, head_dim] in place by [num_tokens, 1, head_dim / 2]."""
    wide = heads.float()  # itself where it is float32 already
    pairs = torch.view_as_complex(wide.view(*wide.shape[:-1], -1, 2))
    pairs.mul_(rotation)
    if wide is not heads:
        heads.copy_(wide)
