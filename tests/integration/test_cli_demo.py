"""`headrace demo load` against a real gateway and scheduler; only the tensors are missing."""

import asyncio
import json
import os
from contextlib import asynccontextmanager

import pytest
from click.testing import CliRunner

from gateway.cli import main
from gateway.cli.home import ServerNote, find_note, remove_note, write_note
from gateway.settings import Settings
from migrations.upgrade import upgrade
from tests.gateway_kit import MAX_MODEL_LEN, MODEL, open_harness

NOTE = {
    "model": MODEL,
    "max_seqs": 8,
    "max_step_tokens": 256,
    "max_model_len": MAX_MODEL_LEN,
    "num_blocks": 512,
    "block_size": 16,
}


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("HEADRACE_HOME", str(tmp_path))
    return tmp_path


async def demo_load(arguments):
    """Run the command in a thread, as another process would."""
    command = ["demo", "load", *arguments.split()]
    return await asyncio.to_thread(CliRunner().invoke, main, command)


@asynccontextmanager
async def serving(home):
    """A gateway in this home, with its note."""
    url = Settings(home=home).resolved_database_url
    await asyncio.to_thread(upgrade, url)
    async with (
        # Slow steps: the queue must build up in the scheduler, not before the ledger.
        open_harness(url, step_seconds=0.03) as harness,
        harness.listening() as base_url,
    ):
        write_note(home, ServerNote(pid=os.getpid(), base_url=base_url, **NOTE))
        yield harness


async def test_each_tenant_gets_its_share_within_the_bound_and_no_key_stays(home):
    async with serving(home) as harness:
        result = await demo_load("--seconds 6 --json")
        await harness.until_idle()
        keys = await harness.store.list_keys()

    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    tenants = {tenant["tenant"]: tenant for tenant in report["tenants"]}
    assert {name: tenant["weight"] for name, tenant in tenants.items()} == {
        "demo-noisy": 1,
        "demo-steady": 1,
        "demo-double": 2,
    }
    assert report["backlogged_seconds"] > 1, report
    for tenant in tenants.values():
        assert tenant["num_errors"] == 0
        assert tenant["share"] == pytest.approx(tenant["entitlement"], rel=0.25)
        assert tenant["ttft_ms"]["p99"] >= tenant["ttft_ms"]["p50"] > 0
        assert tenant["tokens"] > 0
    assert 0 < report["gap"]["gap"] <= report["gap"]["bound"]
    assert len(keys) == 3
    assert all(key.revoked_at is not None for key in keys)


async def test_it_repeats_and_prints_a_table(home):
    async with serving(home):
        await demo_load("--seconds 1")
        result = await demo_load("--seconds 1")

    assert result.exit_code == 0, result.output
    assert "demo-noisy" in result.stdout
    assert "backlogged for" in result.stdout


async def test_without_a_server_it_says_how_to_start_one(home):
    result = await demo_load("--seconds 1")

    assert result.exit_code == 5
    assert "next: headrace up" in result.stderr


def test_the_note_of_a_dead_server_is_no_server(home):
    write_note(home, ServerNote(pid=2**22 + 1, base_url="http://127.0.0.1:1", **NOTE))

    assert find_note(home) is None


def test_a_server_takes_only_its_own_note_away(home):
    note = ServerNote(pid=os.getpid(), base_url="http://127.0.0.1:1", **NOTE)
    write_note(home, note)

    remove_note(home, pid=1)
    assert find_note(home) == note
    remove_note(home, os.getpid())
    assert find_note(home) is None
