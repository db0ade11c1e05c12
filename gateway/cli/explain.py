"""`headrace explain`: where a request's time went."""

from typing import Any

import click
import httpx
from rich.table import Table

from gateway.cli.home import find_note
from gateway.cli.output import (
    CommandError,
    NoServerError,
    NotFoundError,
    json_option,
    print_json,
    stdout,
)
from gateway.cli.store import load_settings

TIMEOUT_SECONDS = 60.0  # the engine answers between two steps
BAR_CELLS = 40

MEANINGS = {
    None: "it ran",
    "slots": "as many sequences ran as may",
    "kv": "the KV pool had not enough blocks for it",
    "cap": "you held as many KV blocks as you may",
    "head held": "what became free was kept for a request before it",
    "too late": "its deadline came before its first token could: it was ended",
    "twin": "a request of yours was about to compute most of it",
    "budget": "the step's tokens were spent",
    "not reached": "too many requests before it did not fit",
    "preempting": "the step preempted, and admitted nobody",
    "class": "it was another class's turn",
    "fair share": "it was the turn of other tenants of its class",
    "own queue": "earlier requests of yours in its class came first",
    "step": "it came while a step ran",
    "preempted": "it gave way",
    "handed over": "its prompt was computed, and moved to the decoding pool",
    "unrecorded": "too long ago to be known",
}


@click.command()
@click.argument("request_id")
@click.option("--base-url", help="With or without /v1; default: this home's server.")
@click.option("--api-key", envvar="HEADRACE_API_KEY", show_envvar=True, required=True)
@json_option
def command(request_id: str, base_url: str | None, api_key: str, as_json: bool) -> None:
    """Show why REQUEST_ID waited, and when it ran. The id is in the x-request-id header of its
    response; a server remembers the last few thousand requests."""
    url = (base_url or _url_of_home()).rstrip("/").removesuffix("/v1")
    found = _get(f"{url}/v1/requests/{request_id}/explain", api_key, request_id)
    if as_json:
        print_json(found)
        return
    for sequence in found["sequences"]:
        _show(sequence, is_alone=len(found["sequences"]) == 1)


def _url_of_home() -> str:
    settings = load_settings()
    note = find_note(settings.home)
    if note is None:
        raise NoServerError(
            "no server to ask",
            why=f"none has left its note in {settings.home}",
            next_step="headrace up, or name the server with --base-url",
        )
    return note.base_url


def _get(url: str, api_key: str, request_id: str) -> dict[str, Any]:
    what = f"could not explain {request_id}"
    headers = {"authorization": f"Bearer {api_key}"}
    try:
        reply = httpx.get(url, headers=headers, timeout=TIMEOUT_SECONDS)
        body = reply.json()
        if reply.status_code == 200:
            return dict(body)
        why = body["error"]["message"]
    except httpx.HTTPError as error:
        raise NoServerError(
            what, why=f"{type(error).__name__} from {url}", next_step="check --base-url"
        ) from error
    except (ValueError, KeyError, TypeError) as error:
        raise CommandError(
            what,
            why=f"{url} does not answer as Headrace does",
            next_step="check --base-url",
        ) from error
    if reply.status_code == 404:
        next_step = "check the id; only the tenant that made a request may ask for it"
        raise NotFoundError(what, why=why, next_step=next_step)
    raise CommandError(what, why=why, next_step="check --api-key and the server")


def _show(sequence: dict[str, Any], *, is_alone: bool) -> None:
    """One table: a row for each interval, its bar where it lies in the whole."""
    intervals = sequence["intervals"]
    total = max(1, intervals[-1]["end_us"] if intervals else 0)
    name = "" if is_alone else f"prompt {sequence['prompt']}, sequence {sequence['index']}: "
    state = "ended after" if sequence["is_finished"] else "lives since"
    table = Table("from ms", "ms", "", "cause", "", box=None, header_style="bold")
    for one in intervals:
        start, end = one["start_us"], one["end_us"]
        meaning = MEANINGS.get(one["cause"], "")
        table.add_row(
            f"{start / 1000:.3f}",
            f"{(end - start) / 1000:.3f}",
            bar(start / total, end / total, filled=one["cause"] is None),
            one["cause"] or "-",
            "; ".join(filter(None, (meaning, one["detail"]))),
        )
    waited = sequence["waited_us"] / 1000
    stdout().print(f"{name}{state} {total / 1000:.3f} ms, of which it waited {waited:.3f} ms")
    stdout().print(table)


def bar(start: float, end: float, *, filled: bool) -> str:
    """[start, end) of [0, 1) as cells; whatever its length, at least one."""
    first = min(int(start * BAR_CELLS), BAR_CELLS - 1)
    last = max(first + 1, round(end * BAR_CELLS))
    return " " * first + ("█" if filled else "░") * (last - first) + " " * (BAR_CELLS - last)
