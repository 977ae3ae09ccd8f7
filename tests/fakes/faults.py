"""What goes wrong with a request to the fake worker."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass

from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse

LOAD_FAILED = "External KV cache load failed"


@dataclass
class Fault:
    """What goes wrong with one request. `kind` is one of the names in `failure` and in FakeWorker."""

    kind: str
    status: int = 500
    after: int = 2
    seconds: float = 30.0
    text: str = ""


def random_fault(rate: float) -> Fault | None:
    """With the chance `rate` one of the faults that a load test asks for."""
    if random.random() >= rate:
        return None
    return random.choice(
        [
            Fault("status", status=500),
            Fault("status", status=503),
            Fault("status", status=429),
            Fault("die"),
            Fault("garbage"),
            Fault("error_first"),
            Fault("silent_end"),
            Fault("stall", seconds=9.0),
        ]
    )


def failure(fault: Fault, streamed: bool) -> Response | None:
    """The answer of a request that fails before its first token; None for the later faults."""
    if fault.kind == "status":
        text = fault.text or "scripted failure"
        headers = {"retry-after": "7"} if fault.status == 429 else {}
        return JSONResponse(
            {
                "object": "error",
                "message": text,
                "type": "BadRequest",
                "param": None,
                "code": fault.status,
            },
            fault.status,
            headers=headers,
        )
    if fault.kind == "garbage":
        return PlainTextResponse("<html>it works</html>")
    if fault.kind == "garbage_stream":
        return StreamingResponse(iter([b"data: {not json\n\n"]), media_type="text/event-stream")
    if fault.kind == "empty":
        return StreamingResponse(iter([b""]), media_type="text/event-stream")
    if fault.kind in ("error_first", "load_failed"):
        text = LOAD_FAILED if fault.kind == "load_failed" else "scripted failure"
        if streamed:
            events = iter([error_event(text, 503), b"data: [DONE]\n\n"])
            return StreamingResponse(events, media_type="text/event-stream")
        return JSONResponse({"object": "error", "message": text, "code": 503}, 503)
    return None


def error_event(message: str, code: int) -> bytes:
    error = {"object": "error", "message": message, "type": "Error", "param": None, "code": code}
    return f"data: {json.dumps({'error': error})}\n\n".encode()
