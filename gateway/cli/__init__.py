"""The `headrace` command. A command's module is imported only when that command runs."""

import importlib

import click

# Name -> its line in --help. The module gateway.cli.<name> has the click command `command`.
COMMANDS = {
    "up": "Serve the default model now: database, tenant, key and model are made on the way.",
    "serve": "Serve without making a demo tenant; for operators.",
    "doctor": "Check Python, torch, device, port, database, model, clock and disk.",
    "db": "The policy database: upgrade.",
    "tenants": "Tenants: create, list, show, set.",
    "classes": "Priority classes: list, create, set, delete.",
    "keys": "API keys: create, list, set, revoke.",
    "platform": "Limits of all tenants together: show, set.",
    "bench": "Measure a server: throughput, TTFT, TPOT, ITL, goodput.",
    "explain": "Where a request's time went, cause by cause.",
    "demo": "Load with one noisy tenant, to watch fairness at work.",
}

EXIT_CODES = """\b
Exit codes:
  0  done
  1  it failed (the printed block says why and what to do next), or Ctrl-C stopped it
  2  wrong usage
  3  what was named does not exist
  4  refused: unsafe, or in conflict with what is there
  5  no server answered"""


class LazyGroup(click.Group):
    """A group that knows its commands by name and imports each one when it is asked for."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        command = importlib.import_module(f"gateway.cli.{cmd_name}").command
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))


@click.group(cls=LazyGroup, epilog=EXIT_CODES, context_settings={"max_content_width": 100})
@click.version_option(package_name="headrace", prog_name="headrace")
def main() -> None:
    """A multi-tenant LLM gateway with the engine inside.

    Start with `headrace up`. Each command takes --json for output that programs read.
    """
