"""Carrying a session's KV cache to another model: whether, how, and in which namespace."""
