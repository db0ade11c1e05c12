"""From bytes to a validated body, or to one error that names the field at fault.

Unknown fields are ignored, as every OSS client sends some. Fields that are known, would change the
answer and are not supported are refused by name: silence would be a wrong answer.
"""

from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, ValidationError
from pydantic_core import PydanticCustomError

from gateway.errors import InvalidRequestError, UnsupportedParameterError

Neutral = dict[str, tuple[Any, ...]]
"""By unsupported field: its values that ask for nothing special."""


class Body(BaseModel):
    """Of a request, or a part of one."""

    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)


def refuse(reason: str, field: str = "") -> PydanticCustomError:
    """A value that cannot be; `field` where the validator's own place does not name it."""
    return PydanticCustomError("refused", "{reason}", {"reason": reason, "field": field})


def unsupported(reason: str, field: str = "") -> PydanticCustomError:
    """A value that OpenAI allows and this server does not."""
    return PydanticCustomError(
        "unsupported_parameter", "{reason}", {"reason": reason, "field": field}
    )


def refuse_unsupported(data: Any, fields: Neutral) -> None:
    """Raise for the first of those fields that asks for something."""
    for name, neutral in fields.items() if isinstance(data, dict) else ():
        if name in data and not any(_same(data[name], value) for value in neutral):
            raise unsupported(f"This value of '{name}' is not supported.", name)


def _same(value: Any, neutral: Any) -> bool:
    return type(value) is type(neutral) and value == neutral  # so that 0 is not False, nor 1 True


def _whole(value: Any) -> Any:
    return int(value) if isinstance(value, float) and value.is_integer() else value


# JSON has one kind of number: 256.0 is a whole one.
Whole = Annotated[int, BeforeValidator(_whole)]

BodyT = TypeVar("BodyT", bound=Body)


def parse(schema: type[BodyT], raw: bytes) -> BodyT:
    """A validated body, or InvalidRequestError naming the field."""
    try:
        return schema.model_validate_json(raw)
    except ValidationError as error:
        raise _first_error(error) from None


def _first_error(error: ValidationError) -> InvalidRequestError:
    first = error.errors(include_url=False, include_input=False)[0]
    message, kind = first["msg"], first["type"]
    if kind == "json_invalid":
        return InvalidRequestError(f"The body is not valid JSON: {message}", code=None)
    # A check over several fields knows itself which one is at fault.
    pieces = (*first["loc"], first.get("ctx", {}).get("field"))
    path = ".".join(str(piece) for piece in pieces if piece not in (None, ""))
    if kind == "unsupported_parameter":
        return UnsupportedParameterError(message, param=path)
    if kind == "missing":
        return InvalidRequestError(f"Missing required parameter: '{path}'.", param=path)
    return InvalidRequestError(
        f"Invalid value for '{path}': {message}." if path else f"Invalid body: {message}.",
        param=path or None,
    )
