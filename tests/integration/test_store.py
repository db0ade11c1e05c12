"""The policy store on both databases."""

import asyncio
import dataclasses
import shutil
from pathlib import Path

import pytest
from sqlalchemy import text

from tenants import keys
from tenants.errors import (
    ApiKeyNotFoundError,
    DatabaseUrlError,
    ExpiredKeyError,
    InvalidNameError,
    InvalidPolicyError,
    RevokedKeyError,
    StoreUnavailableError,
    TenantExistsError,
    TenantNotFoundError,
    TenantSuspendedError,
    UnknownKeyError,
)
from tenants.policy import KVBounds, Limit, Scope, ScopedLimit, ServiceClass
from tenants.store import Store
from tests.postgres import Cluster

NOW = 1_000_000_000.0
PER_MINUTE = Limit(metric="requests", limit=60, window_seconds=60)
SLOTS = Limit(metric="concurrent", limit=4)
CONTEXT = Limit(metric="context_tokens", limit=4096)


async def test_a_key_speaks_for_its_tenant(store: Store) -> None:
    tenant = await store.create_tenant(
        "acme", name="Acme", weight=3, priority_class="batch", limits=[SLOTS], actor="op", now=NOW
    )
    key, secret = await store.create_key("acme", "laptop", actor="op", now=NOW)
    principal = await store.resolve_key(secret, now=NOW)
    assert (principal.tenant_id, principal.tenant) == (tenant.id, "acme")
    assert principal.key_id == key.id
    assert principal.weight == 3.0
    assert principal.service_class == ServiceClass(name="batch", rank=2, preemptible=True)
    assert principal.kv == KVBounds()
    assert principal.limits == (ScopedLimit(scope=Scope.TENANT, scope_id=tenant.id, rule=SLOTS),)
    assert (principal.generation, principal.policy_version) == (3, 1)
    assert await store.get_generation() == 3


async def test_every_way_to_attach_a_limit_reaches_the_next_request(store: Store) -> None:
    tenant = await store.create_tenant("acme", limits=[PER_MINUTE], actor="op", now=NOW)
    key, secret = await store.create_key("acme", "k", limits=[SLOTS], actor="op", now=NOW)
    await store.set_platform_limits([CONTEXT], actor="op", now=NOW)

    async def chain() -> list[tuple[str, str, Limit]]:
        principal = await store.resolve_key(secret, now=NOW)
        return [(one.scope, one.scope_id, one.rule) for one in principal.limits]

    assert await chain() == [
        ("platform", "platform", CONTEXT),
        ("tenant", tenant.id, PER_MINUTE),
        ("key", key.id, SLOTS),
    ]
    wider = dataclasses.replace(PER_MINUTE, limit=600)
    await store.set_tenant("acme", limits=[wider, SLOTS], actor="op", now=NOW)
    await store.set_key_limits(key.id, [], actor="op", now=NOW)
    await store.set_platform_limits([], actor="op", now=NOW)
    assert await chain() == [("tenant", tenant.id, wider), ("tenant", tenant.id, SLOTS)]


async def test_limits_of_one_tenant_or_key_do_not_reach_another(store: Store) -> None:
    await store.create_tenant("acme", limits=[SLOTS], actor="op", now=NOW)
    await store.create_tenant("zeta", actor="op", now=NOW)
    await store.create_key("acme", "limited", limits=[PER_MINUTE], actor="op", now=NOW)
    _, of_zeta = await store.create_key("zeta", "k", actor="op", now=NOW)
    _, other = await store.create_key("acme", "free", actor="op", now=NOW)
    assert (await store.resolve_key(of_zeta, now=NOW)).limits == ()
    assert [one.rule for one in (await store.resolve_key(other, now=NOW)).limits] == [SLOTS]


async def test_what_is_not_named_stays_and_old_versions_do_too(store: Store) -> None:
    await store.create_tenant("acme", weight=2, limits=[SLOTS], actor="op", now=NOW)
    changed = await store.set_tenant("acme", weight=5, actor="op", now=NOW)
    assert (changed.weight, changed.priority_class, changed.limits) == (5.0, "standard", (SLOTS,))
    changed = await store.set_tenant(
        "acme", name="Acme", priority_class="interactive", limits=[], actor="op", now=NOW
    )
    assert (changed.name, changed.weight, changed.limits) == ("Acme", 5.0, ())
    assert changed.policy_version == 3
    async with store.database.reading() as session:
        rows = await session.execute(
            text("SELECT version, weight, priority_class, generation FROM policy_versions")
        )
        assert sorted(map(tuple, rows)) == [
            (1, 2.0, "standard", 2),
            (2, 5.0, "standard", 3),
            (3, 5.0, "interactive", 4),
        ]


async def test_kv_bounds_reach_the_next_request_and_old_versions_keep_theirs(store: Store) -> None:
    narrow, wide = KVBounds(floor_blocks=8, cap_blocks=64), KVBounds(floor_blocks=2**31)
    created = await store.create_tenant("acme", kv=narrow, actor="op", now=NOW)
    _, secret = await store.create_key("acme", "k", actor="op", now=NOW)
    assert created.kv == narrow
    assert (await store.resolve_key(secret, now=NOW)).kv == narrow
    assert (await store.set_tenant("acme", weight=2, actor="op", now=NOW)).kv == narrow
    assert (await store.set_tenant("acme", kv=wide, actor="op", now=NOW)).kv == wide
    assert (await store.resolve_key(secret, now=NOW)).kv == wide
    [update, *_] = await store.list_audit()
    assert (update.before or {})["kv"] == {"floor_blocks": 8, "cap_blocks": 64}
    assert (update.after or {})["kv"] == {"floor_blocks": 2**31, "cap_blocks": None}
    async with store.database.reading() as session:
        rows = await session.execute(
            text("SELECT version, kv_floor_blocks, kv_cap_blocks FROM policy_versions")
        )
        assert sorted(map(tuple, rows)) == [(1, 8, 64), (2, 8, 64), (3, 2**31, None)]


async def test_concurrent_changes_each_get_their_own_version_and_generation(store: Store) -> None:
    await store.create_tenant("acme", actor="op", now=NOW)
    changed = await asyncio.gather(
        *(store.set_tenant("acme", weight=1 + at, actor="op", now=NOW) for at in range(12))
    )
    assert sorted(one.policy_version for one in changed) == list(range(2, 14))
    generations = [one.generation for one in await store.list_audit()]
    assert generations == list(range(14, 1, -1))
    newest = max(changed, key=lambda one: one.policy_version)
    assert await store.get_tenant("acme") == newest


async def test_a_revoked_key_opens_nothing_at_once_and_elsewhere(
    store: Store, database_url: str
) -> None:
    await store.create_tenant("acme", actor="op", now=NOW)
    key, secret = await store.create_key("acme", "k", actor="op", now=NOW)
    elsewhere = Store.open(database_url)
    assert (await elsewhere.resolve_key(secret, now=NOW)).key_id == key.id
    revoked = await store.revoke_key(key.id, actor="op", now=NOW)
    # Also where the clock is late.
    with pytest.raises(RevokedKeyError):
        await elsewhere.resolve_key(secret, now=NOW - 5)
    await elsewhere.close()
    assert revoked.revoked_at == NOW
    assert (await store.revoke_key(key.id, actor="op", now=NOW + 9)).revoked_at == NOW
    assert await store.list_keys("acme") == (revoked,)


async def test_a_key_opens_until_the_moment_it_expires(store: Store) -> None:
    await store.create_tenant("acme", actor="op", now=NOW)
    _, secret = await store.create_key("acme", "k", expires_at=NOW + 60, actor="op", now=NOW)
    assert (await store.resolve_key(secret, now=NOW + 59.9)).tenant == "acme"
    with pytest.raises(ExpiredKeyError):
        await store.resolve_key(secret, now=NOW + 60)
    for over in (NOW, float("nan")):
        with pytest.raises(InvalidPolicyError, match="time to come"):
            await store.create_key("acme", "late", expires_at=over, actor="op", now=NOW)


@pytest.mark.parametrize("status", ["suspended", "archived"])
async def test_a_tenant_that_is_not_active_closes_its_keys_and_no_others(
    store: Store, status: str
) -> None:
    for slug in ("acme", "zeta"):
        await store.create_tenant(slug, actor="op", now=NOW)
    secrets = {
        slug: (await store.create_key(slug, "k", actor="op", now=NOW))[1]
        for slug in ("acme", "zeta")
    }
    changed = await store.set_tenant_status("acme", status, actor="op", now=NOW)
    assert changed.status == status
    with pytest.raises(TenantSuspendedError):
        await store.resolve_key(secrets["acme"], now=NOW)
    assert (await store.resolve_key(secrets["zeta"], now=NOW)).tenant == "zeta"
    await store.set_tenant_status("acme", "active", actor="op", now=NOW)
    assert (await store.resolve_key(secrets["acme"], now=NOW)).tenant == "acme"


async def test_a_secret_of_nobody_is_unknown(store: Store) -> None:
    for secret in (keys.mint(), "", "hr_", "Bearer ' OR '1'='1", "\x00", "ü" * 42):
        with pytest.raises(UnknownKeyError):
            await store.resolve_key(secret, now=NOW)


async def test_a_digest_does_not_open_anything(store: Store) -> None:
    await store.create_tenant("acme", actor="op", now=NOW)
    _, secret = await store.create_key("acme", "k", actor="op", now=NOW)
    with pytest.raises(UnknownKeyError):
        await store.resolve_key(keys.digest(secret).hex(), now=NOW)


async def test_the_secret_is_nowhere_but_in_the_answer(store: Store) -> None:
    await store.create_tenant("acme", actor="op", now=NOW)
    key, secret = await store.create_key("acme", "k", actor="op", now=NOW)
    await store.revoke_key(key.id, actor="op", now=NOW)
    principal_of, live = await store.create_key("acme", "live", actor="op", now=NOW)
    shown = repr(
        [
            key,
            principal_of,
            await store.list_keys(),
            await store.list_audit(),
            await store.get_tenant("acme"),
            await store.resolve_key(live, now=NOW),
        ]
    )
    for hidden in (secret, live):
        assert hidden not in shown
        assert hidden[3:39] not in shown
        assert keys.digest(hidden).hex() not in shown
        assert repr(keys.digest(hidden)) not in shown
    assert key.redacted == f"{secret[:7]}...{secret[-4:]}"


async def test_refused_changes_leave_no_trace(store: Store) -> None:
    await store.create_tenant("acme", weight=2, actor="op", now=NOW)
    before = (
        await store.get_tenant("acme"),
        await store.list_audit(),
        await store.get_generation(),
        await store.list_keys(),
    )
    nan = float("nan")
    with pytest.raises(TenantExistsError):
        await store.create_tenant("acme", actor="op", now=NOW)
    with pytest.raises(InvalidNameError):
        await store.create_tenant("Acme Inc", actor="op", now=NOW)
    with pytest.raises(InvalidNameError):
        await store.create_tenant("zeta", name="a\nb", actor="op", now=NOW)
    with pytest.raises(InvalidPolicyError):
        await store.create_tenant("zeta", weight=nan, actor="op", now=NOW)
    with pytest.raises(InvalidPolicyError, match="interactive, standard, batch"):
        await store.set_tenant("acme", name="New", priority_class="gold", actor="op", now=NOW)
    with pytest.raises(InvalidPolicyError):
        await store.set_tenant("acme", name="New", weight=nan, actor="op", now=NOW)
    with pytest.raises(InvalidPolicyError):
        await store.set_tenant_status("acme", "gone", actor="op", now=NOW)
    with pytest.raises(InvalidPolicyError, match="set twice"):
        await store.create_key("acme", "k", limits=[SLOTS, SLOTS], actor="op", now=NOW)
    with pytest.raises(InvalidNameError):
        await store.create_key("acme", " ", actor="op", now=NOW)
    for call in (
        store.set_tenant("zeta", actor="op", now=NOW),
        store.set_tenant_status("zeta", "active", actor="op", now=NOW),
        store.get_tenant("zeta"),
        store.create_key("zeta", "k", actor="op", now=NOW),
        store.list_keys("zeta"),
    ):
        with pytest.raises(TenantNotFoundError):
            await call
    for call in (
        store.revoke_key("key_0", actor="op", now=NOW),
        store.set_key_limits("key_0", [], actor="op", now=NOW),
    ):
        with pytest.raises(ApiKeyNotFoundError):
            await call
    assert before == (
        await store.get_tenant("acme"),
        await store.list_audit(),
        await store.get_generation(),
        await store.list_keys(),
    )


async def test_every_change_is_audited_under_its_own_generation(store: Store) -> None:
    await store.create_tenant("acme", actor="ann", now=NOW)
    key, _ = await store.create_key("acme", "k", actor="bob", now=NOW + 1)
    await store.set_key_limits(key.id, [SLOTS], actor="bob", now=NOW + 2)
    await store.set_tenant("acme", weight=4, actor="ann", now=NOW + 3)
    await store.set_tenant_status("acme", "suspended", actor="ann", now=NOW + 4)
    await store.set_platform_limits([CONTEXT], actor="ann", now=NOW + 5)
    await store.revoke_key(key.id, actor="bob", now=NOW + 6)
    entries = list(reversed(await store.list_audit()))
    assert [(one.at - NOW, one.actor, one.action, one.generation) for one in entries] == [
        (0, "ann", "tenant.created", 2),
        (1, "bob", "api_key.created", 3),
        (2, "bob", "api_key.updated", 4),
        (3, "ann", "tenant.updated", 5),
        (4, "ann", "tenant.status_set", 6),
        (5, "ann", "platform.updated", 7),
        (6, "bob", "api_key.revoked", 8),
    ]
    update = entries[3]
    assert update.before is not None
    assert update.after is not None
    assert (update.before["weight"], update.after["weight"]) == (1.0, 4.0)
    assert entries[0].before is None
    assert await store.list_audit(max_entries=1) == (entries[6],)


async def test_lists_are_in_order_and_complete(store: Store) -> None:
    for at, slug in enumerate(("zeta", "acme")):
        await store.create_tenant(slug, actor="op", now=NOW)
        for name in ("one", "two"):
            await store.create_key(slug, name, actor="op", now=NOW + at * 10 + len(name))
    assert [one.slug for one in await store.list_tenants()] == ["acme", "zeta"]
    assert sorted((one.tenant, one.name) for one in await store.list_keys()) == [
        ("acme", "one"),
        ("acme", "two"),
        ("zeta", "one"),
        ("zeta", "two"),
    ]
    assert {one.tenant for one in await store.list_keys("acme")} == {"acme"}


async def test_a_database_without_tables_is_unavailable_not_a_wrong_key(
    empty_database_url: str,
) -> None:
    store = Store.open(empty_database_url)
    with pytest.raises(StoreUnavailableError):
        await store.resolve_key(keys.mint(), now=NOW)
    await store.close()


@pytest.mark.parametrize("kind", ["sqlite", "damaged", "postgresql"])
async def test_a_database_that_is_away_is_unavailable_not_a_wrong_key(
    tmp_path: Path, kind: str
) -> None:
    """Opening the store works without it, so that a gateway can start and heal."""
    urls = {
        "sqlite": f"sqlite:///{tmp_path}/no/such/folder.db",
        "damaged": f"sqlite:///{tmp_path}/noise.db",
        "postgresql": f"postgresql://ann:hunter2@/headrace?host={tmp_path}",
    }
    (tmp_path / "noise.db").write_bytes(bytes(range(1, 200)) * 50)
    store = Store.open(urls[kind])
    with pytest.raises(StoreUnavailableError) as caught:
        await store.resolve_key(keys.mint(), now=NOW)
    assert "hunter2" not in str(caught.value)
    with pytest.raises(UnknownKeyError, match="malformed"):  # needs no database
        await store.resolve_key("hr_noise", now=NOW)
    await store.close()


async def test_the_store_heals_when_its_database_comes_back(
    migrated_sqlite: Path, tmp_path: Path
) -> None:
    (tmp_path / "later").touch()  # a file where the folder should be
    store = Store.open(f"sqlite:///{tmp_path}/later/headrace.db")
    with pytest.raises(StoreUnavailableError):
        await store.list_tenants()
    (tmp_path / "later").unlink()
    (tmp_path / "later").mkdir()
    shutil.copy(migrated_sqlite, tmp_path / "later" / "headrace.db")
    assert await store.list_tenants() == ()
    await store.close()


@pytest.mark.postgres
async def test_a_restarted_server_costs_no_request(postgres_cluster: Cluster) -> None:
    with postgres_cluster.database("migrated") as url:
        store = Store.open(url)
        await asyncio.gather(*(store.list_tenants() for _ in range(5)))
        postgres_cluster.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
            "WHERE pid <> pg_backend_pid() AND backend_type = 'client backend'"
        )
        assert await asyncio.gather(*(store.list_tenants() for _ in range(5))) == [()] * 5
        await store.close()


@pytest.mark.postgres
async def test_no_wait_for_the_server_is_without_end(postgres_cluster: Cluster) -> None:
    with postgres_cluster.database("migrated") as url:
        store = Store.open(url)
        async with store.database.reading() as session:
            for name in ("statement_timeout", "idle_in_transaction_session_timeout"):
                assert await session.scalar(text(f"SHOW {name}")) == "10s"
            raw = await (await session.connection()).get_raw_connection()
            asked = raw.driver_connection.info.get_parameters()
        assert (asked["tcp_user_timeout"], asked["keepalives_idle"]) == ("10000", "5")
        await store.close()


@pytest.mark.postgres
async def test_a_statement_that_takes_too_long_is_an_unavailable_store(
    postgres_cluster: Cluster,
) -> None:
    with postgres_cluster.database("migrated") as url:
        store = Store.open(f"{url}&options=-c statement_timeout=100")  # an operator's own wins
        with pytest.raises(StoreUnavailableError, match="statement timeout"):
            async with store.database.reading() as session:
                await session.execute(text("SELECT pg_sleep(9)"))
        await store.close()


@pytest.mark.parametrize(
    "url", ["mysql://host/name", "sqlite://", "sqlite:///:memory:", "nonsense", ""]
)
def test_other_databases_are_refused(url: str) -> None:
    with pytest.raises(DatabaseUrlError):
        Store.open(url)


@pytest.mark.parametrize("change", ["slug", "status"])
async def test_views_cannot_be_changed(store: Store, change: str) -> None:
    tenant = await store.create_tenant("acme", actor="op", now=NOW)
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(tenant, change, "other")
