"""Baton's side of SGLang's public extension points: CPU platform, attention, linker, launcher."""
