"""Weights of one checkpoint, read by name when asked for, and accounted for afterwards."""

from collections.abc import Callable, Iterable

import torch

from engine.errors import ModelLoadError

# Buffers that old checkpoints carry although they follow from the configuration.
DERIVED_SUFFIXES = ("rotary_emb.inv_freq", "attention.masked_bias", "attention.bias")


class Weights:
    """Tensors under their Hugging Face names; `read` brings one into memory."""

    def __init__(
        self,
        names: Iterable[str],
        read: Callable[[str], torch.Tensor],
        *,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self._unused = {name for name in names if not name.endswith(DERIVED_SUFFIXES)}
        self._names = frozenset(self._unused)
        self._read = read
        self._device = device
        self._dtype = dtype

    def take(self, name: str, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        """The tensor on the model's device, in its precision or in `dtype`.

        Raises ModelLoadError if it is absent or of another shape.
        """
        if name not in self._names:
            raise ModelLoadError(
                f"the checkpoint has no tensor {name}: it is damaged or of another architecture; "
                "fetch it again or choose a supported model"
            )
        tensor = self._read(name)
        if tuple(tensor.shape) != shape:
            raise ModelLoadError(
                f"tensor {name} has shape {list(tensor.shape)} where the configuration says "
                f"{list(shape)}: config and weights are not of the same model"
            )
        self._unused.discard(name)
        return tensor.to(device=self._device, dtype=dtype or self._dtype)

    def drop(self, name: str) -> None:
        """Say that this tensor, if present, is knowingly not used."""
        self._unused.discard(name)

    def check_all_used(self) -> None:
        """Raise ModelLoadError if a tensor was ignored: the model would compute something else."""
        if self._unused:
            some = ", ".join(sorted(self._unused)[:3])
            raise ModelLoadError(
                f"{len(self._unused)} tensors of the checkpoint have no use in this architecture "
                f"({some}): the model is a variant that is not supported"
            )
