"""Values out of a model's own description, which may be damaged, incomplete or beyond us."""

from collections.abc import Mapping
from typing import Any, TypeVar

from engine.errors import ModelLoadError

T = TypeVar("T")


def need(source: Mapping[str, Any], key: str, kind: type[T], default: T | None = None) -> T:
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


def need_positive(source: Mapping[str, Any], key: str, default: float | None = None) -> float:
    """As `need` for a float, which must be above zero."""
    value = need(source, key, float, default)
    if not 0.0 < value < float("inf"):
        raise ModelLoadError(
            f"the model's configuration says {key} {value}, where only a positive number makes "
            "sense: it is damaged; fetch the model again"
        )
    return value


def refuse(condition: bool, what: str) -> None:
    """Raise ModelLoadError if the model needs `what`."""
    if condition:
        raise ModelLoadError(
            f"this model uses {what}, which is not supported; choose another model"
        )
