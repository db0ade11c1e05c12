"""What a tenant's policy and class say reaches the engine; what it cannot keep is refused."""

import time

import pytest

from engine.sequence import TenantShare
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


async def test_the_engine_is_told_weight_class_floor_and_cap(harness, monkeypatch):
    shares = []
    add = harness.core.add
    monkeypatch.setattr(
        harness.core,
        "add",
        lambda *args, share, **more: (shares.append(share), add(*args, share=share, **more)),
    )
    secret = await harness.tenant("acme", weight=2)
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
