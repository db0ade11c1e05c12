"""The status page: is the engine well, how full is it, and who runs and waits now."""

from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined

from engine.snapshot import EngineHealth, EngineSnapshot

CONTENT_SECURITY_POLICY = (
    "default-src 'none'; style-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'"
)

STYLE_SHEET = Path(__file__).parent / "static" / "status.css"

_environment = Environment(
    loader=PackageLoader("dashboards"), autoescape=True, undefined=StrictUndefined
)


def status_page(
    *, model: str, max_seqs: int, health: EngineHealth, snapshot: EngineSnapshot
) -> str:
    """The page's HTML."""
    num_blocks = snapshot.held_blocks + snapshot.cached_blocks + snapshot.free_blocks
    return _environment.get_template("status.html").render(
        model=model,
        policy=snapshot.policy,
        max_seqs=max_seqs,
        health=health,
        snapshot=snapshot,
        num_blocks=num_blocks,
        # Bar of the KV pool, 1000 units wide.
        held_width=round(1000 * snapshot.held_blocks / num_blocks),
        cached_width=round(1000 * snapshot.cached_blocks / num_blocks),
        # Names with a leading underscore are the server's own work.
        rows=sorted(
            (row for row in snapshot.tenants if not row.tenant.startswith("_")),
            key=lambda row: (row.rank, row.tenant),
        ),
    )
