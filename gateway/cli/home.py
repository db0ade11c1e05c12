"""What lies in HEADRACE_HOME besides the database: the note of the server that runs there."""

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

NOTE = "server.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerNote:
    """Where the server of this home answers, and the limits that its fairness bound rests on."""

    pid: int
    base_url: str
    model: str
    max_seqs: int
    max_step_tokens: int
    max_model_len: int
    num_blocks: int
    block_size: int


def write_note(home: Path, note: ServerNote) -> None:
    """Leave the note for other commands, unless another live server's is there.

    It is replaced whole, never half written.
    """
    earlier = find_note(home)
    if earlier is not None and earlier.pid != note.pid:
        return
    partial = home / f"{NOTE}.{note.pid}"
    partial.write_text(json.dumps(asdict(note)))
    partial.replace(home / NOTE)


def remove_note(home: Path, pid: int) -> None:
    """Take the note away at the end, unless it is another server's."""
    note = find_note(home)
    if note is not None and note.pid == pid:
        (home / NOTE).unlink(missing_ok=True)


def find_note(home: Path) -> ServerNote | None:
    """The note of a server whose process lives; None otherwise."""
    try:
        note = ServerNote(**json.loads((home / NOTE).read_text()))
    except (OSError, ValueError, TypeError):
        return None
    return note if _is_alive(note.pid) else None


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)  # signal 0 only asks
    except ProcessLookupError:
        return False
    except PermissionError:  # another user's
        return True
    return True
