"""The HTTP API: what OpenAI clients call, and what operators call."""
