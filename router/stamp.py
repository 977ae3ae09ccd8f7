"""Tells whether a file has changed since it was last looked at."""

from __future__ import annotations

from pathlib import Path

# Time of the last change, size and inode; None for a file that cannot be looked at.
Stamp = tuple[int, int, int] | None


def stamp(path: Path) -> Stamp:
    try:
        stat = path.stat()
    except OSError:
        return None
    return stat.st_mtime_ns, stat.st_size, stat.st_ino
