"""Everything the policy store can refuse or fail with."""

from dataclasses import dataclass


class TenancyError(Exception):
    """Base of all policy store errors; never raised itself."""


class StoreUnavailableError(TenancyError):
    """The database cannot be reached or used now. Nothing is known about the key: never a 401."""


class DatabaseUrlError(TenancyError):
    """The database URL names something that is neither a SQLite file nor PostgreSQL."""


class InvalidPolicyError(TenancyError):
    """A limit, weight or priority class is out of range or unknown. Raised when it is set."""


class InvalidNameError(TenancyError):
    """A slug or a name is malformed. Raised when it is set."""


class TenantExistsError(TenancyError):
    """The slug is taken."""


class TenantNotFoundError(TenancyError):
    """An operator named a tenant that does not exist."""


class ClassNotFoundError(TenancyError):
    """An operator named a priority class that does not exist."""


class ClassConflictError(TenancyError):
    """A priority class is there already, its rank is another's, or it is still needed."""


class ApiKeyNotFoundError(TenancyError):
    """An operator named a key id that does not exist."""


class KeyRefusedError(TenancyError):
    """Base of the reasons why a presented secret opens nothing; never raised itself."""


class UnknownKeyError(KeyRefusedError):
    """The secret is malformed or belongs to no key."""


class RevokedKeyError(KeyRefusedError):
    """The secret belonged to a key that was revoked."""


class ExpiredKeyError(KeyRefusedError):
    """The secret belongs to a key whose time is over."""


class TenantSuspendedError(KeyRefusedError):
    """The key is good, its tenant is suspended or archived."""


class DuplicateRequestError(TenancyError):
    """The request id already holds a reservation or is in the ledger."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LimitStatus:
    """One limit right after a decision, for response headers."""

    metric: str
    scope: str  # "platform", "tenant" or "key"
    window_seconds: int  # 0: no window, the limit bounds what is held at once
    limit: int
    remaining: int
    reset_seconds: float | None  # until all of it is free again; None if nobody can know


class LimitExceededError(TenancyError):
    """The request does not fit now and may fit later. No counter was changed.

    Of several limits in the way this names the one that stays in the way longest.
    """

    def __init__(
        self,
        *,
        metric: str,
        scope: str,
        window_seconds: int,
        limit: int,
        used: int,
        needed: int,
        retry_after_seconds: float | None,
        limits: tuple[LimitStatus, ...],
    ) -> None:
        self.metric = metric
        self.scope = scope  # "platform", "tenant", "key", or "class NAME", which tenants share
        self.window_seconds = window_seconds
        self.limit = limit
        self.used = used  # settled and reserved, of everybody under this limit
        self.needed = needed
        self.retry_after_seconds = retry_after_seconds  # None: when another request ends
        self.limits = limits  # every limit that applied, as it stands without this request
        span = f" per {window_seconds} s" if window_seconds else " at once"
        retry = (
            "retry when another request ends"
            if retry_after_seconds is None
            else f"retry in {retry_after_seconds:.1f} s"
        )
        super().__init__(
            f"the {scope}'s {metric} limit is {limit}{span}: "
            f"{used} in use, {needed} needed; {retry}"
        )


class NeverFitsLimitError(TenancyError):
    """The request alone needs more than a limit allows: retrying cannot help."""

    def __init__(
        self, *, metric: str, scope: str, limit: int, needed: int, limits: tuple[LimitStatus, ...]
    ) -> None:
        self.metric = metric
        self.scope = scope
        self.limit = limit
        self.needed = needed
        self.limits = limits  # every counted limit, as it stands without this request
        super().__init__(
            f"the request needs {needed} {metric}, the {scope}'s limit is {limit}: it can never "
            "fit; shorten the prompt or ask for fewer output tokens"
        )
