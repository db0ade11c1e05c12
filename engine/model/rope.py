"""Rotary position embedding: by what a position turns each pair of a head's dimensions.

A scaling slows the turning, so that a model reads further than it was first trained to. The
formulas are those of the papers and of Llama 3.1's release, as `transformers` computes them.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from engine.errors import ModelLoadError
from engine.model.metadata import need, need_positive, refuse


@dataclass(frozen=True, slots=True)
class LinearScaling:
    """Every position counts for 1 / factor (Chen et al. 2023)."""

    factor: float
    magnitude: ClassVar[float] = 1.0

    def scaled(self, frequencies: Tensor, theta: float) -> Tensor:
        return frequencies / self.factor


@dataclass(frozen=True, slots=True)
class Llama3Scaling:
    """Slow pairs are stretched, fast ones kept, those between blended (Llama 3.1)."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_context: int  # tokens
    magnitude: ClassVar[float] = 1.0

    def __post_init__(self) -> None:
        if self.high_freq_factor <= self.low_freq_factor:
            raise ModelLoadError(
                f"rotary scaling llama3 with high_freq_factor {self.high_freq_factor} not above "
                f"low_freq_factor {self.low_freq_factor}: the configuration is damaged"
            )

    def scaled(self, frequencies: Tensor, theta: float) -> Tensor:
        turns = self.original_context * frequencies / (2 * math.pi)  # within the original context
        span = self.high_freq_factor - self.low_freq_factor
        kept = ((turns - self.low_freq_factor) / span).clamp(0, 1)
        return kept * frequencies + (1 - kept) * frequencies / self.factor


@dataclass(frozen=True, slots=True)
class YarnScaling:
    """Blended by turns like llama3, with longer vectors to sharpen attention (Peng et al. 2023)."""

    factor: float
    original_context: int  # tokens
    beta_fast: float  # turns in the original context from which a pair is kept
    beta_slow: float  # turns up to which it is stretched in full
    is_truncated: bool  # the bounds between are whole pairs
    magnitude: float  # of each rotated vector

    def scaled(self, frequencies: Tensor, theta: float) -> Tensor:
        dim = 2 * len(frequencies)
        low, high = (self._pair_of(turns, dim, theta) for turns in (self.beta_fast, self.beta_slow))
        if self.is_truncated:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, dim - 1)
        pairs = torch.arange(len(frequencies), dtype=torch.float32)
        stretched = ((pairs - low) / (high - low if high != low else 0.001)).clamp(0, 1)
        return frequencies / self.factor * stretched + frequencies * (1 - stretched)

    def _pair_of(self, turns: float, dim: int, theta: float) -> float:
        """Which pair turns so often within the original context."""
        return dim * math.log(self.original_context / (turns * 2 * math.pi)) / (2 * math.log(theta))


@dataclass(frozen=True, slots=True)
class GivenScaling:
    """One divisor for each pair: what a GGUF holds of a llama3 scaling."""

    divisors: tuple[float, ...]
    magnitude: ClassVar[float] = 1.0

    def scaled(self, frequencies: Tensor, theta: float) -> Tensor:
        if len(self.divisors) != len(frequencies) or not all(d > 0 for d in self.divisors):
            raise ModelLoadError(
                f"rope_freqs.weight holds {len(self.divisors)} divisors where {len(frequencies)} "
                "positive ones are needed: the file is damaged; fetch it again"
            )
        return frequencies / torch.tensor(self.divisors, dtype=torch.float32)


Scaling = LinearScaling | Llama3Scaling | YarnScaling | GivenScaling


@dataclass(frozen=True, slots=True)
class Rope:
    """Base wavelength and, where the context was extended, how."""

    theta: float
    scaling: Scaling | None = None

    def __post_init__(self) -> None:
        if not self.theta > 1:
            raise ModelLoadError(f"rope_theta {self.theta} is not above 1: the model is damaged")

    def table(self, max_position: int, head_dim: int, device: torch.device) -> Tensor:
        """Complex [max_position, head_dim / 2]: by what a position rotates each pair."""
        exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
        frequencies = 1.0 / self.theta**exponents
        magnitude = 1.0
        if self.scaling is not None:
            frequencies = self.scaling.scaled(frequencies, self.theta)
            magnitude = self.scaling.magnitude
        angles = torch.outer(torch.arange(max_position, dtype=torch.float32), frequencies)
        return torch.polar(torch.full_like(angles, magnitude), angles).to(device)


def stretched_context(rope: Rope, max_position: int) -> int:
    """Tokens that the model can read, where its file states what it could before the scaling.

    A yarn file may state either, but also names the original; llama3 files state the whole.
    """
    scaling = rope.scaling
    if isinstance(scaling, LinearScaling):
        return int(max_position * scaling.factor)
    if isinstance(scaling, YarnScaling):
        return max(max_position, int(scaling.original_context * scaling.factor))
    return max_position


def rope_from_hf(parameters: Mapping[str, Any], *, default_theta: float, max_position: int) -> Rope:
    """From `rope_parameters` or, with rope_theta put into it, the older `rope_scaling`."""
    theta = need_positive(parameters, "rope_theta", default_theta)
    rotated = need(parameters, "partial_rotary_factor", float, 1.0)
    refuse(rotated != 1.0, f"rotation of only {rotated} of each head")
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    if kind == "default":
        return Rope(theta)
    if kind == "linear":
        return Rope(theta, LinearScaling(need_positive(parameters, "factor")))
    original = need(parameters, "original_max_position_embeddings", int, max_position)
    if kind == "llama3":
        return Rope(
            theta,
            Llama3Scaling(
                need_positive(parameters, "factor"),
                need_positive(parameters, "low_freq_factor"),
                need_positive(parameters, "high_freq_factor"),
                original,
            ),
        )
    if kind == "yarn":
        factor = need_positive(parameters, "factor", max_position / max(original, 1))
        return Rope(
            theta,
            YarnScaling(
                factor,
                original,
                need_positive(parameters, "beta_fast", 32.0),
                need_positive(parameters, "beta_slow", 1.0),
                parameters.get("truncate") is not False,
                _yarn_magnitude(parameters, factor),
            ),
        )
    raise _unknown(kind)


def rope_from_gguf(
    metadata: Mapping[str, Any],
    arch: str,
    *,
    default_theta: float,
    max_position: int,
    divisors: tuple[float, ...] | None,
) -> Rope:
    """From the keys of `arch`, or from the tensor rope_freqs.weight (`divisors`) if present."""
    theta = need_positive(metadata, f"{arch}.rope.freq_base", default_theta)
    scaling = f"{arch}.rope.scaling."
    factor = need(metadata, scaling + "factor", float, 0.0)  # absent, and zero, mean none
    # What llama.cpp takes a factor without a type for.
    kind = metadata.get(scaling + "type", "linear" if factor else "none")
    if divisors is not None:
        refuse(kind != "none", f"both rope_freqs.weight and rotary scaling of type {kind!r}")
        return Rope(theta, GivenScaling(divisors))
    if kind == "none" or (kind == "linear" and not factor):
        return Rope(theta)
    if kind == "linear":
        return Rope(theta, LinearScaling(need_positive(metadata, scaling + "factor")))
    if kind == "yarn":
        # Programs differ in whether these replace what follows from the factor or multiply it.
        for key in ("attn_factor", "yarn_attn_factor", "yarn_ext_factor"):
            refuse(metadata.get(scaling + key, 1.0) != 1.0, scaling + key)
        factor = need_positive(metadata, scaling + "factor")
        return Rope(
            theta,
            YarnScaling(
                factor,
                need(metadata, scaling + "original_context_length", int, max_position),
                need_positive(metadata, scaling + "yarn_beta_fast", 32.0),
                need_positive(metadata, scaling + "yarn_beta_slow", 1.0),
                True,
                _yarn_magnitude({}, factor),
            ),
        )
    raise _unknown(kind)


def _yarn_magnitude(parameters: Mapping[str, Any], factor: float) -> float:
    if parameters.get("attention_factor") is not None:
        return need_positive(parameters, "attention_factor")

    def magnitude(scale: float) -> float:
        return 0.1 * scale * math.log(factor) + 1.0 if factor > 1 else 1.0

    if parameters.get("mscale") and parameters.get("mscale_all_dim"):
        above, below = (need_positive(parameters, key) for key in ("mscale", "mscale_all_dim"))
        return magnitude(above) / magnitude(below)
    return magnitude(1.0)


def _unknown(kind: object) -> ModelLoadError:
    return ModelLoadError(
        f"this model uses rotary scaling of type {kind!r}, which is not supported; supported: "
        "default, linear, llama3, yarn; choose another model"
    )
