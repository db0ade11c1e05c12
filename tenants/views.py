"""What leaves the store about tenants and keys: frozen records, never a secret or a digest."""

from dataclasses import asdict, dataclass
from typing import Any

from tenants.policy import KVBounds, Limit


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantView:
    id: str
    slug: str
    name: str
    status: str  # "active", "suspended" or "archived"
    weight: float
    priority_class: str
    limits: tuple[Limit, ...]
    kv: KVBounds
    policy_version: int
    created_at: float

    def to_document(self) -> dict[str, Any]:
        """What of it can change, for the audit log."""
        return {
            "slug": self.slug,
            "name": self.name,
            "status": self.status,
            "weight": self.weight,
            "priority_class": self.priority_class,
            "limits": [limit.to_document() for limit in self.limits],
            "kv": asdict(self.kv),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiKeyView:
    id: str
    tenant: str  # slug
    name: str
    redacted: str  # both ends of the secret
    limits: tuple[Limit, ...]
    expires_at: float | None
    revoked_at: float | None
    last_used_at: float | None  # when its last request finished
    created_at: float

    def to_document(self) -> dict[str, Any]:
        """What of it can change, for the audit log."""
        return {
            "tenant": self.tenant,
            "name": self.name,
            "limits": [limit.to_document() for limit in self.limits],
            "expires_at": self.expires_at,
            "revoked_at": self.revoked_at,
        }
