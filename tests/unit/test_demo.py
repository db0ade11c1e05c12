"""What `headrace demo load` concludes from a server's counters."""

from gateway.cli.fairness import (
    Sample,
    backlogged_seconds,
    entitlements,
    largest_gap,
    shares,
)


def sample(at, counters, waiting):
    return Sample(
        at=at,
        counters=dict(zip("fgh", counters, strict=False)),
        waiting=dict(zip("fgh", waiting, strict=False)),
    )


def test_the_gap_is_the_worst_interval_not_the_distance_of_the_counters():
    samples = [
        sample(0, (1000, 0), (1, 1)),
        sample(1, (1030, 10), (1, 1)),
        sample(2, (1030, 55), (1, 1)),
    ]

    # f - g: 1000, 1020, 975.
    assert largest_gap(samples, "fg") == 45


def test_growth_while_one_is_not_backlogged_is_no_gap():
    samples = [
        sample(0, (0, 0), (1, 1)),
        sample(1, (5, 0), (1, 1)),
        sample(2, (500, 0), (1, 0)),
        sample(3, (600, 600), (1, 1)),
        sample(4, (603, 600), (1, 1)),
    ]

    assert largest_gap(samples, "fg") == 5
    assert backlogged_seconds(samples, "fg") == 2


def test_one_sample_is_no_interval():
    assert largest_gap([sample(0, (0, 9), (1, 1))], "fg") is None
    assert largest_gap([], "fg") is None


def test_every_pair_counts_for_itself():
    samples = [
        sample(0, (0, 0, 0), (1, 1, 0)),
        sample(1, (0, 0, 99), (0, 1, 1)),
        sample(2, (0, 7, 99), (0, 1, 1)),
    ]

    assert largest_gap(samples, "fgh") == 7


def test_shares_weigh_the_counters_back_into_service():
    weights = {"f": 1.0, "g": 1.0, "h": 2.0}
    samples = [
        sample(0, (0, 0, 50), (1, 1, 1)),
        sample(9, (10, 10, 60), (1, 1, 1)),
        sample(10, (99, 10, 60), (1, 0, 1)),
    ]

    assert shares(samples, weights) == {"f": 0.25, "g": 0.25, "h": 0.5}
    assert entitlements(weights) == {"f": 0.25, "g": 0.25, "h": 0.5}


def test_shares_need_service_while_all_are_backlogged():
    weights = {"f": 1.0, "g": 1.0}

    assert shares([sample(0, (0, 0), (1, 1)), sample(1, (0, 0), (1, 1))], weights) is None
    assert shares([sample(0, (0, 0), (1, 0)), sample(1, (5, 5), (1, 0))], weights) is None


def test_a_tenant_that_the_server_does_not_know_is_not_backlogged():
    assert not sample(0, (0,), (1, 1)).backlogged("fg")
