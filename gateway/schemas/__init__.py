"""Bodies of requests: every bound is checked here, before any costly work."""
