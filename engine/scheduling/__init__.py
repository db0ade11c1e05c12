"""Which sequences run next, and how many tokens of each: pure Python, no clock, no torch."""
