"""SIGTERM: readiness first, open streams finish, exit status 0; and starts that must fail."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx
import pytest
import yaml

from router.metrics import MULTIPROC_DIR
from tests.fakes.faults import Fault
from tests.fakes.server import Threaded
from tests.fakes.worker import FakeWorker
from tests.stack import events, eventually, user

SERVE = "import sys; from router import serve, settings; sys.exit(serve.run(settings.load(sys.argv[1])))"
BODY = {"model": "small", "messages": [user()], "stream": True}


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return probe.getsockname()[1]


class Process:
    def __init__(self, tmp_path, workers, **settings):
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        config = tmp_path / "baton.yaml"
        config.write_text(
            yaml.safe_dump(
                {
                    "port": self.port,
                    "workers": [
                        {"name": f"w{n}", "tier": "small", "url": url, "model": "small-model"}
                        for n, url in enumerate(workers)
                    ],
                    "pool": {"health_seconds": 0.2},
                    "policy": {"kind": "pinned", "tier": "small"},
                    **settings,
                }
            )
        )
        self.process = subprocess.Popen(
            [sys.executable, "-c", SERVE, str(config)], stderr=subprocess.PIPE, text=True
        )
        self.log = []
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self):
        for line in self.process.stderr:
            self.log.append(line)

    def ready(self):
        try:
            return httpx.get(f"{self.url}/ready").json()
        except httpx.HTTPError:
            return None

    def wait_ready(self):
        eventually(lambda: (self.ready() or {}).get("status") in ("ready", "degraded"), 60)
        return self

    def term(self):
        self.process.send_signal(signal.SIGTERM)


@pytest.fixture
def worker():
    worker = FakeWorker("small-model")
    server = Threaded(worker.app()).start()
    worker.url = server.url
    yield worker
    server.stop()


@pytest.fixture
def start(tmp_path):
    made = []

    def start(workers, **settings):
        made.append(Process(tmp_path, workers, **settings))
        return made[-1]

    yield start
    for process in made:
        process.process.kill()
        process.process.wait()


def streaming(process):
    """A stream that has begun, and what will have come of it."""
    result = {}

    def read():
        try:
            url = f"{process.url}/v1/chat/completions"
            result["body"] = httpx.post(url, json=BODY, timeout=60).content
        except httpx.HTTPError as error:
            result["error"] = error

    thread = threading.Thread(target=read)
    thread.start()
    return thread, result


def test_open_streams_finish_and_nothing_new_begins(start, worker):
    timeouts = {"drain_delay_seconds": 1.0, "drain_seconds": 20}
    process = start([worker.url], timeouts=timeouts).wait_ready()
    worker.faults.append(Fault("stall", after=3, seconds=3.0))
    thread, result = streaming(process)
    eventually(lambda: worker.active)
    process.term()
    # Readiness goes first, while the listener is still open.
    eventually(lambda: (process.ready() or {}).get("status") == "draining")
    assert httpx.get(f"{process.url}/ready").status_code == 503

    def closed():
        try:
            httpx.get(f"{process.url}/health")
        except httpx.ConnectError:
            return True

    eventually(closed)
    assert thread.is_alive()
    thread.join(30)
    assert result["body"].endswith(b"data: [DONE]\n\n")
    assert process.process.wait(20) == 0


def test_streams_that_outlast_the_drain_end_with_an_error(start, worker):
    timeouts = {"drain_delay_seconds": 0.0, "drain_seconds": 1.0}
    process = start([worker.url], timeouts=timeouts).wait_ready()
    worker.faults.append(Fault("stall", after=3, seconds=60.0))
    thread, result = streaming(process)
    eventually(lambda: worker.active)
    process.term()
    thread.join(30)
    assert b"shutting down" in events(result["body"])[-1]
    assert process.process.wait(20) == 0
    eventually(lambda: worker.seen[0].aborted)


def test_idle_gateway_stops_at_once_with_0(start, worker):
    process = start([worker.url], timeouts={"drain_delay_seconds": 0.0}).wait_ready()
    process.term()
    assert process.process.wait(20) == 0


def test_a_log_that_cannot_be_written_costs_no_request_and_no_drain(tmp_path, worker):
    config = {
        "port": free_port(),
        "workers": [{"name": "w", "tier": "small", "url": worker.url, "model": "small-model"}],
        "timeouts": {"drain_delay_seconds": 0.0},
    }
    path = tmp_path / "baton.yaml"
    path.write_text(yaml.safe_dump(config))
    url = f"http://127.0.0.1:{config['port']}"
    # Every write to this device fails for want of space.
    with open("/dev/full", "w") as full:
        process = subprocess.Popen([sys.executable, "-c", SERVE, str(path)], stderr=full)

    def up():
        try:
            return httpx.get(f"{url}/health").status_code == 200
        except httpx.HTTPError:
            return False

    try:
        eventually(up, 60)
        assert httpx.post(f"{url}/v1/chat/completions", json=BODY).content.endswith(b"[DONE]\n\n")
        process.terminate()
        assert process.wait(20) == 0
    finally:
        process.kill()
        process.wait()


def test_start_without_workers_is_unready_and_says_so(start):
    process = start(["http://127.0.0.1:9"])
    eventually(lambda: (process.ready() or {}).get("status") == "unavailable", 60)
    assert process.ready()["missing"] == ["small tier"]
    assert httpx.get(f"{process.url}/health").status_code == 200


def test_memory_store_is_said_aloud(start, worker):
    process = start([worker.url]).wait_ready()
    assert any("session_state_in_memory" in line for line in process.log)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"host": "0.0.0.0"}, ["host", "keys_file"]),
        ({"prot": 1}, ["prot", "port"]),
        ({"policy": {"kind": "nosuch"}}, ["kind", "pinned", "turns"]),
        ({"processes": 2}, ["redis_url"]),
        ({"limits": {"body_bytes": "many"}}, ["limits.body_bytes"]),
    ],
)
def test_bad_config_does_not_start(start, worker, settings, words):
    process = start([worker.url], **settings)
    assert process.process.wait(60) != 0
    eventually(lambda: "ConfigError" in "".join(process.log))
    text = "".join(process.log)
    assert "baton.yaml" in text
    assert all(word in text for word in words)


@pytest.mark.parametrize("content", [None, "keys: [", "keys: [{tenant: x}]"])
def test_a_bad_key_file_does_not_start(start, worker, tmp_path, content):
    if content is not None:
        (tmp_path / "keys.yaml").write_text(content)
    process = start([worker.url], auth={"keys_file": "keys.yaml"})
    assert process.process.wait(60) == 2
    eventually(lambda: "keys.yaml" in "".join(process.log))


@pytest.mark.parametrize("processes", [1, 2])
def test_a_port_in_use_does_not_start(start, worker, processes):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        process = start(
            [worker.url], port=port, processes=processes, redis_url="redis://127.0.0.1:1/0"
        )
        assert process.process.wait(60) != 0
    eventually(lambda: "address already in use" in "".join(process.log).lower())
    assert "Traceback" not in "".join(process.log) and str(port) in "".join(process.log)


def test_several_processes_share_metrics_and_sessions(start, worker, redis_server):
    process = start([worker.url], processes=2, redis_url=redis_server.url).wait_ready()
    pids = set()
    messages = []
    for number in range(12):
        messages.append(user(f"turn {number}"))
        body = {"model": "auto", "messages": messages}
        # A new connection each time, so that both processes get some.
        response = httpx.post(f"{process.url}/v1/chat/completions", json=body, timeout=30)
        answer = response.json()["choices"][0]["message"]["content"]
        messages.append({"role": "assistant", "content": answer})
        pids.add(response.headers["x-baton-session"])
    assert len(pids) == 1
    for _ in range(6):
        text = httpx.get(f"{process.url}/metrics").text
        line = next(
            line
            for line in text.splitlines()
            if line.startswith('baton_requests_total{route="/v1/chat/completions"')
        )
        assert line.endswith(" 12.0")
    process.term()
    assert process.process.wait(30) == 0


def test_a_killed_process_is_replaced(start, worker, redis_server):
    process = start([worker.url], processes=2, redis_url=redis_server.url).wait_ready()
    children = eventually(lambda: len(c := _children(process.process.pid)) >= 2 and c, 30)
    gauges = f"gauge_live*_{children[0]}.db"
    folder = _metrics_folder(children[0])
    eventually(lambda: list(folder.glob(gauges)), 30)
    time.sleep(3.5)
    os.kill(children[0], signal.SIGKILL)
    eventually(lambda: any("process_ended" in line for line in process.log), 20)
    eventually(lambda: len(_children(process.process.pid)) >= len(children), 30)
    assert not list(folder.glob(gauges))
    process.wait_ready()
    process.term()
    assert process.process.wait(30) == 0


def test_processes_do_not_outlive_a_killed_parent(start, worker, redis_server):
    timeouts = {"drain_delay_seconds": 0.0}
    process = start(
        [worker.url], processes=2, redis_url=redis_server.url, timeouts=timeouts
    ).wait_ready()
    children = _children(process.process.pid)
    process.process.kill()
    eventually(lambda: not any(os.path.exists(f"/proc/{child}/cmdline") for child in children), 30)


def _metrics_folder(pid):
    entries = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    name = MULTIPROC_DIR.encode() + b"="
    return Path(next(e.removeprefix(name) for e in entries if e.startswith(name)).decode())


def _children(pid):
    """Gateway processes below this one; Python's own resource tracker is not one."""
    found = []
    with open(f"/proc/{pid}/task/{pid}/children") as file:
        for child in map(int, file.read().split()):
            with open(f"/proc/{child}/cmdline", "rb") as command:
                if b"spawn_main" in command.read():
                    found.append(child)
    return found
