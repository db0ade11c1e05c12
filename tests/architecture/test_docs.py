"""README names everything that an operator can set, call, run or graph."""

import importlib
import re
from pathlib import Path

import click
import pytest

from engine.config import CacheConfig, EngineConfig
from engine.snapshot import EngineSnapshot
from gateway.app import routes
from gateway.cli import COMMANDS
from gateway.metrics import Metrics
from gateway.settings import describe
from tests.gateway_kit import open_harness

README = Path(__file__).parents[2] / "README.md"


@pytest.fixture(scope="module")
def readme():
    return README.read_text() if README.exists() else ""


def missing(names, text):
    """Names that do not stand in the text as whole words."""
    return [
        name for name in names if not re.search(rf"(?<![\w:-]){re.escape(name)}(?![\w-])", text)
    ]


def command_names():
    """`headrace up`, `headrace tenants create` and so on."""
    for name in COMMANDS:
        command = importlib.import_module(f"gateway.cli.{name}").command
        if isinstance(command, click.Group):
            yield from (f"headrace {name} {inner}" for inner in command.commands)
        else:
            yield f"headrace {name}"


def metric_names():
    metrics = Metrics(
        model_name="m", config=EngineConfig(cache=CacheConfig(num_blocks=1)), max_tenants=1
    )
    empty = EngineSnapshot(
        policy="wfq",
        num_running=0,
        num_waiting=0,
        free_blocks=1,
        cached_blocks=0,
        held_blocks=0,
        tenants=(),
    )
    families = re.findall(r"^# TYPE (\S+)", metrics.render(empty).decode(), re.MULTILINE)
    # Prometheus adds a _created gauge of its own to every counter and histogram.
    return [name for name in families if not name.endswith("_created")]


def test_every_setting_is_named(readme):
    assert missing([name for name, _, _ in describe()], readme) == []


def test_every_command_is_named(readme):
    assert missing(command_names(), readme) == []


def test_every_metric_is_named(readme):
    assert missing(metric_names(), readme) == []


async def test_every_route_is_named(readme, tmp_path):
    async with open_harness(f"sqlite:///{tmp_path / 'headrace.db'}") as harness:
        paths = [route.path.replace(":path}", "}") for route in routes(harness.gateway)]

    assert len(paths) > 5
    assert [path for path in paths if f"`{path}`" not in readme] == []
