"""`headrace up` and `serve` as processes, with the default model."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from engine.errors import ModelLoadError
from engine.model.default_model import find_default_model
from gateway.cli.home import ServerNote
from migrations.upgrade import upgrade
from tests.conftest import skip_or_fail

ROOT = Path(__file__).parents[2]
HEADRACE = [sys.executable, "-c", "from gateway.cli import main; main(prog_name='headrace')"]

pytestmark = pytest.mark.model


@pytest.fixture(scope="module", autouse=True)
def _model():
    try:
        find_default_model()
    except ModelLoadError as error:
        skip_or_fail("model", str(error))


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """One home for the whole file: its tests follow each other like an operator's days."""
    return tmp_path_factory.mktemp("home") / "not-there-yet"


def environment(home):
    return {**os.environ, "HEADRACE_HOME": str(home), "OMP_NUM_THREADS": "2"}


def headrace(home, arguments):
    """Run to the end."""
    return subprocess.run(
        [*HEADRACE, *arguments.split()],
        cwd=ROOT,
        env=environment(home),
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


@contextmanager
def serving(home, arguments):
    """A server process and the object that it prints when it is ready."""
    log = home.parent / "server.log"
    with log.open("w") as errors:
        process = subprocess.Popen(
            [*HEADRACE, *arguments.split(), "--port", "0", "--json"],
            cwd=ROOT,
            env=environment(home),
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        )
    try:
        line = process.stdout.readline()
        assert line, log.read_text()
        yield process, json.loads(line)
    finally:
        process.kill()
        process.communicate()
        sys.stdout.write(log.read_text())  # pytest shows it when the test fails


def finish(process):
    """Ctrl-C once; what else it printed, and its exit code."""
    process.send_signal(signal.SIGINT)
    rest, _ = process.communicate(timeout=60)
    return rest, process.returncode


def stream_chat(ready, api_key):
    """Text and finish reason of one streamed answer."""
    body = {
        "model": ready["model"],
        "messages": [{"role": "user", "content": "Hello"}],
        "max_tokens": 8,
        "stream": True,
    }
    headers = {"authorization": f"Bearer {api_key}"}
    url = f"{ready['base_url']}/v1/chat/completions"
    with httpx.stream("POST", url, json=body, headers=headers, timeout=60) as reply:
        assert reply.status_code == 200, reply.read()
        data = [line[6:] for line in reply.iter_lines() if line.startswith("data: ")]
    assert data[-1] == "[DONE]"
    choices = [json.loads(event)["choices"][0] for event in data[:-1]]
    text = "".join(choice["delta"].get("content") or "" for choice in choices)
    return text, choices[-1]["finish_reason"]


def run_curl(picture, api_key):
    """Run the curl command that `up` printed; the pieces of text that it streamed."""
    if shutil.which("curl") is None:
        skip_or_fail("curl", "it is not installed")
    command = picture[picture.index("curl -N") : picture.index("headrace demo load")]
    result = subprocess.run(
        command,
        shell=True,
        env={**os.environ, "HEADRACE_API_KEY": api_key},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    events = [line[6:] for line in result.stdout.splitlines() if line.startswith("data: {")]
    deltas = [json.loads(event)["choices"][0]["delta"] for event in events]
    return [delta["content"] for delta in deltas if delta.get("content")]


def test_the_first_start_makes_everything_and_answers(home):
    with serving(home, "up") as (process, ready):
        assert set(ready) == {"base_url", "api_key", "admin_url", "metrics_url", "model"}
        text, reason = stream_chat(ready, ready["api_key"])
        (home.parent / "key").write_text(ready["api_key"])
        assert ready["admin_url"] == f"{ready['base_url']}/admin"
        metrics = httpx.get(ready["metrics_url"])
        note = json.loads((home / "server.json").read_text())
        rest, code = finish(process)

    assert text
    assert reason in ("length", "stop")
    assert 'headrace_tenant_tokens_total{kind="output",tenant="demo"}' in metrics.text
    assert ServerNote(**note).base_url == ready["base_url"]
    assert (rest, code) == ("", 0)
    assert not (home / "server.json").exists()


def test_a_later_start_makes_no_second_key_and_says_so(home):
    process = subprocess.Popen(
        [*HEADRACE, "up", "--port", "0"],
        cwd=ROOT,
        env=environment(home),
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        lines = [next(process.stdout)]
        while "Ctrl-C drains" not in lines[-1]:
            lines.append(next(process.stdout))
        answer = run_curl("".join(lines), (home.parent / "key").read_text())
        _, code = finish(process)
    finally:
        process.kill()
        process.communicate()

    picture = "".join(lines)
    assert code == 0
    assert "No new API key" in picture
    assert "(cpu, float32)" in picture or "(cuda, bfloat16)" in picture
    assert "hr_" not in picture
    # The printed command, as printed: streamed token by token, and right.
    assert "".join(answer) == "The capital of France is Paris."
    assert len(answer) >= 7
    assert len(json.loads(headrace(home, "keys list --json").stdout)) == 1


def test_serve_makes_no_tenant_and_no_key(tmp_path):
    headrace(tmp_path, "db upgrade")

    with serving(tmp_path, "serve") as (process, ready):
        assert set(ready) == {"base_url", "admin_url", "metrics_url", "model"}
        assert httpx.get(f"{ready['base_url']}/readyz").status_code == 200
        assert finish(process) == ("", 0)

    assert json.loads(headrace(tmp_path, "tenants list --json").stdout) == []


def test_with_a_database_elsewhere_the_home_is_made_for_the_note(tmp_path, monkeypatch):
    monkeypatch.setenv("HEADRACE_DATABASE_URL", f"sqlite:///{tmp_path}/elsewhere.db")
    home = tmp_path / "not" / "there"

    upgrade(f"sqlite:///{tmp_path}/elsewhere.db")
    (tmp_path / "not").mkdir()  # for the test's own log
    with serving(home, "serve") as (process, _):
        assert ServerNote(**json.loads((home / "server.json").read_text())).pid == process.pid
        assert finish(process) == ("", 0)


def test_a_home_that_cannot_be_made_is_no_taken_port(tmp_path, monkeypatch):
    monkeypatch.setenv("HEADRACE_DATABASE_URL", f"sqlite:///{tmp_path}/elsewhere.db")
    upgrade(f"sqlite:///{tmp_path}/elsewhere.db")
    (tmp_path / "home").touch()

    result = headrace(tmp_path / "home", "serve --port 0")

    assert result.returncode == 1
    assert result.stderr.startswith("Error: the settings do not fit")
    assert "HEADRACE_HOME" in result.stderr


def test_an_address_that_others_reach_is_refused(home):
    for command in ("up", "serve"):
        result = headrace(home, f"{command} --host 0.0.0.0 --json")

        assert result.returncode == 4
        assert result.stdout == ""
        assert "--public" in json.loads(result.stderr)["error"]["next"]


def test_a_taken_port_is_refused_with_the_way_out(home):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        result = headrace(home, f"up --port {taken.getsockname()[1]}")

    assert result.returncode == 4
    assert "in use" in result.stderr
    assert "--port 0" in result.stderr


def test_a_model_that_is_not_there_is_a_readable_error(home):
    result = headrace(home, "up --port 0 --model nowhere.gguf")

    assert result.returncode == 1
    assert result.stderr.startswith("Error: the engine did not start")
    assert "nowhere.gguf" in result.stderr
