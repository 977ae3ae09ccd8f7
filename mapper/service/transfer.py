"""One transfer: make the longest possible prefix of a conversation restorable by its new model.

Page by page the target gets, in this order: what its lineage holds already, its own exact
page (linked), or a page mapped from the source's. The first page that none of the three
can supply ends the prefix; the target prefills the rest natively.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from threading import Event

import torch

from mapper.errors import UnsupportedModel
from mapper.keys import Namespace, page_keys
from mapper.service.pages import ModelPages
from mapper.service.pairs import LoadedArtifact, Pairs
from mapper.service.protocol import Reason, TransferRequest, TransferResult

# Long enough for the turn to reach the worker; the pin then lapses by itself.
_PIN_SECONDS = 60.0
# Pages mapped at a time. Bounds memory, and is how often the deadline is looked at.
_CHUNK_PAGES = 32


@dataclass(frozen=True)
class _Plan:
    """What each page of the restorable prefix comes from; `mapped` is contiguous runs' union."""

    exact: int
    reuse: list[int]
    link: list[int]
    mapped: list[int]


class Transfers:
    """Carries out transfer requests against the store.

    Args:
        pairs: artifacts and live models.
        writers: threads that checksum and write mapped pages.
    """

    def __init__(self, pairs: Pairs, writers: int = 2) -> None:
        self._pairs = pairs
        self._writers = ThreadPoolExecutor(writers, thread_name_prefix="page-writer")

    @torch.inference_mode()
    def run(
        self, request: TransferRequest, deadline: float, stop: Event | None = None
    ) -> TransferResult:
        """Carries out one transfer; `deadline` is a `time.monotonic()` moment.

        What was written before the deadline, or before `stop` was set, stays: a shorter prefix
        is still a prefix.
        """
        began = time.perf_counter()
        pair = f"{request.source.model}->{request.target.model}"

        def answer(status: str, reason: Reason, **fields: object) -> TransferResult:
            elapsed = (time.perf_counter() - began) * 1000
            return TransferResult(status=status, reason=reason, pair=pair, ms=elapsed, **fields)

        models = self._pairs.live()
        for name in (request.source.model, request.target.model):
            if name not in models:
                detail = f"no worker announced {name!r} in this store; it has {sorted(models)}"
                return answer("unsupported", Reason.UNKNOWN_MODEL, field="model", detail=detail)
        source, target = models[request.source.model], models[request.target.model]
        try:
            loaded = self._pairs.find(source.spec, target.spec)
        except UnsupportedModel as error:
            reason = Reason.NO_ARTIFACT if error.field == "artifact" else Reason.MISMATCH
            return answer("unsupported", reason, field=error.field, detail=error.reason)

        job = _Job(request, source, target, loaded)
        plan = job.plan()
        if not plan.reuse and not plan.mapped:
            if plan.exact:
                tokens = plan.exact * job.page_size
                return answer(
                    "applied", Reason.EXACT, pages=plan.exact, tokens=tokens, exact_tokens=tokens
                )
            too_short = job.mappable_pages == 0
            reason = Reason.TOO_SHORT if too_short else Reason.NO_SOURCE_PAGES
            return answer("fallback_reprefill", reason)

        size = job.page_size
        if not plan.reuse and len(plan.mapped) * size < request.min_mapped_tokens:
            return answer("fallback_reprefill", Reason.TOO_LITTLE)

        pages, mapped, stopped = job.carry_out(plan, deadline, self._writers, stop)
        if not pages:
            return answer("fallback_reprefill", stopped or Reason.ERROR)
        reused = sum(index < pages for index in plan.reuse)
        return answer(
            "applied",
            stopped or (Reason.MAPPED if mapped else Reason.REUSED),
            pages=pages,
            tokens=pages * size,
            exact_tokens=min(plan.exact, pages) * size,
            mapped_tokens=mapped * size,
            reused_tokens=reused * size,
        )


class _Job:
    """A request with its keys and models resolved."""

    def __init__(
        self,
        request: TransferRequest,
        source: ModelPages,
        target: ModelPages,
        loaded: LoadedArtifact,
    ) -> None:
        self.source, self.target, self.loaded = source, target, loaded
        self.page_size = target.spec.page_size
        self.first_token = request.token_ids[0] if request.token_ids else None
        ids, salt = request.token_ids, request.target.cache_salt
        self.lineage_keys = self._keys(ids, request.target.extra_key, salt)
        self.exact_keys = self._keys(ids, None, salt)
        self.source_keys = self._keys(ids, request.source.extra_key, request.source.cache_salt)
        tail = request.native_tail
        if tail is None:
            tail = loaded.artifact.manifest.native_tail
        # The last prompt token is always the target's own: its logits start the answer.
        self.mappable_pages = max(len(ids) - max(tail, 1), 0) // self.page_size

    def _keys(self, ids: Sequence[int], extra_key: str | None, salt: str | None) -> list[str]:
        return page_keys(ids, self.page_size, Namespace(extra_key, salt))

    def plan(self) -> _Plan:
        exact = 0
        reuse, link, mapped = [], [], []
        for index, key in enumerate(self.lineage_keys):
            has_exact = self.target.has(self.exact_keys[index])
            if has_exact and exact == index:
                exact += 1
            if self.target.has(key):
                reuse.append(index)
            elif has_exact:
                link.append(index)
            elif index < self.mappable_pages and self.source.has(self.source_keys[index]):
                mapped.append(index)
            else:
                break
        return _Plan(exact, reuse, link, mapped)

    def carry_out(
        self,
        plan: _Plan,
        deadline: float,
        writers: ThreadPoolExecutor,
        stop: Event | None,
    ) -> tuple[int, int, Reason | None]:
        """Writes the plan's pages in chain order.

        Returns the pages that are restorable now, how many of them this call mapped, and
        why it stopped early, if it did.
        """
        pages = len(plan.reuse) + len(plan.link) + len(plan.mapped)
        mapped, stopped = 0, None
        slowest = 0.0
        # Who can be told to stop is asked more often.
        size = _CHUNK_PAGES if stop is None else _CHUNK_PAGES // 4
        for first in range(0, len(plan.mapped), size):
            chunk = plan.mapped[first : first + size]
            began = time.monotonic()
            # The answer must be back in time: no chunk is begun that would end too late.
            if began + slowest > deadline:
                stopped = Reason.DEADLINE
            elif stop is not None and stop.is_set():
                stopped = Reason.YIELDED
            else:
                done, stopped = self._map(chunk, writers)
                mapped += done
                slowest = max(slowest, time.monotonic() - began)
            if stopped:
                # Pages after the first one missing cannot be restored.
                pages = plan.mapped[mapped]
                break
        for index in plan.link:
            if index < pages and not self.target.link(
                self.exact_keys[index], self.lineage_keys[index]
            ):
                # Evicted since the plan was made; the prefix ends before it.
                pages = index
                mapped = sum(other < index for other in plan.mapped[:mapped])
        self.target.pin(self.lineage_keys[:pages], _PIN_SECONDS)
        return pages, mapped, stopped

    def _map(self, indices: list[int], writers: ThreadPoolExecutor) -> tuple[int, Reason | None]:
        """Maps and writes these pages; returns how many, in order, and why not all."""
        k, v = self.source.read([self.source_keys[index] for index in indices])
        size = self.page_size
        read = k.shape[1] // size
        indices, stopped = indices[:read], Reason.NO_SOURCE_PAGES if read < len(indices) else None
        if not indices:
            return 0, stopped
        starts = torch.tensor(indices) * size
        positions = (starts[:, None] + torch.arange(size)).flatten()
        if self.loaded.map.looks_back:
            k, v = self._map_after_predecessors(indices, k, v, positions)
        else:
            k, v = self.loaded.map.apply(k, v, positions)
        if indices[0] == 0 and not self._put_sink(k, v):
            return 0, Reason.NO_SINK

        def write(at: int) -> bool:
            rows = slice(at * size, (at + 1) * size)
            return self.target.write(self.lineage_keys[indices[at]], k[:, rows], v[:, rows])

        for at, written in enumerate(writers.map(write, range(len(indices)))):
            if not written:
                return at, Reason.STORE_FULL
        return len(indices), stopped

    def _map_after_predecessors(
        self, indices: list[int], k: torch.Tensor, v: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Maps pages whose keys are made of the token before as well: the last one of the page before each run.

        That page may itself be mapped: only how one key looks back depends on it. Where there is none, the run's first
        token stands for its own predecessor.
        """
        size, parts, own = self.page_size, [], []
        for at, index in enumerate(indices):
            rows = slice(at * size, (at + 1) * size)
            page = k[:, rows], v[:, rows], positions[rows]
            if index and (at == 0 or indices[at - 1] != index - 1):
                before = self.source.read([self.source_keys[index - 1]], mapped=True)
                if before[0].shape[1]:
                    parts.append((*(part[:, -1:] for part in before), page[2][:1] - 1))
                else:
                    parts.append((page[0][:, :1], page[1][:, :1], page[2][:1]))
                own.append(torch.zeros(1, dtype=torch.bool))
            parts.append(page)
            own.append(torch.ones(size, dtype=torch.bool))
        keys, values, places = zip(*parts, strict=True)
        mapped = self.loaded.map.apply(
            torch.cat(keys, dim=1), torch.cat(values, dim=1), torch.cat(places)
        )
        rows = torch.cat(own)
        return tuple(part[:, rows] for part in mapped)

    def _put_sink(self, k: torch.Tensor, v: torch.Tensor) -> bool:
        """Position 0 draws most of the attention and is never mapped, but looked up."""
        sink = self.loaded.artifact.sink(self.first_token)
        if sink is None:
            return False
        k[:, 0], v[:, 0] = sink
        return True
