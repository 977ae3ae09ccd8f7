"""API keys: hashed at rest, each for one tenant, read again when their file changes."""
