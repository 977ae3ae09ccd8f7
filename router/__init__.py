"""The gateway: an OpenAI-compatible endpoint in front of a small and a large tier."""
