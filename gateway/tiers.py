"""From the service tier that a request asks for to a class that its tenant is entitled to."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

from gateway.errors import InvalidRequestError
from tenants.classes import list_classes
from tenants.policy import Principal, ServiceClass
from tenants.store import Store

OWN_TIERS = frozenset({"auto", "default", "scale"})  # the tenant's own class, whatever it is


class ServiceTiers:
    """Serves tiers by the priority classes of the policy store."""

    def __init__(self, store: Store, class_sharing: Literal["strict", "weighted"]) -> None:
        self._store = store
        self._by_weight = class_sharing == "weighted"

    async def serve(self, principal: Principal, asked: str | None) -> tuple[Principal, str | None]:
        """The principal in the class that serves the request, and the tier to echo if one was
        asked for. Raises InvalidRequestError or StoreUnavailableError."""
        if asked is None or asked in OWN_TIERS:
            return principal, asked and "default"
        classes = await list_classes(self._store.database)
        chosen, tier = choose_class(
            asked, principal.service_class, classes, by_weight=self._by_weight
        )
        return replace(principal, service_class=chosen), tier


def choose_class(
    asked: str, own: ServiceClass, classes: Sequence[ServiceClass], *, by_weight: bool
) -> tuple[ServiceClass, str]:
    """The class that serves a tier, and the tier that it is. `classes` are in order of rank.

    A tenant is entitled to its own class and to those below; where classes share `by_weight`, to
    its own alone: another would be another share. As at OpenAI, who asks for more gets the default
    and reads so in the echo. Raises InvalidRequestError for an unknown tier.
    """
    below = () if by_weight else (one for one in classes if one.rank > own.rank)
    entitled = (own, *below)
    if asked == "flex":
        is_last = entitled[-1].rank >= classes[-1].rank
        return entitled[-1], "flex" if is_last else "default"
    if asked in ("priority", "fast"):
        return own, "priority" if own.rank == classes[0].rank else "default"
    for one in entitled:
        if one.name == asked:
            return one, one.name
    names = [one.name for one in classes]
    if asked in names:
        return own, "default"
    raise InvalidRequestError(
        "Unknown 'service_tier': use auto, default, flex, priority or a class: "
        f"{', '.join(names)}.",
        param="service_tier",
    )
