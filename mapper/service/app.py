"""The mapper's HTTP interface: transfers, pairs, health, metrics."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import structlog
import torch
import uvicorn
from fastapi import FastAPI, Request, Response
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from mapper.errors import MapperError
from mapper.service.log import configure as configure_log
from mapper.service.metrics import Metrics
from mapper.service.pairs import Pairs
from mapper.service.protocol import Pair, TransferRequest, TransferResult
from mapper.service.queue import Queue
from mapper.service.transfer import Transfers
from mapper.store import DirectoryStore

log = structlog.get_logger()


@dataclass(frozen=True)
class MapperConfig:
    """`listen` is `HOST:PORT` or `unix:///path`; `device` is where maps are applied.

    Raises MapperError where one of the two cannot be.
    """

    store: Path
    store_bytes: int
    artifacts: Sequence[Path]
    listen: str = "127.0.0.1:8401"
    device: str = "cpu"

    def __post_init__(self) -> None:
        host, _, port = self.listen.rpartition(":")
        tcp = host != "" and port.isdecimal() and int(port) < 1 << 16
        if not tcp and not self.listen.startswith("unix:///"):
            raise MapperError(f"listen: {self.listen!r} is neither HOST:PORT nor unix:///PATH")
        kind = self.device.partition(":")[0]
        if kind not in ("cpu", "cuda"):
            raise MapperError(f"device: {self.device!r} is neither cpu nor cuda")
        if kind == "cuda" and not torch.cuda.is_available():
            raise MapperError(f"device: there is no {self.device!r} here; `baton doctor` has more")


def create_app(config: MapperConfig) -> FastAPI:
    """The service over one store; artifacts are loaded and verified before it answers."""
    configure_log()
    store = DirectoryStore(config.store, config.store_bytes)
    pairs = Pairs(store, config.artifacts, config.device)
    transfers = Transfers(pairs)
    metrics = Metrics(store)
    queue = Queue(transfers)
    app = FastAPI(title="Baton mapper", version="1", docs_url=None, redoc_url=None)

    @app.post("/v1/transfers")
    async def transfer(request: TransferRequest, http: Request) -> TransferResult:
        if request.background:
            result = await queue.background(request, http.is_disconnected)
        else:
            result = await queue.foreground(request)
        asked = {request.source.model, request.target.model}
        metrics.observe(result, lambda: asked <= pairs.live().keys())
        log.info(
            "transfer",
            pair=result.pair,
            status=result.status,
            reason=result.reason,
            tokens=result.tokens,
            mapped=result.mapped_tokens,
            ms=round(result.ms, 1),
            detail=result.detail,
        )
        return result

    @app.get("/v1/pairs")
    def list_pairs() -> list[Pair]:
        return pairs.list()

    @app.get("/health")
    def health() -> dict:
        return {"status": "ok", "live": sorted(pairs.live()), "refused": pairs.refused}

    @app.get("/metrics")
    def show_metrics() -> Response:
        return Response(generate_latest(metrics.registry), media_type=CONTENT_TYPE_LATEST)

    return app


def run(config: MapperConfig) -> None:
    """Serves until SIGTERM."""
    if config.listen.startswith("unix://"):
        where = {"uds": config.listen.removeprefix("unix://")}
    else:
        host, _, port = config.listen.rpartition(":")
        where = {"host": host, "port": int(port)}
    uvicorn.run(create_app(config), log_level="warning", access_log=False, **where)
