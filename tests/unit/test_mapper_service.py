"""The mapper service over a real store: exact first, mapped once, refused with the field's name."""

from __future__ import annotations

import threading
import time

import pytest
import torch
from fastapi.testclient import TestClient

from mapper.artifact import Artifact, CalibrationRecord, LayerPlan, Manifest
from mapper.keys import Namespace, page_keys
from mapper.methods.base import AffineMap, CacheMap
from mapper.service.app import MapperConfig, create_app
from mapper.service.pairs import Pairs
from mapper.service.protocol import TransferRequest
from mapper.service.transfer import Transfers
from mapper.spec import ModelSpec
from mapper.store import DirectoryStore, PageLayout, Provenance

HEADS, DIM, PAGE = 2, 4, 4
IDS = list(range(10, 50))
TENANT = "tenant"
LOSSY = "lossy:s:1"


def spec(name: str, layers: int, **changes) -> ModelSpec:
    fields = {
        "name": name, "architecture": "llama", "layers": layers, "attention_heads": 4,
        "kv_heads": HEADS, "head_dim": DIM, "hidden_size": 16, "vocab_size": 97,
        "rope": {"rope_type": "default", "rope_theta": 1e4}, "tokenizer_digest": "t",
        "chat_template_digest": "c", "weights_digest": f"w{layers}", "kv_dtype": "float32",
        "page_size": PAGE,
    }  # fmt: skip
    return ModelSpec(**fields | changes)


SMALL, LARGE = spec("small", 2), spec("large", 3)


def make_artifact(folder, source=SMALL, target=LARGE, sinks=(IDS[0],), tail=4):
    generator = torch.Generator().manual_seed(0)

    def layer():
        weight = torch.randn(HEADS, 2 * DIM, DIM, generator=generator)
        return AffineMap((0, 1), weight, torch.randn(HEADS, DIM, generator=generator))

    maps = CacheMap(*([layer() for _ in range(target.layers)] for _ in "kv"))
    plan = [LayerPlan(form="head-local", layers=[0, 1])] * target.layers
    manifest = Manifest(
        source=source, target=target, method="head-local", k=plan, v=plan,
        parameters=maps.parameters, native_tail=tail, sink_token_ids=list(sinks),
        calibration=CalibrationRecord(),
    )  # fmt: skip
    shape = (len(sinks), target.layers, HEADS, DIM)
    Artifact(manifest, maps, (torch.full(shape, 7.0), torch.full(shape, 8.0))).save(folder)
    return folder


REQUEST = {
    "session": "s", "token_ids": IDS, "deadline_ms": 60_000,
    "source": {"model": "small", "cache_salt": TENANT},
    "target": {"model": "large", "extra_key": LOSSY, "cache_salt": TENANT},
}  # fmt: skip


class Node:
    """A store with two announced workers and a mapper."""

    def __init__(self, tmp_path, live=(SMALL, LARGE), limit=1 << 24, **artifact):
        self.store = DirectoryStore(tmp_path / "pages", limit)
        self.live = {one.name: one for one in live}
        for one in live:
            self.store.announce(one.fingerprint, {"spec": one.model_dump(), "tp_size": 1})
        folder = make_artifact(tmp_path / "artifact", **artifact)
        self.client = TestClient(create_app(MapperConfig(self.store.root, limit, [folder])))

    def keys(self, name, extra_key=None, salt=TENANT):
        return page_keys(IDS, self.live[name].page_size, Namespace(extra_key, salt))

    def compute(self, name, pages, extra_key=None, salt=TENANT):
        """What a worker does: stores pages that it computed."""
        layout = PageLayout.of(self.live[name])
        for index in pages:
            page = torch.randn(layout.shape)
            self.store.put(
                layout, self.keys(name, extra_key, salt)[index], page, Provenance.COMPUTED
            )

    def read(self, name, index, extra_key=None):
        return self.store.get(PageLayout.of(self.live[name]), self.keys(name, extra_key)[index])

    def transfer(self, **changes):
        answer = self.client.post("/v1/transfers", json=REQUEST | changes)
        assert answer.status_code == 200, answer.text
        return answer.json()


@pytest.fixture
def node(tmp_path):
    return Node(tmp_path)


def test_maps_whole_pages_and_leaves_the_tail(node):
    node.compute("small", range(10))
    answer = node.transfer()
    assert (answer["status"], answer["reason"]) == ("applied", "mapped")
    assert answer["tokens"] == answer["mapped_tokens"] == (len(IDS) - 4) // PAGE * PAGE
    assert node.read("large", 8, LOSSY)[1] is Provenance.MAPPED
    assert node.read("large", 9, LOSSY) is None
    assert node.read("large", 0) is None, "nothing mapped may stand in the exact namespace"


def test_position_0_is_the_sinks_and_only_it(node):
    node.compute("small", range(10))
    node.transfer()
    page, _ = node.read("large", 0, LOSSY)
    assert (page[:, 0, 0] == 7).all() and (page[:, 1, 0] == 8).all()
    assert not (page[:, 0, 1] == 7).any()


def test_without_a_sink_it_falls_back(tmp_path):
    node = Node(tmp_path, sinks=(1,))
    node.compute("small", range(10))
    answer = node.transfer()
    assert (answer["status"], answer["reason"]) == ("fallback_reprefill", "no_sink")
    assert node.read("large", 0, LOSSY) is None


def test_exact_pages_are_linked_before_anything_is_mapped(node):
    node.compute("small", range(10))
    node.compute("large", range(3))
    answer = node.transfer()
    assert (answer["exact_tokens"], answer["mapped_tokens"]) == (3 * PAGE, 6 * PAGE)
    for index in range(3):
        mine, how = node.read("large", index, LOSSY)
        assert torch.equal(mine, node.read("large", index)[0]) and how is Provenance.COMPUTED


def test_exact_pages_alone_need_no_lineage(node):
    node.compute("large", range(10))
    answer = node.transfer()
    assert (answer["status"], answer["reason"]) == ("applied", "exact")
    assert answer["exact_tokens"] == answer["tokens"] == 40
    assert node.read("large", 0, LOSSY) is None


def test_each_page_is_mapped_once(node):
    node.compute("small", range(10))
    node.transfer()
    first = node.read("large", 2, LOSSY)[0].clone()
    again = node.transfer()
    assert (again["reason"], again["mapped_tokens"]) == ("reused", 0)
    assert again["reused_tokens"] == again["tokens"]
    assert torch.equal(node.read("large", 2, LOSSY)[0], first)


def test_a_mapped_page_is_never_mapped_on(tmp_path):
    node = Node(tmp_path)
    layout = PageLayout.of(SMALL)
    for key in node.keys("small"):
        node.store.put(layout, key, torch.randn(layout.shape), Provenance.MAPPED)
    answer = node.transfer()
    assert (answer["status"], answer["reason"]) == ("fallback_reprefill", "no_source_pages")


def test_a_gap_in_the_source_ends_the_prefix(node):
    node.compute("small", [0, 1, 2, 4, 5])
    answer = node.transfer()
    assert answer["tokens"] == 3 * PAGE


def test_a_bad_source_page_ends_the_prefix_and_is_removed(node):
    node.compute("small", range(10))
    key = node.keys("small")[3]
    (path,) = node.store.root.rglob(f"{key}.*")
    content = bytearray(path.read_bytes())
    content[200] ^= 1
    path.write_bytes(content)
    assert node.transfer()["tokens"] == 3 * PAGE
    assert not path.exists()
    assert 'event="bad_checksum"} 1.0' in node.client.get("/metrics").text


def test_the_source_lineage_is_the_one_named(node):
    node.compute("small", range(10), extra_key="lossy:s:0")
    assert node.transfer()["reason"] == "no_source_pages"
    source = {"model": "small", "extra_key": "lossy:s:0", "cache_salt": TENANT}
    assert node.transfer(source=source)["status"] == "applied"


def test_too_little_is_left_alone(node):
    node.compute("small", range(10))
    node.compute("large", range(7))
    answer = node.transfer(min_mapped_tokens=12)
    assert (answer["status"], answer["reason"]) == ("fallback_reprefill", "too_little")
    assert node.transfer(min_mapped_tokens=8)["status"] == "applied"


def test_a_short_prompt_falls_back(node):
    answer = node.transfer(token_ids=IDS[:5])
    assert (answer["status"], answer["reason"]) == ("fallback_reprefill", "too_short")
    assert node.transfer(token_ids=[])["reason"] == "too_short"


def test_the_last_token_is_never_mapped(node):
    node.compute("small", range(10))
    assert node.transfer(native_tail=0)["tokens"] == 36


def test_a_full_store_falls_back_and_keeps_what_is_pinned(tmp_path):
    small = PageLayout.of(SMALL).object_bytes
    node = Node(tmp_path, limit=10 * small + 10)
    node.compute("small", range(10))
    node.store.touch(PageLayout.of(SMALL), node.keys("small"), pin_seconds=60)
    answer = node.transfer()
    assert (answer["status"], answer["reason"]) == ("fallback_reprefill", "store_full")


def test_past_its_deadline_it_falls_back(node, tmp_path):
    node.compute("small", range(10))
    transfers = Transfers(Pairs(node.store, [tmp_path / "artifact"], "cpu"))
    request = TransferRequest.model_validate(REQUEST)
    late = transfers.run(request, time.monotonic() - 1)
    assert (late.status, late.reason) == ("fallback_reprefill", "deadline")
    assert transfers.run(request, time.monotonic() + 60).status == "applied"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("tokenizer_digest", "other"),
        ("chat_template_digest", "other"),
        ("kv_heads", 4),
        ("head_dim", 8),
        ("rope", {"rope_type": "default", "rope_theta": 5e5}),
        ("kv_dtype", "bfloat16"),
        ("page_size", 8),
        ("weights_digest", "a fine-tune"),
    ],
)
def test_a_pair_the_artifact_was_not_made_for_is_unsupported_by_field(tmp_path, field, value):
    node = Node(tmp_path, live=(SMALL, LARGE.model_copy(update={field: value})))
    answer = node.transfer()
    assert answer["status"] == "unsupported" and answer["reason"] == "mismatch"
    assert answer["field"] == f"target.{field}"
    (up,) = [pair for pair in node.client.get("/v1/pairs").json() if pair["source"] == "small"]
    assert (up["status"], up["field"]) == ("unsupported", f"target.{field}")


def test_an_unknown_model_is_unsupported(node):
    answer = node.transfer(target=REQUEST["target"] | {"model": "gpt-9"})
    assert (answer["status"], answer["field"]) == ("unsupported", "model")


def test_an_altered_artifact_is_refused_and_the_rest_served(tmp_path):
    good = make_artifact(tmp_path / "good")
    bad = make_artifact(tmp_path / "bad")
    content = bytearray((bad / "maps.safetensors").read_bytes())
    content[-1] ^= 1
    (bad / "maps.safetensors").write_bytes(content)
    app = create_app(MapperConfig(tmp_path / "pages", 1 << 24, [bad, good]))
    health = TestClient(app).get("/health").json()
    assert list(health["refused"]) == [str(bad)] and "SHA-256" in health["refused"][str(bad)]


@pytest.mark.parametrize(
    "change",
    [
        {"token_ids": [-1]},
        {"token_ids": ["a"]},
        {"deadline_ms": 0},
        {"source": {"model": "small", "cache_salt": ""}},
        {"source": {"model": "small", "cache_salt": "another"}},
        {"surprise": 1},
    ],
)
def test_malformed_requests_are_refused(node, change):
    assert node.client.post("/v1/transfers", json=REQUEST | change).status_code == 422


def test_an_error_answers_fallback_and_logs_no_tokens(capsys, node, monkeypatch):
    node.compute("small", range(10))
    marked = [424242, *IDS[1:]]

    def fail(*_):
        raise RuntimeError("broken")

    monkeypatch.setattr("mapper.service.transfer._Job.plan", fail)
    answer = node.transfer(token_ids=marked)
    assert (answer["status"], answer["reason"]) == ("fallback_reprefill", "error")
    said = "".join(capsys.readouterr())
    assert "broken" in said and "424242" not in said


def test_metrics_name_no_tenant_session_or_unknown_model(node, monkeypatch):
    node.compute("small", range(10))
    node.transfer()
    unknown = REQUEST["target"] | {"model": "made-up-by-a-client"}
    node.transfer(target=unknown)
    monkeypatch.setattr(Transfers, "run", lambda *args: 1 / 0)
    assert node.transfer(target=unknown)["reason"] == "error"
    text = node.client.get("/metrics").text
    assert 'baton_mapper_transfers_total{pair="small->large"' in text
    assert not any(secret in text for secret in (TENANT, "lossy", "made-up"))


def test_a_background_transfer_maps_as_any_other_and_stops_when_told(node, tmp_path):
    node.compute("small", range(10))
    stop = threading.Event()
    stop.set()
    transfers = Transfers(Pairs(node.store, [tmp_path / "artifact"], "cpu"))
    told = transfers.run(TransferRequest.model_validate(REQUEST), time.monotonic() + 60, stop)
    assert (told.status, told.reason) == ("fallback_reprefill", "yielded")
    answer = node.transfer(background=True)
    assert (answer["status"], answer["mapped_tokens"]) == ("applied", 36)
