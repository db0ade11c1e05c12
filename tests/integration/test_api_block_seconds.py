"""KV-block-seconds from the engine's last word to the books, the quota and the client."""

from dataclasses import replace

import pytest

from engine.events import SequenceFinished
from tenants.policy import Limit
from tests.gateway_kit import MODEL, open_harness

PATH = "/v1/completions"
YEAR = 366 * 86_400


class HoldsBlocks:
    """The real engine, whose sequences each held their blocks for exactly so long."""

    def __init__(self, engine):
        self._engine = engine

    def __getattr__(self, name):
        return getattr(self._engine, name)

    async def submit(self, request):
        stream = await self._engine.submit(request)
        return self._measured(stream)

    async def _measured(self, stream):
        async for event in stream:
            if isinstance(event, SequenceFinished):
                usage = replace(event.usage, kv_block_seconds=1.25 + event.index)
                yield replace(event, usage=usage)
            else:
                yield event


def completion(prompt, **more):
    return {"model": MODEL, "prompt": prompt, "max_tokens": 8} | more


@pytest.fixture
async def harness(sqlite_url):
    async with open_harness(sqlite_url, wrap_engine=HoldsBlocks) as harness:
        yield harness


async def test_the_books_say_what_all_sequences_of_all_prompts_held(harness):
    async with harness.client(await harness.tenant("acme")) as http:
        assert (await http.post(PATH, json=completion("text:a"))).status_code == 200
        two_of_two = completion(["text:a", "text:b"], n=2)
        assert (await http.post(PATH, json=two_of_two)).status_code == 200
    await harness.until_idle()
    rows = await harness.rows()
    assert [row["kv_block_seconds"] for row in rows] == [1.25, 2 * (1.25 + 2.25)]
    [used] = await harness.ledger.usage(since=0, until=1e12)
    assert (used.num_requests, used.kv_block_seconds) == (2, 8.25)


@pytest.mark.parametrize("scope", ["platform", "tenant", "key"])
async def test_a_quota_bars_once_it_is_used_up_whatever_the_last_one_used(harness, scope):
    limit = Limit(metric="kv_block_seconds", limit=4, window_seconds=YEAR)
    secret = await harness.tenant("acme", (limit,) if scope == "tenant" else ())
    if scope == "platform":
        await harness.store.set_platform_limits([limit], actor="op", now=0.0)
    if scope == "key":
        [key] = await harness.store.list_keys("acme")
        await harness.store.set_key_limits(key.id, [limit], actor="op", now=0.0)
    pair = completion("text:a", n=2)  # 3.5: counts as 4
    async with harness.client(secret) as http:
        answers = [
            await http.post(PATH, json=completion("text:a")),
            await http.post(PATH, json=pair),
        ]
        await harness.until_idle()
        refused = await http.post(PATH, json=completion("text:a"))
        metrics = (await http.get("/metrics")).text

    assert [answer.status_code for answer in answers] == [200, 200]
    assert not [name for name in answers[0].headers if name.startswith("x-ratelimit")]
    error = refused.json()["error"]
    assert (refused.status_code, error["type"]) == (429, "rate_limit_error")
    assert error["code"] == "rate_limit_exceeded"
    begin, _, when = error["message"].partition(" Please try again in ")
    assert (
        begin
        == {
            "platform": "Rate limit reached for this server on kv_block_seconds per 8784h0m0s.",
            "tenant": "Rate limit reached for this tenant on kv_block_seconds per 8784h0m0s: "
            "Limit 4, Used 6, Requested 1.",
            "key": "Rate limit reached for this key on kv_block_seconds per 8784h0m0s: "
            "Limit 4, Used 6, Requested 1.",
        }[scope]
    )
    assert when.endswith("s.")
    assert refused.headers["x-should-retry"] == "false"
    assert 'headrace_rate_limited_total{limit="kv_block_seconds",tenant="acme"} 1.0' in metrics
