"""How long a client will wait for its answer, as it says or as its SDK betrays."""

import asyncio
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

from gateway.errors import DeadlineExceededError, InvalidRequestError

HEADER = "x-headrace-deadline-ms"
# OpenAI's clients say after how many seconds without a byte they give up.
READ_TIMEOUT_HEADER = "x-stainless-read-timeout"
MAX_DEADLINE_MS = 86_400_000


@dataclass(frozen=True, slots=True)
class Arrival:
    """When a request came, on the event loop's clock, and for how long somebody waits for it."""

    at: float
    max_seconds: float | None = None  # for the whole answer

    @property
    def elapsed(self) -> float:
        """Seconds since."""
        return asyncio.get_running_loop().time() - self.at

    def remaining(self) -> float | None:
        """Seconds left; None without a deadline. Raises DeadlineExceededError if none are."""
        if self.max_seconds is None:
            return None
        left = self.max_seconds - self.elapsed
        if left <= 0:
            raise not_begun(self.max_seconds)
        return left


def read_deadline(headers: Mapping[str, str], *, is_stream: bool) -> float | None:
    """Seconds from the request's arrival to its deadline: what the client asks for, and no later
    than it would give up. Raises InvalidRequestError.

    A read timeout is a deadline only for an answer that comes in one piece: a stream's tokens and
    keep-alive comments start it anew.
    """
    seconds = math.inf
    if (text := headers.get(HEADER)) is not None:
        if not re.fullmatch("[0-9]{1,8}", text) or not 1 <= int(text) <= MAX_DEADLINE_MS:
            raise InvalidRequestError(
                f"The header {HEADER} must be a whole number of milliseconds from 1 to "
                f"{MAX_DEADLINE_MS}."
            )
        seconds = int(text) / 1000
    if not is_stream:
        seconds = min(seconds, _read_timeout(headers.get(READ_TIMEOUT_HEADER, "")))
    return None if seconds == math.inf else seconds


def not_begun(max_seconds: float) -> DeadlineExceededError:
    """A deadline has passed before any work."""
    return DeadlineExceededError(
        f"The request had not begun {max_seconds * 1000:.0f} ms after its arrival, which is its "
        "deadline. Nothing is charged. Allow more time, or try again when there is less load."
    )


def not_complete(max_seconds: float, num_tokens: int) -> DeadlineExceededError:
    """A deadline has passed when this many tokens, of prompt and output, were there."""
    return DeadlineExceededError(
        f"The answer was not complete {max_seconds * 1000:.0f} ms after the request's arrival, "
        f"which is its deadline. The {num_tokens} tokens that it had by then are charged."
    )


def out_of_reach(
    max_seconds: float, expected_seconds: float, *, at_least: bool
) -> DeadlineExceededError:
    """A deadline comes before the first token, by all that is known."""
    deadline = f"{max_seconds * 1000:.0f} ms"
    if at_least:
        what = f"cannot be expected before its deadline, {deadline}"
    else:
        what = f"is expected after {expected_seconds * 1000:.0f} ms, its deadline is {deadline}"
    return DeadlineExceededError(
        f"The first token of this request {what}. It was not begun, and nothing is charged. Allow "
        "more time, or try again when there is less load.",
        estimated_seconds=None if at_least else expected_seconds,
    )


def _read_timeout(text: str) -> float:
    """A hint: what is no positive number means nothing."""
    try:
        seconds = float(text)
    except ValueError:
        return math.inf
    return seconds if seconds > 0 else math.inf
