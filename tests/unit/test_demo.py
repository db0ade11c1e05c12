"""What `headrace demo load` concludes from a server's counters."""

from gateway.cli.fairness import (
    Sample,
    backlogged_seconds,
    entitlements,
    shares,
)


def sample(at, counters, waiting):
    return Sample(
        at=at,
        counters=dict(zip("fgh", counters, strict=False)),
        waiting=dict(zip("fgh", waiting, strict=False)),
    )


def test_shares_weigh_the_counters_back_into_service():
    weights = {"f": 1.0, "g": 1.0, "h": 2.0}
    samples = [
        sample(0, (0, 0, 50), (1, 1, 1)),
        sample(9, (10, 10, 60), (1, 1, 1)),
        sample(10, (99, 10, 60), (1, 0, 1)),
    ]

    assert shares(samples, weights) == {"f": 0.25, "g": 0.25, "h": 0.5}
    assert backlogged_seconds(samples, "fgh") == 9
    assert entitlements(weights) == {"f": 0.25, "g": 0.25, "h": 0.5}


def test_what_happens_while_one_is_not_backlogged_is_left_out():
    weights = {"f": 1.0, "g": 1.0}
    samples = [
        sample(0, (0, 0), (1, 1)),
        sample(1, (3, 1), (1, 1)),
        sample(2, (500, 1), (1, 0)),
        sample(3, (600, 600), (1, 1)),
        sample(5, (600, 602), (1, 1)),
    ]

    assert shares(samples, weights) == {"f": 0.5, "g": 0.5}
    assert backlogged_seconds(samples, "fg") == 3


def test_shares_need_service_while_all_are_backlogged():
    weights = {"f": 1.0, "g": 1.0}

    assert shares([sample(0, (0, 0), (1, 1)), sample(1, (0, 0), (1, 1))], weights) is None
    assert shares([sample(0, (0, 0), (1, 0)), sample(1, (5, 5), (1, 0))], weights) is None


def test_a_tenant_that_the_server_does_not_know_is_not_backlogged():
    assert not sample(0, (0,), (1, 1)).backlogged("fg")
