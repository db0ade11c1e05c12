"""`headrace bench`: measure any OpenAI-compatible server."""

import asyncio
import random
from collections.abc import Callable, Mapping
from functools import partial
from operator import attrgetter

import click
from rich.console import Console
from rich.progress import Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from gateway.cli import load
from gateway.cli.latency import LoadSummary, parse_objectives, summarize
from gateway.cli.output import CommandError, NoServerError, json_option, print_json, stdout


class Numbers(click.ParamType[tuple[float, ...]]):
    """Comma-separated positive numbers."""

    name = "NUMBERS"

    def __init__(self, whole: bool) -> None:
        self.whole = whole

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[float, ...]:
        try:
            numbers = tuple(float(part) for part in str(value).split(","))
        except ValueError:
            self.fail(f"{value!r} is not numbers joined by commas", param, ctx)
        if any(n <= 0 or (self.whole and n != int(n)) for n in numbers):
            self.fail(f"{value!r}: each must be {'a whole number ' if self.whole else ''}> 0")
        return numbers


def _objectives(
    ctx: click.Context, param: click.Parameter, value: str | None
) -> dict[str, float] | None:
    try:
        return None if value is None else parse_objectives(value)
    except ValueError as error:
        raise click.BadParameter(str(error)) from error


@click.group()
def command() -> None:
    """Measure a server."""


@command.command()
@click.option("--base-url", required=True, help="With or without /v1.")
@click.option("--model", required=True)
@click.option("--api-key", envvar="HEADRACE_API_KEY", show_envvar=True)
@click.option("--endpoint", type=click.Choice(["completions", "chat"]), default="completions")
@click.option(
    "--concurrency",
    type=Numbers(whole=True),
    default="1,4,16,32",
    show_default=True,
    help="Closed loop: that many clients, each waiting for its answer.",
)
@click.option(
    "--requests",
    default=4,
    show_default=True,
    type=click.IntRange(min=1),
    help="Closed loop: requests per client.",
)
@click.option(
    "--rate",
    type=Numbers(whole=False),
    help="Open loop instead: Poisson arrivals per second, whatever the server does.",
)
@click.option(
    "--seconds",
    default=30.0,
    show_default=True,
    type=click.FloatRange(min=0, min_open=True),
    help="Open loop: for how long requests arrive.",
)
@click.option("--output-tokens", default=128, show_default=True, type=click.IntRange(min=1))
@click.option("--prompt-words", default=90, show_default=True, type=click.IntRange(min=1))
@click.option("--warmup", type=click.IntRange(min=0), help="Unmeasured requests before each level.")
@click.option("--goodput", "objectives", callback=_objectives, help="ttft:500,tpot:100 in ms.")
@click.option("--seed", type=int, help="Of prompts and arrivals; drawn and reported if not given.")
@json_option
def serve(
    base_url: str,
    model: str,
    api_key: str | None,
    endpoint: load.Endpoint,
    concurrency: tuple[float, ...],
    requests: int,
    rate: tuple[float, ...] | None,
    seconds: float,
    output_tokens: int,
    prompt_words: int,
    warmup: int | None,
    objectives: dict[str, float] | None,
    seed: int | None,
    as_json: bool,
) -> None:
    """Measure the server at --base-url, level by level; prompts differ, warm-up is left out.

    TTFT runs from arrival, queueing included. TPOT = (E2E - TTFT) / (output tokens - 1). ITL pools
    every gap between pieces of text. Failed requests are counted as errors, never dropped.
    """
    # A server that has seen a seed's prompts has them in its prefix cache: by default, new ones.
    seed = random.SystemRandom().getrandbits(31) if seed is None else seed
    target = load.Target(base_url=base_url, model=model, api_key=api_key, endpoint=endpoint)
    source = load.make_work(seed, prompt_words, output_tokens)
    levels = _levels(concurrency, requests, rate, seconds, seed)
    results = {}
    with _progress(shown=not as_json) as progress:
        for level in levels:
            num_warmup = level.num_warmup if warmup is None else warmup
            advance = partial(progress.advance, progress.add_task(level.name, total=None))
            records = asyncio.run(load.measure(target, level, source, num_warmup, advance))
            results[level.name] = summarize(records, objectives)
    _report(target, seed, results, as_json)
    _require_success(target, results)


def _levels(
    concurrency: tuple[float, ...],
    requests: int,
    rate: tuple[float, ...] | None,
    seconds: float,
    seed: int,
) -> list[load.Level]:
    if rate is None:
        return [
            load.ClosedLoop(concurrency=int(c), requests_per_client=requests) for c in concurrency
        ]
    levels: list[load.Level] = []
    for r in rate:
        arrivals = load.poisson_arrivals(seed, r, seconds)
        if not arrivals:
            raise click.BadParameter(f"no request arrives within {seconds:g} s at {r:g} per second")
        levels.append(load.OpenLoop(rate=r, arrivals=tuple(arrivals)))
    return levels


def _progress(shown: bool) -> Progress:
    console = Console(stderr=True)
    return Progress(
        TextColumn("{task.description}: {task.completed:.0f} done"),
        TimeElapsedColumn(),
        console=console,
        transient=True,
        disable=not (shown and console.is_terminal),
    )


def _report(
    target: load.Target, seed: int, results: Mapping[str, LoadSummary], as_json: bool
) -> None:
    if as_json:
        levels = [{"load": name} | summary.to_dict() for name, summary in results.items()]
        print_json({"url": target.url, "model": target.model, "seed": seed, "levels": levels})
        return
    console = stdout()
    console.print(_table(results), f"{target.model} at {target.url}, seed {seed}", sep="\n")
    for name, summary in results.items():
        for error, count in summary.errors.items():
            console.print(f"{name}: {count} failed: {error}", style="red")
        if summary.num_without_usage:
            console.print(
                f"{name}: {summary.num_without_usage} answers carried no usage; their output "
                "tokens are counted as pieces of text, their prompt tokens as 0",
                style="yellow",
            )


def _table(results: Mapping[str, LoadSummary]) -> Table:
    """Measures as rows, levels as columns: four levels fit 80 characters."""
    table = Table(box=None, header_style="bold")
    table.add_column("")
    for name in results:
        table.add_column(name, justify="right")

    def row(title: str, cell: Callable[[LoadSummary], str]) -> None:
        table.add_row(title, *(cell(summary) for summary in results.values()))

    row("requests", lambda s: str(s.num_requests))
    row("errors", lambda s: str(s.num_errors))
    row("output tok/s", lambda s: f"{s.output_tokens_per_second:.1f}")
    row("total tok/s", lambda s: f"{s.total_tokens_per_second:.1f}")
    row("requests/s", lambda s: f"{s.requests_per_second:.2f}")
    row("cached prompt tokens", lambda s: f"{s.cached_tokens} of {s.prompt_tokens}")
    for name in ("ttft", "tpot", "itl", "e2el"):
        for q in ("p50", "p90", "p99"):
            of_level = attrgetter(f"{name}_ms.{q}")
            row(f"{name.upper()} {q} ms", partial(_cell, of_level))
    if any(s.goodput_per_second is not None for s in results.values()):
        row("goodput requests/s", lambda s: f"{s.goodput_per_second:.2f}")
        row("attainment", lambda s: f"{100 * (s.attainment or 0):.0f}%")
    return table


def _cell(measure: Callable[[LoadSummary], float | None], summary: LoadSummary) -> str:
    value = measure(summary)
    return "-" if value is None else f"{value:.1f}"


def _require_success(target: load.Target, results: Mapping[str, LoadSummary]) -> None:
    """Fail where a whole level failed: its numbers say nothing."""
    for name, summary in results.items():
        if summary.num_errors == summary.num_requests:
            error = max(summary.errors, key=summary.errors.__getitem__)
            what = f"all {summary.num_requests} requests of {name} failed"
            why = f"{error} from {target.url}"
            if error == "ConnectError":
                raise NoServerError(what, why=why, next_step="headrace up")
            raise CommandError(what, why=why, next_step="check --model, --api-key, --endpoint")
