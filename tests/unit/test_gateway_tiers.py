"""Which class serves a tier, and what the client reads of it."""

import pytest

from gateway.errors import InvalidRequestError
from gateway.tiers import OWN_TIERS, choose_class
from tenants.classes import TIER_WORDS
from tenants.policy import ServiceClass

CLASSES = [
    ServiceClass(name=name, rank=rank, preemptible=name == "batch")
    for rank, name in ((0, "interactive"), (5, "standard"), (9, "batch"))
]


@pytest.mark.parametrize(
    ("own", "asked", "served", "tier"),
    [
        ("interactive", "priority", "interactive", "priority"),
        ("interactive", "fast", "interactive", "priority"),
        ("standard", "priority", "standard", "default"),
        ("batch", "priority", "batch", "default"),
        ("interactive", "flex", "batch", "flex"),
        ("batch", "flex", "batch", "flex"),
        ("interactive", "standard", "standard", "standard"),
        ("standard", "standard", "standard", "standard"),
        ("standard", "interactive", "standard", "default"),
        ("batch", "interactive", "batch", "default"),
        ("standard", "batch", "batch", "batch"),
    ],
)
def test_nobody_gets_more_than_the_own_class(own: str, asked: str, served: str, tier: str) -> None:
    by_name = {one.name: one for one in CLASSES}
    assert choose_class(asked, by_name[own], CLASSES, by_weight=False) == (by_name[served], tier)


def test_where_classes_share_by_weight_there_is_only_the_own_one() -> None:
    """Each class is a share there: asking for a second one would be a way to a larger share."""
    interactive, standard, batch = CLASSES

    def choose(asked: str, own: ServiceClass) -> tuple[ServiceClass, str]:
        return choose_class(asked, own, CLASSES, by_weight=True)

    assert choose("batch", standard) == (standard, "default")
    assert choose("flex", standard) == (standard, "default")
    assert choose("flex", batch) == (batch, "flex")
    assert choose("standard", standard) == (standard, "standard")
    assert choose("priority", interactive) == (interactive, "priority")


def test_a_class_that_went_meanwhile_still_serves_its_own() -> None:
    gone = ServiceClass(name="gone", rank=30, preemptible=False)
    assert choose_class("flex", gone, CLASSES, by_weight=False) == (gone, "flex")
    assert choose_class("gone", gone, CLASSES, by_weight=False) == (gone, "gone")


def test_an_unknown_tier_is_refused_naming_the_known_ones() -> None:
    with pytest.raises(InvalidRequestError, match="interactive, standard, batch") as caught:
        choose_class("gold", CLASSES[0], CLASSES, by_weight=False)
    assert (caught.value.param, caught.value.code) == ("service_tier", "invalid_value")


def test_no_class_can_be_named_as_what_a_tier_means_already() -> None:
    for word in TIER_WORDS - OWN_TIERS:
        # Known without such a class.
        assert choose_class(word, CLASSES[1], CLASSES, by_weight=False)[0] in CLASSES
    assert OWN_TIERS <= TIER_WORDS
