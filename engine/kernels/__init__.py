"""Attention over paged KV: one place where a kernel can be replaced."""
