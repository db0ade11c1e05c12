"""KV blocks and who holds them: pure Python, no tensors."""
