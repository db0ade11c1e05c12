"""The gateway: the only place where tenants and engine meet."""
