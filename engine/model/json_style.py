"""How generated JSON is written, as options of llguidance's JSON compiler.

Compact, with at most the one space after a comma or colon that most models are used to: where any
whitespace is allowed, a weak model can write it for ever. Keywords that cannot be enforced are an
error, not ignored.
"""

from collections.abc import Mapping
from types import MappingProxyType

COMPACT: Mapping[str, object] = MappingProxyType(
    {
        "whitespace_flexible": False,
        "item_separator": ", ?",
        "key_separator": ": ?",
        "lenient": False,
        "coerce_one_of": False,
    }
)
