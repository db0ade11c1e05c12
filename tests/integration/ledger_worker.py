"""A gateway reduced to its ledger, for tests with real processes. Prints what it has committed.

ledger_worker.py URL SECRET NAME COUNT    COUNT requests at once, then ends
ledger_worker.py URL SECRET NAME forever  one request after another, every third never settled
"""

import asyncio
import itertools
import sys

from tenants.errors import LimitExceededError
from tenants.ledger import Ledger, Settlement, Status
from tenants.policy import Principal
from tenants.store import Store

NOW = 1_000_000_020.0
LEASE_SECONDS = 30.0


def report(*words: str) -> None:
    sys.stdout.write(" ".join(words) + "\n")
    sys.stdout.flush()


async def reserve(ledger: Ledger, principal: Principal, request_id: str) -> bool:
    try:
        await ledger.reserve(principal, request_id, prompt_tokens=10, max_output_tokens=5, now=NOW)
    except LimitExceededError:
        return False
    report("reserved", request_id)
    return True


async def work_forever(ledger: Ledger, principal: Principal, name: str) -> None:
    done = Settlement(status=Status.COMPLETED, tokens_in=10, tokens_out=2)
    for at in itertools.count():
        request_id = f"{name}-{at}"
        await reserve(ledger, principal, request_id)
        if at % 3:
            await ledger.settle(request_id, done, now=NOW + 1)
            report("settled", request_id)


async def main(url: str, secret: str, name: str, count: str) -> None:
    store = Store.open(url)
    ledger = Ledger(store.database, instance_id=name, lease_seconds=LEASE_SECONDS)
    principal = await store.resolve_key(secret, now=NOW)
    report("ready")
    sys.stdin.readline()  # all begin together
    if count == "forever":
        await work_forever(ledger, principal, name)
    await asyncio.gather(*(reserve(ledger, principal, f"{name}-{at}") for at in range(int(count))))
    await store.close()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
