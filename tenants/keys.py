"""API key secrets: `hr_` + 33 base62 digits of 192 random bits + 6 base62 digits of CRC-32."""

import hashlib
import re
import secrets
import zlib

PREFIX = "hr_"
_RANDOM_BITS = 192
_BODY_LENGTH = 33  # 62**33 > 2**192
_CHECKSUM_LENGTH = 6  # 62**6 > 2**32
_ALPHABET = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
_FORMAT = re.compile(rf"{PREFIX}[0-9A-Za-z]{{{_BODY_LENGTH + _CHECKSUM_LENGTH}}}")


def mint() -> str:
    """A new secret. Show it once; keep only its digest and the two ends for display."""
    body = PREFIX + _base62(secrets.randbits(_RANDOM_BITS), _BODY_LENGTH)
    return body + _checksum(body)


def is_well_formed(secret: str) -> bool:
    """Whether format and checksum hold: asked before any database access."""
    if _FORMAT.fullmatch(secret) is None:
        return False
    body, checksum = secret[:-_CHECKSUM_LENGTH], secret[-_CHECKSUM_LENGTH:]
    return checksum == _checksum(body)


def digest(secret: str) -> bytes:
    """What is stored of a secret: 32 bytes, by which it is found again.

    Plain SHA-256 is right here and would be wrong for passwords: with 192 random bits there is
    nothing to guess, so a slow hash would only slow down each request, and without a salt the
    digest can be looked up in an index.
    """
    return hashlib.sha256(secret.encode()).digest()


def display_ends(secret: str) -> tuple[str, str]:
    """(first, last) characters that may be shown; at least 140 random bits stay hidden."""
    return secret[: len(PREFIX) + 4], secret[-4:]


def _checksum(body: str) -> str:
    # CRC-32 finds every error within four neighbouring characters, so every single typo and swap.
    return _base62(zlib.crc32(body.encode()), _CHECKSUM_LENGTH)


def _base62(number: int, length: int) -> str:
    digits = []
    for _ in range(length):
        number, digit = divmod(number, 62)
        digits.append(_ALPHABET[digit])
    return "".join(reversed(digits))
