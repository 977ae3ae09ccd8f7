"""The named policies, read again when their files change; a bad file leaves the last good one."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from watchfiles import awatch

import policies
from policies import Policy, PolicyError
from router import log
from router.metrics import Metrics
from router.settings import load_policy
from router.stamp import Stamp, stamp

logger = log.get("policies")
# Files are looked at whenever something happens beside them, and at least this often: not
# every file system tells of changes.
LOOK_MS = 1000
SETTLE_MS = 200


@dataclass
class _Source:
    path: Path
    stamps: dict[Path, Stamp]


class Catalog:
    """`sources` are files or the policies themselves. Raises PolicyError: it starts with good ones.

    Lookups take the policy that is good now; a turn keeps the one it began with.
    """

    def __init__(self, sources: dict[str, Path | dict[str, Any]], metrics: Metrics) -> None:
        self._metrics = metrics
        self._policies: dict[str, Policy] = {}
        self._sources: dict[str, _Source] = {}
        # What is wrong with the files that are not in use as they are now.
        self.errors: dict[str, str] = {}
        self._task: asyncio.Task[None] | None = None
        for name, source in sources.items():
            if isinstance(source, Path):
                self._sources[name] = _Source(source, _stamps(policies.watched_files(source)))
            self._policies[name] = load_policy(source)
            metrics.policy_stale.labels(name).set(0)

    def get(self, name: str) -> Policy | None:
        return self._policies.get(name)

    def versions(self) -> dict[str, str]:
        return {name: policy.version for name, policy in self._policies.items()}

    def start(self) -> None:
        if self._sources:
            self._task = asyncio.create_task(self._watch(), name="policy-watch")

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task

    async def refresh(self) -> None:
        """Takes up every file that has changed."""
        for name, source in self._sources.items():
            if await asyncio.to_thread(_stamps, source.stamps) != source.stamps:
                # In a thread: a classifier's weights take a while to read.
                await asyncio.to_thread(self._reload, name, source)

    def _reload(self, name: str, source: _Source) -> None:
        # Looked at before they are read, so that a change meanwhile is seen the next time.
        # Files of a policy that was good are watched on while it is bad.
        files = policies.watched_files(source.path) | source.stamps.keys()
        source.stamps = _stamps(files)
        try:
            policy = load_policy(source.path)
        except Exception as error:
            # Whatever a file can provoke, the last good policy stays.
            known = isinstance(error, PolicyError)
            self.errors[name] = text = str(error) if known else f"{type(error).__name__}: {error}"
            self._metrics.policy_reloads.labels(name, "refused").inc()
            self._metrics.policy_stale.labels(name).set(1)
            logger.error(
                "policy_refused",
                policy=name,
                error=text,
                running=self._policies[name].version,
            )
            return
        source.stamps = {
            file: source.stamps.get(file) for file in policies.watched_files(source.path)
        }
        self.errors.pop(name, None)
        self._policies[name] = policy
        self._metrics.policy_reloads.labels(name, "taken").inc()
        self._metrics.policy_stale.labels(name).set(0)
        logger.info("policy_reloaded", policy=name, version=policy.version)

    async def _watch(self) -> None:
        told = None
        while True:
            folders = self._folders()
            try:
                async for _ in awatch(
                    *folders,
                    watch_filter=None,
                    debounce=SETTLE_MS,
                    rust_timeout=LOOK_MS,
                    yield_on_timeout=True,
                    recursive=False,
                ):
                    await self.refresh()
                    if self._folders() != folders:
                        break
            except Exception as error:
                # A folder that is not there, no more watches: looking from time to time will do.
                if (text := f"{type(error).__name__}: {error}") != told:
                    told = text
                    logger.warning("policies_not_watched", error=text)
                await asyncio.sleep(LOOK_MS / 1000)
                await self.refresh()

    def _folders(self) -> set[Path]:
        files = {file for source in self._sources.values() for file in source.stamps}
        return {file.parent for file in files}


def _stamps(files: Iterable[Path]) -> dict[Path, Stamp]:
    return {file: stamp(file) for file in files}
