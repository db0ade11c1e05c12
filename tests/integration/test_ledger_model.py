"""The ledger against a model of it: random reserves, settles, lapses and windows, any order."""

import asyncio
from collections import Counter

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    multiple,
    rule,
    run_state_machine_as_test,
)
from sqlalchemy import delete, select

from tenants import models
from tenants.errors import LimitExceededError, NeverFitsLimitError
from tenants.ledger import Ledger, Settlement, Status
from tenants.policy import Limit, Principal
from tenants.store import Store

START = 1_000_000_020.0
LEASE_SECONDS = 25.0
SLOTS, REQUESTS, MINUTE_TOKENS, HOUR_TOKENS, BLOCK_SECONDS = 3, 5, 100, 260, 12
Key = tuple[str, int, int]  # metric, window seconds, window start
Counters = Counter[Key]


class LedgerMachine(RuleBasedStateMachine):
    """`held` and `used` are what the counters must be, by (counter, window start)."""

    requests = Bundle("requests")
    runner: asyncio.Runner
    store: Store
    principal: Principal

    def __init__(self) -> None:
        super().__init__()
        self.ledger = Ledger(self.store.database, instance_id="one", lease_seconds=LEASE_SECONDS)
        self.now = START
        self.number = 0
        self.live: dict[str, tuple[float, Counters]] = {}
        self.used: Counters = Counter()
        self.ended = 0

    @initialize()
    def begin_empty(self) -> None:
        async def clear() -> None:
            async with self.store.database.writing() as session:
                for table in (models.LimitWindow, models.Reservation, models.LedgerEntry):
                    await session.execute(delete(table))

        self.runner.run(clear())

    @property
    def held(self) -> Counters:
        return sum((amounts for _, amounts in self.live.values()), Counter())

    @rule(target=requests, prompt=st.integers(0, 60), output=st.integers(1, 60))
    def reserve(self, prompt: int, output: int) -> object:
        self.number += 1
        request_id = f"r{self.number}"
        need = self.needs(prompt + output)
        fits = all(
            self.held[key] + self.used[key] + amount <= self.limit_of(key)
            for key, amount in need.items()
        )
        call = self.ledger.reserve(
            self.principal,
            request_id,
            prompt_tokens=prompt,
            max_output_tokens=output,
            now=self.now,
        )
        try:
            self.runner.run(call)
        except NeverFitsLimitError:
            assert prompt + output > MINUTE_TOKENS
            return multiple()
        except LimitExceededError:
            assert not fits
            return multiple()
        assert fits
        self.live[request_id] = (self.now + LEASE_SECONDS, need)
        return request_id, prompt, output

    @rule(
        request=consumes(requests),
        share=st.floats(0, 1),
        started=st.booleans(),
        quarters=st.integers(0, 60),
    )
    def settle(
        self, request: tuple[str, int, int], share: float, started: bool, quarters: int
    ) -> None:
        request_id, prompt, output = request
        tokens = int(share * (prompt + output)) if started else 0
        settlement = Settlement(
            status=Status.COMPLETED,
            started=started,
            tokens_in=min(tokens, prompt),
            tokens_out=max(0, tokens - prompt),
            kv_block_seconds=quarters / 4,
        )
        settled = self.runner.run(self.ledger.settle(request_id, settlement, now=self.now))
        assert settled == (request_id in self.live)
        if settled:
            self.close(request_id, tokens, -(-quarters // 4), started=started)
        assert not self.runner.run(self.ledger.settle(request_id, settlement, now=self.now))

    @rule(request=requests)
    def renew(self, request: tuple[str, int, int]) -> None:
        request_id = request[0]
        gone = self.runner.run(self.ledger.renew([request_id], now=self.now))
        if request_id in self.live:
            assert gone == []
            self.live[request_id] = (self.now + LEASE_SECONDS, self.live[request_id][1])
        else:
            assert gone == [request_id]

    @rule()
    def expire(self) -> None:
        lost = self.runner.run(self.ledger.expire(now=self.now))
        lapsed = {one for one, (lease, _) in self.live.items() if lease <= self.now}
        assert sorted(lost) == sorted(lapsed)
        for request_id in lost:
            self.close(request_id, 0, 0, started=True)

    @rule(seconds=st.sampled_from([0.1, 5.0, 24.9, 59.9, 60.0, 1800.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @invariant()
    def the_counters_are_those_of_the_model(self) -> None:
        async def read() -> tuple[Counters, Counters, int]:
            async with self.store.database.reading() as session:
                windows = list(await session.scalars(select(models.LimitWindow)))
                entries = list(await session.scalars(select(models.LedgerEntry.request_id)))
            used = Counter({name(one): one.used for one in windows if one.used})
            held = Counter({name(one): one.reserved for one in windows if one.reserved})
            return used, held, len(entries)

        used, held, entries = self.runner.run(read())
        # Counters of windows long finished may be forgotten.
        recent = Counter({key: one for key, one in self.used.items() if key in used})
        assert used == recent
        assert all(self.is_old(key) for key in self.used.keys() - used.keys() if self.used[key])
        assert held == self.held
        # Block-seconds may overrun, by what was not known when it was admitted.
        assert all(
            used[key] + held[key] <= self.limit_of(key)
            for key in used | held
            if key[0] != "kv_block_seconds"
        )
        assert all(held[key] <= self.limit_of(key) for key in held if key[0] == "kv_block_seconds")
        assert entries == self.ended
        assert self.runner.run(self.ledger.find_imbalances()) == {}

    def needs(self, tokens: int) -> Counters:
        return Counter(
            {
                ("concurrent", 0, 0): 1,
                ("requests", 60, int(self.now) // 60 * 60): 1,
                ("kv_block_seconds", 60, int(self.now) // 60 * 60): 1,
                ("tokens_total", 60, int(self.now) // 60 * 60): tokens,
                ("tokens_total", 3600, int(self.now) // 3600 * 3600): tokens,
            }
        )

    def close(self, request_id: str, tokens: int, block_seconds: int, *, started: bool) -> None:
        _, amounts = self.live.pop(request_id)
        self.ended += 1
        for key in amounts:
            if key[0] == "tokens_total":
                self.used[key] += tokens
            elif key[0] == "requests":
                self.used[key] += started
            elif key[0] == "kv_block_seconds":
                self.used[key] += block_seconds if started else 0

    def is_old(self, key: Key) -> bool:
        _, seconds, start = key
        return start + seconds < self.now - 3600

    @staticmethod
    def limit_of(key: Key) -> int:
        metric, seconds, _ = key
        return {
            ("concurrent", 0): SLOTS,
            ("requests", 60): REQUESTS,
            ("kv_block_seconds", 60): BLOCK_SECONDS,
            ("tokens_total", 60): MINUTE_TOKENS,
            ("tokens_total", 3600): HOUR_TOKENS,
        }[metric, seconds]


def name(window: models.LimitWindow) -> Key:
    return window.metric, window.window_seconds, window.window_start


def test_the_ledger_is_its_model(database_url: str) -> None:
    with asyncio.Runner() as runner:
        store = Store.open(database_url)

        async def prepare() -> Principal:
            await store.set_platform_limits(
                [Limit(metric="concurrent", limit=SLOTS)], actor="op", now=START
            )
            await store.create_tenant(
                "acme",
                limits=[
                    Limit(metric="tokens_total", limit=HOUR_TOKENS, window_seconds=3600),
                    Limit(metric="requests", limit=REQUESTS, window_seconds=60),
                    Limit(metric="kv_block_seconds", limit=BLOCK_SECONDS, window_seconds=60),
                ],
                actor="op",
                now=START,
            )
            key_limit = Limit(metric="tokens_total", limit=MINUTE_TOKENS, window_seconds=60)
            _, secret = await store.create_key(
                "acme", "k", limits=[key_limit], actor="op", now=START
            )
            return await store.resolve_key(secret, now=START)

        principal = runner.run(prepare())
        machine = type(
            "Machine",
            (LedgerMachine,),
            {"runner": runner, "store": store, "principal": principal},
        )
        run_state_machine_as_test(
            machine,
            settings=settings(
                max_examples=15,
                stateful_step_count=25,
                deadline=None,
                suppress_health_check=list(HealthCheck),
            ),
        )
        runner.run(store.close())
