"""Linear layers."""

import torch
from torch import Tensor
from torch.nn import functional as F


class Linear:
    """x @ weight.T + bias for weight [out_features, in_features] and x [rows, in_features].

    On CPU the weight is laid out once for oneDNN, which is two to six times as fast as F.linear
    (MKL) for 1 to 32 rows of float32. It also computes a row in one order however many rows there
    are, so that a sequence's numbers do not depend on its batch mates; a single row would take
    another path, slower too, and is therefore doubled.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        has_onednn = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]  # untyped
        self._is_packed = weight.device.type == "cpu" and has_onednn
        self._bias = bias
        self._weight: Tensor = (
            torch.ops.mkldnn._reorder_linear_weight(weight) if self._is_packed else weight
        )

    def __call__(self, x: Tensor) -> Tensor:
        if not self._is_packed:
            return F.linear(x, self._weight, self._bias)
        rows = x if len(x) > 1 else x.expand(2, -1)
        out: Tensor = torch.ops.mkldnn._linear_pointwise(
            rows, self._weight, self._bias, "none", [], ""
        )
        return out[: len(x)]
