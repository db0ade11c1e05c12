"""Random JSON schemas whose texts are short: what generates from them can be run to the end."""

import random
from typing import Any

_WORDS = ["a", "b1", "name", "größe", 'say "hi"', "x y", "", "\\", "é"]


def random_schema(rng: random.Random) -> dict[str, Any]:
    """A schema, at its root mostly an object, with definitions that it may refer to."""
    definitions = {f"d{i}": _leaf(rng) for i in range(2)}
    definitions["point"] = _object(rng, 1, definitions)
    root = _object if rng.random() < 0.7 else _any
    return root(rng, 3, definitions) | {"$defs": definitions}


def _any(rng: random.Random, depth: int, definitions: dict[str, Any]) -> dict[str, Any]:
    if depth == 0 or rng.random() < 0.3:
        return _leaf(rng)
    return rng.choice([_object, _array, _any_of, _reference])(rng, depth - 1, definitions)


def _object(rng: random.Random, depth: int, definitions: dict[str, Any]) -> dict[str, Any]:
    names = rng.sample(_WORDS, rng.randint(0, 3))
    return {
        "type": "object",
        "properties": {name: _any(rng, depth, definitions) for name in names},
        "required": [name for name in names if rng.random() < 0.7],
        "additionalProperties": False,
    }


def _array(rng: random.Random, depth: int, definitions: dict[str, Any]) -> dict[str, Any]:
    least = rng.randint(0, 2)
    array = {"type": "array", "minItems": least, "maxItems": rng.randint(max(1, least), 3)}
    if rng.random() < 0.2:
        return array | {"prefixItems": [_leaf(rng), _leaf(rng)], "items": False, "maxItems": 2}
    return array | {"items": _any(rng, depth, definitions)}


def _any_of(rng: random.Random, depth: int, definitions: dict[str, Any]) -> dict[str, Any]:
    return {"anyOf": [_any(rng, depth, definitions) for _ in range(rng.randint(2, 3))]}


def _reference(rng: random.Random, depth: int, definitions: dict[str, Any]) -> dict[str, Any]:
    return {"$ref": f"#/$defs/{rng.choice(sorted(definitions))}"}


def _leaf(rng: random.Random) -> dict[str, Any]:
    low = rng.randint(-300, 300)
    return rng.choice(
        [
            {"type": "boolean"},
            {"type": "null"},
            {"type": "string", "maxLength": rng.randint(0, 6)},
            {"type": "string", "minLength": 2, "maxLength": 4},
            {"type": "string", "pattern": "^[a-z]{2,4}-[0-9]{1,3}$"},
            {"type": "string", "pattern": "^(é|ü+x){1,2}$", "maxLength": 5},
            {"type": "string", "format": "ipv4"},
            {"type": "string", "format": "uuid"},
            {"type": ["string", "null"], "maxLength": 3},
            {"type": "integer", "minimum": low, "maximum": low + rng.randint(0, 2000)},
            {"type": "integer", "exclusiveMinimum": low, "exclusiveMaximum": low + 9},
            {"type": "number", "minimum": low, "maximum": low + 5, "multipleOf": 0.25},
            {"enum": rng.sample([*_WORDS, 1, -2.5, True, None, {"k": [1]}], 3)},
            {"const": rng.choice([*_WORDS, 0, False, None, [1, {"a": "b"}]])},
        ]
    )
