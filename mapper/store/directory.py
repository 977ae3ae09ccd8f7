"""The default store: one file a page in a private directory, meant for tmpfs.

Several processes share it with no lock: files appear by rename and vanish by unlink, and a
mapped file stays readable after its unlink. Recency, and pins, live in the files' own
modification times, so they are shared as well and outlast a crash of whoever set them: a
pinned page is one whose time lies in the future.
"""

from __future__ import annotations

import errno
import json
import mmap
import os
import stat
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from mapper.errors import BadPage
from mapper.store.page import HEADER_BYTES, PageLayout, Provenance

# Eviction frees down to this share of the limit, so that a full store does not rescan
# its directory for every page written.
_LOW_WATER = 0.9
# Deeper pages are useless without those before them: stagger times by this much, in
# seconds, so that a chain is evicted from its end.
_CHAIN_STEP = 1e-5


class DirectoryStore:
    """Pages as files `<root>/<fingerprint>/<key[:2]>/<key>.<rank>-<tp size>.kv`.

    Args:
        root: created with mode 0700; refused when somebody else owns it.
        max_bytes: limit over all models; the least recently used pages are evicted.

    `counters` holds `put`, `put_existing`, `linked`, `evicted`, `full`, and
    `bad_<reason>` for each page found damaged and removed.
    """

    def __init__(self, root: Path, max_bytes: int) -> None:
        if max_bytes <= 0:
            raise ValueError(f"max_bytes must be positive, not {max_bytes}")
        self.root = Path(root)
        self.max_bytes = max_bytes
        self.counters: Counter[str] = Counter()
        self._made: set[Path] = set()
        self._room = 0
        self._lock = threading.Lock()
        self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
        owner = self.root.stat()
        if owner.st_uid != os.getuid():
            raise PermissionError(f"{self.root} belongs to uid {owner.st_uid}, not to this process")
        if owner.st_mode & 0o077:
            # KV caches are conversations: nobody else on the machine may read them.
            self.root.chmod(0o700)

    # ---- models ----

    def announce(self, fingerprint: str, description: dict[str, Any]) -> None:
        """Publishes what produces this fingerprint's pages, for the mapper to check."""
        self._folder(self.root / fingerprint)
        target = self.root / fingerprint / "model.json"
        temporary = target.with_suffix(f".{os.getpid()}.tmp")
        temporary.write_text(json.dumps(description, indent=1, sort_keys=True))
        os.replace(temporary, target)

    def announced(self) -> Iterator[dict[str, Any]]:
        """Every description published by a worker, most recent last."""
        files = sorted(self.root.glob("*/model.json"), key=lambda file: file.stat().st_mtime)
        for file in files:
            yield json.loads(file.read_text())

    # ---- pages ----

    def prefix(self, layout: PageLayout, keys: Sequence[str]) -> int:
        for index, key in enumerate(keys):
            try:
                status = os.stat(self._path(layout, key))
            except FileNotFoundError:
                return index
            if not status.st_mode & stat.S_IRUSR:
                return index
        return len(keys)

    def get(self, layout: PageLayout, key: str) -> tuple[torch.Tensor, Provenance] | None:
        path = self._path(layout, key)
        try:
            return layout.decode(self._map(path, layout))
        except FileNotFoundError:
            return None
        except (BadPage, OSError) as error:
            reason = error.reason if isinstance(error, BadPage) else "unreadable"
            self.counters[f"bad_{reason}"] += 1
            self._condemn(path)
            return None

    def put(self, layout: PageLayout, key: str, page: torch.Tensor, provenance: Provenance) -> bool:
        path = self._path(layout, key)
        if self.prefix(layout, [key]):
            self.counters["put_existing"] += 1
            return True
        header, payload = layout.encode(page, provenance)
        if not self._make_room(layout.object_bytes):
            self.counters["full"] += 1
            return False
        temporary = path.with_suffix(f".{os.getpid()}-{threading.get_ident()}.tmp")
        try:
            self._folder(path.parent)
            with temporary.open("wb", buffering=0) as file:
                file.write(header)
                file.write(payload)
            os.replace(temporary, path)
        except OSError as error:
            temporary.unlink(missing_ok=True)
            self._made.discard(path.parent)
            if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.ENOENT):
                raise
            # tmpfs can be full of other people's files: not ours to evict.
            self.counters["full"] += 1
            return False
        self.counters["put"] += 1
        return True

    def keys(self, layout: PageLayout) -> set[str]:
        """Keys of all pages of this layout that are there now."""
        suffix = self._path(layout, "").name
        files = (self.root / layout.fingerprint).glob(f"*/*{suffix}")
        return {file.name.removesuffix(suffix) for file in files}

    def link(self, layout: PageLayout, existing: str, key: str) -> bool:
        source, path = self._path(layout, existing), self._path(layout, key)
        try:
            self._folder(path.parent)
            os.link(source, path)
        except FileExistsError:
            return True
        except OSError:
            return False
        self.counters["linked"] += 1
        return True

    def remove(self, layout: PageLayout, key: str) -> None:
        self._path(layout, key).unlink(missing_ok=True)

    def touch(self, layout: PageLayout, keys: Sequence[str], pin_seconds: float = 0.0) -> None:
        now = time.time()
        for depth, key in enumerate(keys):
            path = self._path(layout, key)
            moment = now + pin_seconds - depth * _CHAIN_STEP
            try:
                # A touch must not cut short a pin that somebody else set.
                if pin_seconds or path.stat().st_mtime <= now:
                    os.utime(path, (moment, moment))
            except FileNotFoundError:
                continue

    def usage(self) -> tuple[int, int]:
        """Pages and bytes held, pages that are linked twice counted once."""
        inodes = {status.st_ino: status.st_size for _, status in self._pages()}
        return len(inodes), sum(inodes.values())

    # ---- inside ----

    def _path(self, layout: PageLayout, key: str) -> Path:
        name = f"{key}.{layout.rank}-{layout.tp_size}.kv"
        return self.root / layout.fingerprint / key[:2] / name

    @staticmethod
    def _condemn(path: Path) -> None:
        """Removes a bad page, and makes a miss of every other key that is linked to it.

        The mode belongs to the file and not to its name, so that all links see it; cutting
        the file short instead would crash whoever has it mapped.
        """
        try:
            path.chmod(0)
            path.unlink()
        except FileNotFoundError:
            pass

    def _folder(self, folder: Path) -> None:
        """Creates a folder below the root; `parents=True` would ignore the mode above it."""
        if folder not in self._made:
            if folder.parent != self.root:
                self._folder(folder.parent)
            folder.mkdir(mode=0o700, exist_ok=True)
            self._made.add(folder)

    @staticmethod
    def _map(path: Path, layout: PageLayout) -> memoryview:
        with path.open("rb") as file:
            status = os.fstat(file.fileno())
            size = status.st_size
            if not status.st_mode & stat.S_IRUSR:
                # Root could read it all the same.
                raise BadPage("checksum", "found bad under another key")
            if size != layout.object_bytes:
                # Says more than "wrong size" when the header is whole, and maps nothing.
                layout.check_header(file.read(HEADER_BYTES), size)
            # Private and writable: torch refuses views of read-only memory without a
            # warning, and a private mapping can never write to the file.
            mapped = mmap.mmap(file.fileno(), size, access=mmap.ACCESS_COPY)
        return memoryview(mapped)

    def _pages(self) -> Iterator[tuple[str, os.stat_result]]:
        for folder in self.root.glob("*/??"):
            try:
                entries = list(os.scandir(folder))
            except FileNotFoundError:
                continue
            for entry in entries:
                try:
                    yield entry.path, entry.stat(follow_symlinks=False)
                except FileNotFoundError:
                    continue

    def _make_room(self, size: int) -> bool:
        """Reserves `size` bytes, evicting as needed; False when pins leave no room."""
        if size > self.max_bytes:
            return False
        with self._lock:
            if self._room < size:
                self._room = self._evict(size)
            if self._room < size:
                return False
            self._room -= size
            return True

    def _evict(self, size: int) -> int:
        """Bytes that may be written before the next scan.

        Other processes write too: handing out only a tenth of the limit at a time keeps
        each process's idea of the total fresh.
        """
        by_inode: dict[int, tuple[float, int, list[str]]] = {}
        for path, status in self._pages():
            known = by_inode.setdefault(status.st_ino, (status.st_mtime, status.st_size, []))
            known[2].append(path)
        used = sum(size for _, size, _ in by_inode.values())
        low = int(self.max_bytes * _LOW_WATER)
        if used + size > self.max_bytes:
            now = time.time()
            for moment, page_bytes, paths in sorted(by_inode.values()):
                if used + size <= low or moment > now:
                    break
                for path in paths:
                    Path(path).unlink(missing_ok=True)
                used -= page_bytes
                self.counters["evicted"] += 1
        return min(self.max_bytes - used, max(size, self.max_bytes - low))
