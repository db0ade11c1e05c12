"""Why a request waited, for its tenant, over HTTP and in the shell; steps, for the operator."""

import asyncio
import json
from itertools import pairwise

import httpx
from click.testing import CliRunner, Result

from engine.waits import WaitCause
from gateway.cli import main
from gateway.cli.explain import MEANINGS, bar
from tests.gateway_kit import Harness, open_harness, until

BODY = {"model": "bytes", "prompt": "text:hello|", "max_tokens": 8}


async def four_requests(harness: Harness) -> tuple[list[str], str, str]:
    """acme's first runs in the only slot; its second and third wait for it, and zeta's. All end.

    Their ids, and the keys of acme and zeta.
    """
    acme, zeta = [await harness.tenant(slug) for slug in ("acme", "zeta")]
    harness.runner.open.clear()
    sending = []
    async with harness.client(acme) as http, harness.client(zeta) as other:
        for number, client in enumerate((http, http, http, other)):
            sending.append(asyncio.create_task(client.post("/v1/completions", json=BODY)))
            await until(lambda n=number + 1: len(harness.gateway.engine._streams) == n)
        harness.runner.open.set()
        replies = await asyncio.gather(*sending)
    assert [reply.status_code for reply in replies] == [200] * 4
    return [reply.headers["x-request-id"] for reply in replies], acme, zeta


async def test_a_tenant_learns_why_its_request_waited(sqlite_url: str) -> None:
    async with open_harness(sqlite_url, max_seqs=1, step_seconds=0.002) as harness:
        (_, _, own_third, foreign_id), acme, zeta = await four_requests(harness)
        async with harness.client(acme) as http, harness.client(zeta) as other:
            own = await http.get(f"/v1/requests/{own_third}/explain")
            foreign = await http.get(f"/v1/requests/{foreign_id}/explain")
            unknown = await http.get(f"/v1/requests/req_{'0' * 32}/explain")
            malformed = await http.get("/v1/requests/x/explain")
            theirs = await other.get(f"/v1/requests/{foreign_id}/explain")
            nobody = await harness.client().get(f"/v1/requests/{own_third}/explain")

    assert own.status_code == 200
    assert own.json()["id"] == own_third
    (sequence,) = own.json()["sequences"]
    assert (sequence["prompt"], sequence["index"], sequence["is_finished"]) == (0, 0, True)
    intervals = sequence["intervals"]
    assert intervals[0]["cause"] == "own queue"
    assert intervals[-1]["cause"] is None
    assert intervals[0]["start_us"] == 0
    assert all(a["end_us"] == b["start_us"] for a, b in pairwise(intervals))
    assert sequence["waited_us"] == intervals[-1]["start_us"] > 5_000
    assert "zeta" not in own.text

    causes = [one["cause"] for one in theirs.json()["sequences"][0]["intervals"]]
    assert "slots" in causes
    assert "acme" not in theirs.text

    assert [r.status_code for r in (foreign, unknown, malformed, nobody)] == [404, 404, 404, 401]
    assert foreign.text.replace(foreign_id, "ID") == unknown.text.replace(f"req_{'0' * 32}", "ID")
    assert foreign.json()["error"]["code"] == "request_not_found"


async def test_prompts_and_choices_have_explanations_of_their_own(sqlite_url: str) -> None:
    async with (
        open_harness(sqlite_url) as harness,
        harness.client(await harness.tenant("acme")) as http,
    ):
        body = BODY | {"prompt": ["text:a|", "text:b|"], "n": 2}
        reply = await http.post("/v1/completions", json=body)
        found = await http.get(f"/v1/requests/{reply.headers['x-request-id']}/explain")

    names = [(one["prompt"], one["index"]) for one in found.json()["sequences"]]
    assert names == [(0, 0), (0, 1), (1, 0), (1, 1)]


async def test_the_operator_sees_what_steps_decided(sqlite_url: str) -> None:
    environ = {"HEADRACE_OPERATOR_TOKEN": "secret"}
    async with open_harness(sqlite_url, max_seqs=1, environ=environ) as harness:
        ids, acme, _ = await four_requests(harness)
        async with harness.client("secret") as http, harness.client(acme) as tenant:
            refused = await tenant.get("/admin/steps")
            wrong = [await http.get(f"/admin/steps?limit={n}") for n in ("0", "1025", "x", "-1")]
            two = await http.get("/admin/steps?limit=2")
            every = await http.get("/admin/steps?limit=1024")

    assert refused.status_code == 401
    assert {reply.status_code for reply in wrong} == {400}
    steps = every.json()["steps"]
    assert two.json()["steps"] == steps[-2:]
    assert [one["step"] for one in steps] == list(range(1, len(steps) + 1))
    admitted = [sequence for one in steps for sequence in one["admitted"]]
    assert admitted[0] == f"{ids[0]}-0"
    assert sorted(admitted) == sorted(f"{one}-0" for one in ids)
    first = next(one for one in steps if one["heads"] and one["stopped_by"] == "slots")
    head = first["heads"][-1]
    assert (head["tenant"], head["cause"]) in {("acme", "slots"), ("zeta", "slots")}


async def test_steps_are_streamed_as_they_happen(sqlite_url: str) -> None:
    async with open_harness(sqlite_url) as harness, harness.listening() as url:
        secret = await harness.tenant("acme")
        headers = {"accept": "text/event-stream"}
        async with (
            harness.client(secret) as http,
            httpx.AsyncClient(base_url=url, trust_env=False) as operator,
            operator.stream("GET", "/admin/steps", headers=headers) as stream,
        ):
            assert stream.headers["content-type"].startswith("text/event-stream")
            assert (await http.post("/v1/completions", json=BODY)).status_code == 200
            seen = []
            async with asyncio.timeout(10):
                async for line in stream.aiter_lines():
                    if line.startswith("data: "):
                        seen.append(json.loads(line[6:])["step"])
                    if len(seen) == 3:
                        break

    assert seen == [1, 2, 3]


async def test_headrace_explain_shows_a_table_or_json(sqlite_url: str) -> None:
    async with open_harness(sqlite_url, max_seqs=1) as harness, harness.listening() as url:
        (_, _, third, foreign_id), acme, _ = await four_requests(harness)

        async def explain(*arguments: str) -> Result:
            command = ["explain", "--base-url", f"{url}/v1", "--api-key", acme, *arguments]
            return await asyncio.to_thread(CliRunner().invoke, main, command)

        table, as_json = await explain(third), await explain(third, "--json")
        foreign = await explain(foreign_id)
    gone = await explain(third)

    assert table.exit_code == 0, table.output
    assert "of which it waited" in table.stdout
    assert (
        "own queue  earlier requests of yours in its class came first; 1 before it" in table.stdout
    )
    assert "█" in table.stdout
    assert json.loads(as_json.stdout)["id"] == third
    assert (foreign.exit_code, gone.exit_code) == (3, 5)
    assert "only the tenant that made a request may ask" in foreign.stderr


def test_every_cause_has_its_words_and_bars_lie_where_time_does() -> None:
    assert MEANINGS.keys() == {None, *WaitCause}
    assert bar(0.0, 0.5, filled=False) == "░" * 20 + " " * 20
    assert bar(0.5, 1.0, filled=True) == " " * 20 + "█" * 20
    assert bar(0.9999, 1.0, filled=True) == " " * 39 + "█"
