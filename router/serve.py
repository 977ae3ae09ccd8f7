"""`run(settings)` serves the gateway."""

from router.server.serve import run

__all__ = ["run"]
