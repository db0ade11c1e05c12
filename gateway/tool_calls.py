"""From the text that a model writes to content and tool calls, whole or piece by piece."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from engine.model.tool_format import CALL_CLOSES, CALL_OPENS

_HEAD = re.compile(r'\s*\{\s*"name"\s*:\s*"([^"\\]*)"\s*,\s*"arguments"\s*:\s*')


@dataclass(frozen=True, slots=True)
class CallDelta:
    """A piece of the answer's call `index`. The first has id and name, the others arguments."""

    index: int
    arguments: str = ""
    id: str | None = None
    name: str | None = None


Piece = str | CallDelta
"""Of an answer: content, or a piece of a call."""


def wire_delta(piece: Piece) -> dict[str, Any]:
    """As OpenAI streams it: id, type and name once, then arguments."""
    if isinstance(piece, str):
        return {"content": piece}
    call: dict[str, Any] = {"index": piece.index}
    function = {"arguments": piece.arguments}
    if piece.id is not None:
        call |= {"id": piece.id, "type": "function"}
        function = {"name": piece.name or "", **function}
    return {"tool_calls": [call | {"function": function}]}


def wire_message(pieces: Sequence[Piece]) -> dict[str, Any]:
    """The whole of them: content is null where there are only calls."""
    content = "".join(piece for piece in pieces if isinstance(piece, str))
    calls: list[dict[str, Any]] = []
    for piece in pieces:
        if isinstance(piece, str):
            continue
        if piece.id is not None:
            function = {"name": piece.name, "arguments": ""}
            calls.append({"id": piece.id, "type": "function", "function": function})
        calls[-1]["function"]["arguments"] += piece.arguments
    if not calls:
        return {"content": content}
    return {"content": content or None, "tool_calls": calls}


class _Where(Enum):
    TEXT = "text"
    HEAD = "head"  # up to the arguments
    ARGUMENTS = "arguments"
    FOOT = "foot"  # up to the closing tag


class ToolCallParser:
    """Reads one choice. Nothing of a tag is shown, nor the white space beside it.

    A call that is cut off shows what was there of its arguments; without a whole name, nothing.
    """

    def __init__(self, new_id: Callable[[], str]) -> None:
        self._new_id = new_id
        self._where = _Where.TEXT
        self._held = ""
        self._depth = 0  # of brackets in the arguments
        self._in_string = False
        self._is_escaped = False
        self._is_after_call = False  # white space is still to be left out
        self.num_calls = 0

    @property
    def is_inside(self) -> bool:
        """Whether a call has begun and not ended."""
        return self._where is not _Where.TEXT

    def push(self, text: str) -> list[Piece]:
        """What is certain with this text."""
        self._held += text
        pieces: list[Piece] = []
        while self._step(pieces):
            pass
        return pieces

    def finish(self) -> list[Piece]:
        """What was held back, at the end of the text. A tag that was cut off is none of it; a lone
        "<" is, unless a call came right before."""
        held, self._held = self._held, ""
        tag = held.strip()
        is_cut_tag = CALL_OPENS.startswith(tag) and (self._is_after_call or len(tag) > 1)
        return [held] if held and not self.is_inside and not is_cut_tag else []

    def _step(self, pieces: list[Piece]) -> bool:
        """Read on in one place; whether another has been reached."""
        match self._where:
            case _Where.TEXT:
                return self._read_text(pieces)
            case _Where.HEAD:
                return self._read_head(pieces)
            case _Where.ARGUMENTS:
                return self._read_arguments(pieces)
            case _Where.FOOT:
                _, tag, rest = self._held.partition(CALL_CLOSES)
                if tag:
                    self._where, self._held = _Where.TEXT, rest
                return bool(tag)

    def _read_text(self, pieces: list[Piece]) -> bool:
        if self._is_after_call:
            self._held = self._held.lstrip()
        text, tag, rest = self._held.partition(CALL_OPENS)
        if tag:
            self._where, self._held = _Where.HEAD, rest
            text = text.rstrip()
        else:
            text, self._held = _split_certain(text)
        if text:
            pieces.append(text)
            self._is_after_call = False
        return bool(tag)

    def _read_head(self, pieces: list[Piece]) -> bool:
        head = _HEAD.match(self._held)
        if head is None or head.end() == len(self._held):  # more white space may come
            return False
        pieces.append(CallDelta(self.num_calls, id=self._new_id(), name=head[1]))
        self._where, self._held = _Where.ARGUMENTS, self._held[head.end() :]
        return True

    def _read_arguments(self, pieces: list[Piece]) -> bool:
        end = self._arguments_end()
        if self._held[:end]:
            pieces.append(CallDelta(self.num_calls, self._held[:end]))
        self._held = self._held[end:]
        if self._depth:
            return False
        self.num_calls += 1
        self._is_after_call = True
        self._where = _Where.FOOT
        return True

    def _arguments_end(self) -> int:
        """Where the arguments end in what is held; its length if they go on."""
        for position, character in enumerate(self._held):
            if self._is_escaped:
                self._is_escaped = False
            elif self._in_string:
                self._is_escaped = character == "\\"
                self._in_string = character != '"'
            elif character == '"':
                self._in_string = True
            elif character in "{[":
                self._depth += 1
            elif character in "]}":
                self._depth -= 1
                if self._depth == 0:
                    return position + 1
        return len(self._held)


def _split_certain(text: str) -> tuple[str, str]:
    """Text before a tag that may be beginning at its end, and the rest, with white space."""
    for length in range(min(len(CALL_OPENS) - 1, len(text)), 0, -1):
        if text.endswith(CALL_OPENS[:length]):
            break
    else:
        length = 0
    certain = text[: len(text) - length].rstrip()
    return certain, text[len(certain) :]
