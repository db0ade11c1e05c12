"""The policy store: tenants, keys, limits, and an exact ledger. Knows no HTTP, no engine."""
