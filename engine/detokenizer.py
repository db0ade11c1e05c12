"""Incremental detokenization: from token ids to text that is safe to send.

Never emits half a character: bytes that do not yet form one are held until they do, or until the
end. Never emits any part of a stop string: the longest tail that could still become one is held.
"""

import codecs
from collections.abc import Callable, Sequence

TokenBytes = Callable[[int], bytes]
"""The bytes that one token adds to the text; empty for control tokens."""


class Detokenizer:
    """Text of one sequence. `push` returns the new safe text, `flush` what was held back."""

    def __init__(self, token_bytes: TokenBytes, stop: Sequence[str] = ()) -> None:
        self._token_bytes = token_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._stop = tuple(stop)
        self._held = ""
        self.stopped = False

    def push(self, token_id: int, *, may_stop: bool = True) -> str:
        """The text that became safe with this token. Sets `stopped` at a stop string, of which
        nothing was pushed before the sequence could stop."""
        text = self._decoder.decode(self._token_bytes(token_id))
        return self._emit(text) if may_stop else text

    def flush(self) -> str:
        """The held tail, at the end of a sequence that met no stop string."""
        if self.stopped:
            return ""
        text = self._emit(self._decoder.decode(b"", final=True))
        held, self._held = self._held, ""  # empty after a stop string
        return text + held

    def _emit(self, text: str) -> str:
        if self.stopped:
            return ""
        pending = self._held + text
        cut = min((at for s in self._stop if (at := pending.find(s)) >= 0), default=-1)
        if cut >= 0:
            self.stopped = True
            self._held = ""
            return pending[:cut]
        keep = _longest_stop_prefix(pending, self._stop)
        self._held = pending[len(pending) - keep :]
        return pending[: len(pending) - keep]


def _longest_stop_prefix(text: str, stops: Sequence[str]) -> int:
    """Length of the longest tail of `text` that begins one of the stop strings."""
    longest = 0
    for stop in stops:
        for length in range(min(len(stop) - 1, len(text)), longest, -1):
            if text.endswith(stop[:length]):
                longest = length
                break
    return longest
