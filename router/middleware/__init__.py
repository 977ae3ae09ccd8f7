"""Pure ASGI middleware: identity of a request, its log line, and its limits."""
