"""The laboratory: the engine's own scheduler and memory on virtual time."""
