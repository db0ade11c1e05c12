"""API key secrets: format, checksum, digest."""

import hashlib

from hypothesis import given
from hypothesis import strategies as st

from tenants import keys

ALPHABET = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"


def test_a_minted_secret_is_well_formed_and_42_characters_long() -> None:
    secret = keys.mint()
    assert secret.startswith("hr_")
    assert len(secret) == 42
    assert keys.is_well_formed(secret)


def test_secrets_do_not_repeat() -> None:
    assert len({keys.mint() for _ in range(1000)}) == 1000


def test_every_digit_of_the_random_part_varies() -> None:
    minted = [keys.mint() for _ in range(400)]
    # The first of 33 digits carries the top 1.1 bits of 192, every other one all of its 5.95.
    assert [len({one[at] for one in minted}) > 40 for at in range(4, 36)] == [True] * 32
    assert {one[3] for one in minted} <= {"0", "1", "2", "3"}


def test_the_checksum_catches_every_single_character_error() -> None:
    secret = keys.mint()
    for at in range(3, len(secret)):
        for other in ALPHABET:
            if other != secret[at]:
                assert not keys.is_well_formed(secret[:at] + other + secret[at + 1 :])


def test_the_checksum_catches_every_swap_of_neighbours() -> None:
    secret = keys.mint()
    for at in range(3, len(secret) - 1):
        swapped = secret[:at] + secret[at + 1] + secret[at] + secret[at + 2 :]
        assert swapped == secret or not keys.is_well_formed(swapped)


def test_a_known_secret_keeps_its_checksum_and_digest() -> None:
    """Pins the format: keys in use must stay valid over releases."""
    secret = "hr_" + "0" * 33 + "4bce3j"
    assert keys.is_well_formed(secret)
    assert keys.digest(secret) == hashlib.sha256(secret.encode()).digest()


@given(
    st.text(max_size=60) | st.text(alphabet=ALPHABET, min_size=39, max_size=39).map("hr_".__add__)
)
def test_noise_is_refused(text: str) -> None:
    assert not keys.is_well_formed(text)


def test_near_misses_are_refused() -> None:
    secret = keys.mint()
    for bad in (
        secret + "\n",
        secret[:-1],
        secret + "0",
        secret.replace("hr_", "sk_"),
        secret.upper(),
        secret[:-1] + "٣",  # a digit, but not an ASCII one
    ):
        assert not keys.is_well_formed(bad)


def test_only_eleven_characters_are_displayed() -> None:
    secret = keys.mint()
    assert keys.display_ends(secret) == (secret[:7], secret[-4:])
