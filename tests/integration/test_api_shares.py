"""What a tenant's policy and class say reaches the engine; what it cannot keep is refused."""

import json
import time

import pytest

from engine.sequence import TenantShare
from tenants.classes import set_class
from tenants.policy import KVBounds
from tests.gateway_kit import MODEL, open_harness


def completion(prompt, **more):
    return {"model": MODEL, "prompt": prompt, "max_tokens": 8} | more


@pytest.fixture
async def harness(sqlite_url):
    async with open_harness(sqlite_url, num_blocks=64) as harness:
        yield harness


async def set_kv(harness, slug, **bounds):
    await harness.store.set_tenant(slug, kv=KVBounds(**bounds), actor="op", now=time.time())


@pytest.fixture
def shares(harness, monkeypatch):
    """What the engine is told of each request's tenant."""
    told = []
    add = harness.core.add

    def listen(*args, share, **more):
        told.append(share)
        add(*args, share=share, **more)

    monkeypatch.setattr(harness.core, "add", listen)
    return told


async def test_the_engine_is_told_weight_class_floor_and_cap(harness, shares):
    secret = await harness.tenant("acme", weight=2)
    changes = {"weight": 3.5, "max_wait_seconds": 1.25}
    await set_class(harness.store.database, "batch", changes, actor="op", now=time.time())
    await harness.store.set_tenant("acme", priority_class="batch", actor="op", now=time.time())
    await set_kv(harness, "acme", floor_blocks=8, cap_blocks=40)
    async with harness.client(secret) as http:
        assert (await http.post("/v1/completions", json=completion("text:a"))).status_code == 200
    assert shares == [
        TenantShare(
            tenant="acme",
            weight=2.0,
            rank=2,
            is_preemptible=True,
            class_weight=3.5,
            max_wait_seconds=1.25,
            kv_floor_blocks=8,
            kv_cap_blocks=40,
        )
    ]


async def test_floors_beyond_the_pool_are_the_operators_mistake(harness, caplog):
    acme, zeta = await harness.tenant("acme"), await harness.tenant("zeta")
    await set_kv(harness, "acme", floor_blocks=60)
    await set_kv(harness, "zeta", floor_blocks=5)
    async with harness.client() as http:
        answers = [
            await http.post(
                "/v1/completions",
                json=completion("text:ok"),
                headers={"authorization": f"Bearer {secret}"},
            )
            for secret in (acme, zeta, acme)
        ]
    assert [answer.status_code for answer in answers] == [200, 503, 200]
    error = answers[1].json()["error"]
    assert (error["type"], error["code"]) == ("service_unavailable_error", "server_misconfigured")
    assert "acme" not in answers[1].text
    assert answers[1].headers["x-should-retry"] == "false"
    assert "retry-after" not in answers[1].headers
    assert "floor of 5 blocks for zeta does not fit" in caplog.text
    await harness.until_idle()
    rows = [(row["status"], row["error_code"]) for row in await harness.rows()]
    assert rows == [("completed", None), ("failed", "server_misconfigured"), ("completed", None)]


async def test_what_a_cap_can_never_hold_is_refused(harness):
    secret = await harness.tenant("acme")
    await set_kv(harness, "acme", cap_blocks=2)
    async with harness.client(secret) as http:
        fits = await http.post("/v1/completions", json=completion("text:ok".ljust(24, ".")))
        never = await http.post("/v1/completions", json=completion("text:ok".ljust(25, ".")))
    assert (fits.status_code, never.status_code) == (200, 400)
    assert never.json()["error"]["code"] == "context_length_exceeded"


@pytest.mark.parametrize(
    ("asked", "rank", "echoed"),
    [
        ({}, 1, None),
        ({"service_tier": None}, 1, None),
        ({"service_tier": "auto"}, 1, "default"),
        ({"service_tier": "default"}, 1, "default"),
        ({"service_tier": "scale"}, 1, "default"),
        ({"service_tier": "priority"}, 1, "default"),
        ({"service_tier": "interactive"}, 1, "default"),
        ({"service_tier": "flex"}, 2, "flex"),
        ({"service_tier": "batch"}, 2, "batch"),
    ],
)
async def test_a_tier_chooses_the_class_and_is_echoed(harness, shares, asked, rank, echoed):
    expected = [] if echoed is None else [echoed]
    chat = {"model": MODEL, "messages": [{"role": "user", "content": "text:ok"}]} | asked
    options = {"stream": True, "stream_options": {"include_usage": True}}
    async with harness.client(await harness.tenant("acme")) as http:
        for path, body in (
            ("/v1/chat/completions", chat),
            ("/v1/completions", completion("text:ok", **asked)),
        ):
            whole = await http.post(path, json=body)
            stream = await http.post(path, json=body | options)
            chunks = [json.loads(line[6:]) for line in stream.text.split("\n\n")[:-2]]
            assert len(chunks) >= 3
            for answer in (whole.json(), *chunks):
                assert [answer[key] for key in answer if key == "service_tier"] == expected
    assert [share.rank for share in shares] == [rank] * 4
    assert {share.is_preemptible for share in shares} == {rank == 2}
    await harness.until_idle()
    served = {1: "standard", 2: "batch"}[rank]
    assert [row["priority_class"] for row in await harness.rows()] == [served] * 4


async def test_an_unknown_tier_is_refused_before_any_work(harness, shares):
    async with harness.client(await harness.tenant("acme")) as http:
        for tier in ("gold", "", 1, "x" * 65):
            request = completion("text:ok", service_tier=tier)
            response = await http.post("/v1/completions", json=request)
            assert response.status_code == 400
            assert response.json()["error"]["param"] == "service_tier"
    assert shares == []
    assert await harness.rows() == []
