"""The `headrace` command: help, errors, tenants, keys, database, doctor. Real SQLite."""

import json
import os
import signal
import socket
import sqlite3
from dataclasses import replace

import pytest
from click.testing import CliRunner

from gateway.cli import COMMANDS, main
from gateway.cli.home import ServerNote, find_note, remove_note, write_note

NOTE = ServerNote(
    pid=os.getppid(),  # another process that lives
    base_url="http://127.0.0.1:1",
    model="m",
    max_seqs=1,
    max_step_tokens=1,
    max_model_len=2,
    num_blocks=1,
    block_size=1,
)


@pytest.fixture
def headrace(tmp_path, monkeypatch):
    """Runs `headrace ARGUMENTS` in a home of its own."""
    monkeypatch.setenv("HEADRACE_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("HEADRACE_PORT", "0")
    return lambda arguments: CliRunner().invoke(main, arguments.split())


@pytest.fixture
def migrated(headrace):
    assert headrace("db upgrade").exit_code == 0
    return headrace


def read_json(result):
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_every_command_explains_itself(headrace):
    overview = headrace("--help").stdout
    for name in COMMANDS:
        assert f"\n  {name} " in overview
        result = headrace(f"{name} --help")
        assert result.exit_code == 0, result.output
        assert result.stdout.startswith(f"Usage: main {name}")


def test_an_unknown_command_is_wrong_usage(headrace):
    assert headrace("dance").exit_code == 2


def test_an_error_says_what_why_and_what_next(headrace):
    result = headrace("tenants list")

    assert result.exit_code == 1
    assert result.stdout == ""
    what, why, next_step = result.stderr.splitlines()
    assert what == "Error: could not list tenants"
    assert why.startswith("  why:  there is no ")
    assert next_step == "  next: headrace db upgrade"


def test_with_json_an_error_is_json_on_stderr(migrated):
    result = migrated("tenants show nobody --json")

    assert result.exit_code == 3
    assert result.stdout == ""
    error = json.loads(result.stderr)["error"]
    assert error["what"] == "could not show tenant nobody"
    assert error["next"] == "headrace tenants list"


def test_a_setting_that_cannot_be_used_is_named(headrace, monkeypatch):
    monkeypatch.setenv("HEADRACE_MAX_SEQS", "many")

    result = headrace("tenants list")

    assert result.exit_code == 2
    assert "HEADRACE_MAX_SEQS='many'" in result.stderr


def test_upgrade_repeats(headrace):
    first = read_json(headrace("db upgrade --json"))

    assert first == read_json(headrace("db upgrade --json"))
    assert first["revision"]


def test_a_tenant_is_created_shown_listed_and_set(migrated):
    created = read_json(
        migrated("tenants create acme --name Acme --weight 2 --limit requests=60/60 --json")
    )

    assert (created["slug"], created["name"], created["weight"]) == ("acme", "Acme", 2.0)
    assert created["limits"] == [{"metric": "requests", "limit": 60, "window_seconds": 60}]
    assert read_json(migrated("tenants list --json")) == [created]
    assert read_json(migrated("tenants show acme --json")) == created | {"keys": []}

    changed = read_json(migrated("tenants set acme --weight 3 --json"))

    assert (changed["weight"], changed["limits"]) == (3.0, created["limits"])
    assert changed["policy_version"] == 2
    gone = read_json(migrated("tenants set acme --no-limits --status suspended --json"))
    assert (gone["limits"], gone["status"], gone["weight"]) == ([], "suspended", 3.0)
    assert "acme" in migrated("tenants list").stdout


def test_kv_bounds_are_set_one_by_one_within_the_pool_of_the_server_that_runs(migrated, tmp_path):
    created = read_json(migrated("tenants create acme --kv-floor 10 --kv-cap 20 --json"))
    assert created["kv"] == {"floor_blocks": 10, "cap_blocks": 20}
    changed = read_json(migrated("tenants set acme --kv-cap 40 --json"))
    assert changed["kv"] == {"floor_blocks": 10, "cap_blocks": 40}
    assert changed["policy_version"] == 2
    assert "10-40" in migrated("tenants list").stdout
    changed = read_json(migrated("tenants set acme --no-kv-cap --json"))
    assert changed["kv"] == {"floor_blocks": 10, "cap_blocks": None}
    assert migrated("tenants set acme --kv-cap 9").exit_code == 2
    assert migrated("tenants set acme --kv-floor -1").exit_code == 2
    assert migrated("tenants set acme --kv-cap 9 --no-kv-cap").exit_code == 2

    write_note(tmp_path / "home", replace(NOTE, num_blocks=12))

    refused = migrated("tenants create zeta --kv-floor 3")
    assert refused.exit_code == 4
    assert "3 blocks do not fit: other floors take 10 of the 12" in refused.stderr
    assert migrated("tenants create zeta --kv-floor 2").exit_code == 0
    assert migrated("tenants set acme --kv-floor 11").exit_code == 4
    assert migrated("tenants set zeta --status archived").exit_code == 0
    assert migrated("tenants set acme --kv-floor 11").exit_code == 0


def test_classes_are_listed_and_set(migrated):
    assert [one["name"] for one in read_json(migrated("classes list --json"))] == [
        "interactive",
        "standard",
        "batch",
    ]
    changed = read_json(migrated("classes set batch --max-queue-seconds 30 --json"))
    assert changed == {
        "name": "batch",
        "rank": 2,
        "preemptible": True,
        "weight": 1.0,
        "max_wait_seconds": None,
        "max_queue_seconds": 30.0,
        "max_queued": None,
    }
    changed = read_json(migrated("classes set batch --not-preemptible --json"))
    assert (changed["preemptible"], changed["max_queue_seconds"]) == (False, 30.0)
    assert "batch" in migrated("classes list").stdout
    changed = read_json(migrated("classes set batch --no-max-queue-seconds --json"))
    assert (changed["preemptible"], changed["max_queue_seconds"]) == (False, None)
    assert migrated("classes set gold --preemptible").exit_code == 3
    assert migrated("classes set batch --max-queue-seconds 0").exit_code == 2
    assert migrated("classes set batch --max-queue-seconds 1 --no-max-queue-seconds").exit_code == 2
    assert migrated("classes set batch").exit_code == 2


def test_every_column_of_a_class_is_set_and_taken_away(migrated):
    changed = read_json(
        migrated(
            "classes set batch --rank 5 --weight 2.5 --max-wait-seconds 4 --max-queue-seconds 60 "
            "--max-queued 8 --not-preemptible --json"
        )
    )
    assert changed == {
        "name": "batch",
        "rank": 5,
        "preemptible": False,
        "weight": 2.5,
        "max_wait_seconds": 4.0,
        "max_queue_seconds": 60.0,
        "max_queued": 8,
    }
    assert read_json(migrated("classes list --json"))[-1] == changed
    for option in ("max-wait-seconds", "max-queue-seconds", "max-queued"):
        changed[option.replace("-", "_")] = None
        assert read_json(migrated(f"classes set batch --no-{option} --json")) == changed
        assert migrated(f"classes set batch --no-{option} --{option} 3").exit_code == 2


def test_a_class_is_created_used_and_deleted(migrated):
    created = read_json(
        migrated("classes create gold --rank 9 --weight 4 --max-wait-seconds 0.5 --json")
    )
    assert created == {
        "name": "gold",
        "rank": 9,
        "preemptible": False,
        "weight": 4.0,
        "max_wait_seconds": 0.5,
        "max_queue_seconds": None,
        "max_queued": None,
    }
    assert migrated("tenants create acme --class gold").exit_code == 0
    refused = migrated("classes delete gold")
    assert refused.exit_code == 4
    assert refused.stderr.splitlines() == [
        "Error: could not delete class gold",
        "  why:  tenant acme is in class gold; move them first",
        "  next: headrace classes list",
    ]
    assert migrated("tenants set acme --class standard").exit_code == 0
    assert read_json(migrated("classes delete gold --json")) == created
    names = [one["name"] for one in read_json(migrated("classes list --json"))]
    assert names == ["interactive", "standard", "batch"]


@pytest.mark.parametrize(
    ("arguments", "exit_code", "why"),
    [
        ("create batch --rank 9", 4, "class batch exists"),
        ("create gold --rank 1", 4, "rank 1 is that of class standard"),
        ("create flex --rank 9", 2, "something else as a request's service_tier"),
        ("create Gold --rank 9", 2, "use 1 to 63 of a-z"),
        ("create gold --rank -1", 2, "rank -1: must be a whole number from 0"),
        ("create gold", 2, "--rank"),
        ("create gold --rank 9 --weight nan", 2, "weight nan: must be a number from 0.001"),
        ("set batch --weight inf", 2, "weight inf: must be"),
        ("set batch --weight 0", 2, "weight 0.0: must be"),
        ("set batch --rank 0", 4, "rank 0 is that of class interactive"),
        ("set batch --rank 99999", 2, "rank 99999: must be"),
        ("set batch --max-wait-seconds -1", 2, "max_wait_seconds -1.0: must be"),
        ("set batch --max-queued 0", 2, "max_queued 0: must be"),
        ("set batch --max-queued some", 2, "'some' is not a valid integer"),
        ("set gold --weight 2", 3, "no priority class 'gold'"),
        ("delete gold", 3, "no priority class 'gold'"),
    ],
)
def test_what_cannot_be_a_class_is_refused_with_the_reason(migrated, arguments, exit_code, why):
    before = read_json(migrated("classes list --json"))
    result = migrated(f"classes {arguments}")
    assert (result.exit_code, result.stdout) == (exit_code, "")
    assert why in result.stderr
    assert read_json(migrated("classes list --json")) == before


def test_a_quota_on_block_seconds_is_set_like_any_other(migrated):
    limit = {"metric": "kv_block_seconds", "limit": 36000, "window_seconds": 3600}
    given = "--limit kv_block_seconds=36000/3600"
    created = read_json(migrated(f"tenants create acme {given} --json"))
    assert created["limits"] == [limit]
    assert "kv_block_seconds=36000/3600" in migrated("tenants list").stdout
    assert read_json(migrated(f"keys create --tenant acme {given} --json"))["limits"] == [limit]
    assert read_json(migrated(f"platform set {given} --json"))["limits"] == [limit]
    without = migrated("tenants set acme --limit kv_block_seconds=5")
    assert without.exit_code == 2
    assert "add one in seconds, kv_block_seconds=5/60" in without.stderr
    assert migrated("tenants set acme --limit kv_block_seconds=0/60").exit_code == 2
    assert "may overrun it" in " ".join(migrated("tenants set --help").stdout.split())


def test_what_is_refused_has_the_documented_exit_code(migrated):
    migrated("tenants create acme")

    assert migrated("tenants create acme").exit_code == 4
    assert migrated("tenants create Acme!").exit_code == 2
    assert migrated("tenants set acme --weight -1").exit_code == 2
    assert migrated("tenants set acme --limit requests=5").exit_code == 2
    assert migrated("tenants set acme --limit dances=5/60").exit_code == 2
    assert migrated("tenants set acme --no-limits --limit concurrent=1").exit_code == 2
    assert migrated("keys create --tenant nobody").exit_code == 3
    assert migrated("keys revoke key_0").exit_code == 3


def test_a_key_is_shown_once_and_stored_hashed(migrated, tmp_path):
    migrated("tenants create acme")

    made = read_json(migrated("keys create --tenant acme --name ci --expires-days 1 --json"))

    secret = made.pop("api_key")
    assert secret.startswith("hr_")
    assert read_json(migrated("keys list --json")) == [made]
    assert secret not in migrated("keys list").stdout
    assert made["expires_at"] - made["created_at"] == pytest.approx(86_400, abs=1)
    with sqlite3.connect(tmp_path / "home" / "headrace.db") as database:
        stored = "\n".join(database.iterdump())
    database.close()
    assert "acme" in stored
    assert secret not in stored


def test_a_revoked_key_is_listed_as_such(migrated):
    migrated("tenants create acme")
    key_id = read_json(migrated("keys create --tenant acme --json"))["id"]

    revoked = read_json(migrated(f"keys revoke {key_id} --json"))

    assert revoked["revoked_at"] is not None
    assert "revoked" in migrated("keys list --tenant acme").stdout


def test_a_keys_limits_are_replaced_and_taken_away(migrated):
    migrated("tenants create acme")
    made = read_json(migrated("keys create --tenant acme --limit concurrent=2 --json"))
    key_id, limit = made["id"], {"metric": "requests", "limit": 5, "window_seconds": 60}

    changed = read_json(migrated(f"keys set {key_id} --limit requests=5/60 --json"))

    assert changed["limits"] == [limit]
    assert read_json(migrated("keys list --json"))[0]["limits"] == [limit]
    assert read_json(migrated(f"keys set {key_id} --no-limits --json"))["limits"] == []
    assert migrated(f"keys set {key_id}").exit_code == 2
    assert migrated("keys set key_0 --no-limits").exit_code == 3


def test_the_platforms_limits_are_set_and_shown(migrated):
    assert read_json(migrated("platform show --json")) == {"limits": []}

    changed = read_json(migrated("platform set --limit concurrent=64 --json"))

    assert changed == {"limits": [{"metric": "concurrent", "limit": 64, "window_seconds": 0}]}
    assert read_json(migrated("platform show --json")) == changed
    assert migrated("platform show").stdout == "concurrent=64\n"
    assert migrated("platform set --no-limits").stdout == "no limits\n"
    assert migrated("platform set").exit_code == 2
    assert migrated("platform set --no-limits --limit concurrent=1").exit_code == 2


def test_the_doctor_finds_a_taken_port_and_an_old_database(headrace, tmp_path, monkeypatch):
    (tmp_path / "home").mkdir()
    with sqlite3.connect(tmp_path / "home" / "headrace.db") as database:
        database.execute("CREATE TABLE alembic_version (version_num TEXT)")
        database.execute("INSERT INTO alembic_version VALUES ('0000')")
    database.close()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        monkeypatch.setenv("HEADRACE_PORT", str(taken.getsockname()[1]))
        result = headrace("doctor --json")

    assert result.exit_code == 1
    findings = {finding["name"]: finding for finding in json.loads(result.stdout)}
    assert findings["port"]["ok"] is False
    assert findings["database"]["ok"] is False
    assert findings["database"]["next_step"] == "headrace db upgrade"
    assert findings["python"] == findings["python"] | {"ok": True, "next_step": None}


def test_the_doctor_likes_a_fresh_home(headrace):
    findings = json.loads(headrace("doctor --json").stdout)

    # The model may not be installed here; all else must be well.
    assert [f for f in findings if not f["ok"] and f["name"] != "model"] == []


def test_a_limit_without_its_window_shows_how_to_add_one(migrated):
    result = migrated("tenants create acme --limit requests=2")

    assert result.exit_code == 2
    assert "add one in seconds, requests=2/60" in result.stderr


def test_a_second_server_of_a_home_leaves_the_firsts_note(tmp_path):
    second = replace(NOTE, pid=os.getpid(), base_url="http://127.0.0.1:2")

    write_note(tmp_path, NOTE)
    write_note(tmp_path, second)
    remove_note(tmp_path, second.pid)

    assert find_note(tmp_path) == NOTE


def test_ctrl_c_while_the_model_loads_ends_with_one_line(migrated, monkeypatch):
    def press_ctrl_c(*_, **__):
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr("gateway.build.load_model", press_ctrl_c)
    # A test run that was started in the background ignores it.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        result = migrated("serve --model some.gguf")
    finally:
        signal.signal(signal.SIGINT, before)

    assert (result.exit_code, result.output.strip()) == (1, "Aborted!")


def test_serve_refuses_a_home_without_a_schema_and_makes_no_file(headrace, tmp_path):
    home = tmp_path / "home"

    without_file = headrace("serve")
    assert not home.exists()
    home.mkdir()
    (home / "headrace.db").touch()
    without_tables = headrace("serve")

    for result in (without_file, without_tables):
        assert result.exit_code == 4
        assert result.stderr.splitlines()[-1] == "  next: headrace db upgrade"


def test_serve_starts_while_its_database_is_only_away(headrace, monkeypatch):
    monkeypatch.setenv("HEADRACE_DATABASE_URL", "postgresql://127.0.0.1:1/away")

    result = headrace("serve --model nowhere.gguf")

    assert result.stderr.startswith("Error: the engine did not start")


def test_serve_names_the_database_url_that_it_cannot_use(headrace, monkeypatch):
    monkeypatch.setenv("HEADRACE_DATABASE_URL", "mysql://127.0.0.1/x")

    result = headrace("serve")

    assert result.exit_code == 2
    assert "set HEADRACE_DATABASE_URL" in result.stderr


def test_an_unknown_policy_is_named_by_its_variable(migrated, monkeypatch):
    monkeypatch.setenv("HEADRACE_POLICY", "foo")

    result = migrated("serve")

    assert result.exit_code == 1
    assert "HEADRACE_POLICY='foo' is not one of drf, drr, fcfs, priority, vtc, wfq" in result.stderr


@pytest.mark.parametrize(
    ("variable", "value"),
    [("HEADRACE_PREFILL_KV_BYTES", "1048576"), ("HEADRACE_POLICY", "some.module:Policy")],
)
def test_refusing_by_forecasts_needs_forecasts(migrated, monkeypatch, variable, value):
    monkeypatch.setenv("HEADRACE_FORECASTS", "refuse")
    monkeypatch.setenv(variable, value)

    result = migrated("serve")

    assert result.exit_code == 1
    assert "HEADRACE_FORECASTS=refuse does not go with" in result.stderr


def test_a_model_that_is_not_there_gets_no_hint_about_the_default_model(migrated):
    result = migrated("serve --model nowhere.gguf")

    assert result.exit_code == 1
    assert "nowhere.gguf does not exist" in result.stderr
    assert "pip" not in result.stderr


def test_a_port_taken_by_this_homes_own_server_is_said_so(migrated, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        foreign = migrated(f"serve --port {port}")
        write_note(tmp_path / "home", replace(NOTE, base_url=f"http://127.0.0.1:{port}"))
        own = migrated(f"serve --port {port}")

    assert (foreign.exit_code, own.exit_code) == (4, 4)
    assert "HEADRACE_PORT=8081" in foreign.stderr
    assert f"already running at http://127.0.0.1:{port}" in own.stderr
