"""Moves pages between SGLang's KV pool and the page store; knows nothing of mapping.

SGLang asks which prefix of a prompt the store can restore (`lookup`), loads it into slots
it allocated (`load`, `start_layer_wise_loading`) and offers every page it computes
(`offload`). The interface is `UnifiedCacheLinker`, SGLang 0.5.23.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from sglang.srt.mem_cache.hicache_storage import PoolName, PoolTransfer
from sglang.srt.mem_cache.unified_cache.unified_cache_linker import (
    LayerWiseLoadCounter,
    UnifiedCacheLinker,
)

from mapper.errors import MapperError, UnsupportedModel
from mapper.spec import ModelSpec
from mapper.store import DirectoryStore, PageLayout, PageStore, Provenance

logger = logging.getLogger(__name__)

# Pages gathered at a time when offloading: bounds the copy made beside the pool.
_OFFLOAD_PAGES = 32


class BatonLinker(UnifiedCacheLinker):
    """Connects one worker rank to the node's page store.

    `extra_config` (from `--unified-cache-external-linker-config`): `store`, the store's
    directory; `max_bytes`, its limit; `spec`, the worker's `ModelSpec`.

    Raises:
        UnsupportedModel: the worker's real KV pool is not what `spec` says.
    """

    def __init__(
        self,
        server_args: Any,
        params: Any,
        *,
        components: Any,
        extra_config: dict[str, Any],
        forward_stream: Any = None,
    ) -> None:
        self.forward_stream = forward_stream
        pool = params.token_to_kv_pool_allocator.get_kvcache()
        spec = ModelSpec.model_validate(extra_config["spec"])
        rank, tp_size = _tensor_parallel(params)
        self.layout = PageLayout.of(spec, rank, tp_size)
        _check_pool(pool, params.page_size, self.layout)
        self.store: PageStore = DirectoryStore(
            Path(extra_config["store"]), int(extra_config["max_bytes"])
        )
        if rank == 0:
            self.store.announce(
                spec.fingerprint, {"spec": spec.model_dump(mode="json"), "tp_size": tp_size}
            )
        self.pools = {PoolName.KV: pool}
        self.layer_done_counter = LayerWiseLoadCounter(self.layout.layers)
        pool.register_layer_transfer_counter(self.layer_done_counter)

        self._queued: dict[str, PoolTransfer] = {}
        self._results: queue.Queue[bool] = queue.Queue()
        self._loads = _Thread("baton-load", self._run_load)
        self._offloads = _Thread("baton-offload", self._run_offload)

    # ---- lookup and load ----

    def lookup(self, rid: str, transfers: list[PoolTransfer]) -> list[int]:
        pages = self.store.prefix(self.layout, _kv(transfers).keys)
        # Pages of full attention have no windows: every shorter prefix is whole too.
        return list(range(1, pages + 1))

    def load(self, rid: str, transfers: list[PoolTransfer]) -> bool:
        self._queued[rid] = _kv(transfers)
        return True

    def cancel_queued_load(self, rid: str) -> bool:
        return self._queued.pop(rid, None) is not None

    def start_layer_wise_loading(self) -> int:
        if not self._queued:
            return -1
        queued, self._queued = self._queued, {}
        index = self.layer_done_counter.update_producer()
        self._loads.submit(index, list(queued.values()))
        return index

    def finish_layer_wise_loading(self, counter_index: int) -> bool:
        return self.layer_done_counter.finish(counter_index)

    def _run_load(self, index: int, transfers: list[PoolTransfer]) -> None:
        try:
            pages: list[torch.Tensor] = []
            for transfer in transfers:
                pages.extend(self._read(list(transfer.keys)))
            slots = torch.cat([transfer.device_indices for transfer in transfers])
            pool = self.pools[PoolName.KV]
            for layer in range(self.layout.layers):
                for kind, buffer in enumerate((pool.k_buffer[layer], pool.v_buffer[layer])):
                    rows = torch.cat([page[layer, kind] for page in pages])
                    buffer[slots] = rows.to(buffer.device)
                self.layer_done_counter.complete(index, layer)
        except Exception as error:
            # SGLang aborts just the requests of this batch; the router retries natively.
            logger.warning("pages could not be loaded: %s", error)
            self.layer_done_counter.fail(index, error)

    def _read(self, keys: list[str]) -> list[torch.Tensor]:
        # All of them, also after a failure: `get` removes what is bad, so that the retry's
        # lookup misses every bad page of this prefix and not only the first.
        found = [self.store.get(self.layout, key) for key in keys]
        missing = sum(page is None for page in found)
        if missing:
            raise MapperError(f"{missing} of {len(keys)} pages were damaged or have gone")
        self.store.touch(self.layout, keys)
        return [page for page, _ in found]

    # ---- offload ----

    def offload(self, transfers: list[PoolTransfer], session_id: str | None = None) -> bool:
        transfer = _kv(transfers)
        self._offloads.submit(
            transfer.device_indices, list(transfer.keys), self.record_offload_ready()
        )
        return True

    def _run_offload(
        self, slots: torch.Tensor, keys: list[str], ready: list[torch.cuda.Event]
    ) -> None:
        stored = False
        try:
            for event in ready:
                event.synchronize()
            stored = self._write(slots, keys)
        except Exception:
            logger.exception("pages could not be stored")
        finally:
            self._results.put(stored)

    def _write(self, slots: torch.Tensor, keys: list[str]) -> bool:
        size = self.layout.page_size
        for first in range(0, len(keys), _OFFLOAD_PAGES):
            chunk = keys[first : first + _OFFLOAD_PAGES]
            rows = slots[first * size : (first + len(chunk)) * size]
            pages = self._gather(rows, len(chunk))
            for key, page in zip(chunk, pages, strict=True):
                if not self.store.put(self.layout, key, page, Provenance.COMPUTED):
                    return False
        self.store.touch(self.layout, keys)
        return True

    def _gather(self, rows: torch.Tensor, pages: int) -> torch.Tensor:
        """The pool's rows as `pages` pages, [pages, layers, K|V, tokens, heads, head_dim]."""
        pool = self.pools[PoolName.KV]
        gathered = torch.empty((pages, *self.layout.shape), dtype=self.layout.torch_dtype)
        for layer in range(self.layout.layers):
            for kind, buffer in enumerate((pool.k_buffer[layer], pool.v_buffer[layer])):
                gathered[:, layer, kind] = buffer[rows].view(pages, *self.layout.shape[2:])
        return gathered

    def num_completed_offloads(self) -> int:
        return self._results.qsize()

    def pop_completed_offload(self) -> bool:
        return self._results.get_nowait()

    # ---- lifecycle ----

    def reset(self) -> None:
        self._queued.clear()
        self._loads.drain()
        self._offloads.drain()
        while not self._results.empty():
            self._results.get_nowait()
        self.layer_done_counter.reset()

    def close(self) -> None:
        self.reset()
        self._loads.stop()
        self._offloads.stop()


class _Thread:
    """One thread that runs submitted calls in order."""

    def __init__(self, name: str, run: Callable[..., None]) -> None:
        self._run = run
        self._calls: queue.Queue[tuple[Any, ...] | None] = queue.Queue()
        self._thread = threading.Thread(target=self._loop, name=name, daemon=True)
        self._thread.start()

    def submit(self, *arguments: Any) -> None:
        self._calls.put(arguments)

    def drain(self) -> None:
        self._calls.join()

    def stop(self) -> None:
        self._calls.put(None)
        self._thread.join()

    def _loop(self) -> None:
        while (arguments := self._calls.get()) is not None:
            try:
                self._run(*arguments)
            finally:
                self._calls.task_done()
        self._calls.task_done()


def _kv(transfers: list[PoolTransfer]) -> PoolTransfer:
    return next(transfer for transfer in transfers if transfer.name == PoolName.KV)


def _tensor_parallel(params: Any) -> tuple[int, int]:
    group = params.attn_tp_cache_group or params.tp_cache_group
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return 0, 1
    return torch.distributed.get_rank(group), torch.distributed.get_world_size(group)


def _check_pool(pool: Any, page_size: int, layout: PageLayout) -> None:
    """The pool must be what the pages claim to be: one K and one V row a token."""
    if page_size != layout.page_size:
        raise UnsupportedModel("page_size", f"worker runs {page_size}, spec {layout.page_size}")
    buffers = getattr(pool, "k_buffer", None)
    if not buffers or not hasattr(pool, "v_buffer"):
        raise UnsupportedModel("kv_pool", f"{type(pool).__name__} does not hold K and V rows")
    found = (len(buffers), *buffers[0].shape[1:], str(buffers[0].dtype).removeprefix("torch."))
    expected = (layout.layers, layout.heads, layout.head_dim, layout.dtype)
    if found != expected:
        raise UnsupportedModel(
            "kv_pool", f"(layers, heads, head_dim, dtype) is {found}, spec says {expected}"
        )
