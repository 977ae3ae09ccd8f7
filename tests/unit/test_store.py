"""The page format and the store: what is damaged is a miss, what is full evicts."""

import os
import stat
import time

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mapper.errors import BadPage
from mapper.store import DirectoryStore, PageLayout, Provenance
from mapper.store.page import HEADER_BYTES

LAYOUT = PageLayout("0123456789abcdef", 3, 2, 4, "float32", 8)
KEYS = [f"{index:02x}" * 32 for index in range(64)]


def page(seed: int = 0, layout: PageLayout = LAYOUT) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(layout.shape, generator=generator).to(layout.torch_dtype)


def encoded(layout: PageLayout = LAYOUT, provenance=Provenance.MAPPED) -> bytearray:
    header, payload = layout.encode(page(layout=layout), provenance)
    return bytearray(header) + bytearray(payload)


@pytest.fixture
def store(tmp_path):
    return DirectoryStore(tmp_path / "pages", 20 * LAYOUT.object_bytes)


@given(
    layers=st.integers(1, 4),
    heads=st.integers(1, 4),
    dim=st.integers(1, 8),
    size=st.integers(1, 8),
    tp=st.integers(1, 3),
    dtype=st.sampled_from(["float32", "bfloat16", "float16"]),
    provenance=st.sampled_from(list(Provenance)),
    data=st.data(),
)
def test_round_trip(layers, heads, dim, size, tp, dtype, provenance, data):
    rank = data.draw(st.integers(0, tp - 1))
    layout = PageLayout("f" * 16, layers, heads * tp, dim, dtype, size, rank, tp)
    header, payload = layout.encode(page(layout=layout), provenance)
    assert len(header) == HEADER_BYTES and len(header) + len(payload) == layout.object_bytes
    read, how = layout.decode(memoryview(bytearray(header) + bytearray(payload)))
    assert torch.equal(read, page(layout=layout)) and how is provenance


@given(at=st.integers(0, LAYOUT.object_bytes - 1), bit=st.integers(0, 7))
def test_every_flipped_bit_is_noticed(at, bit):
    content = encoded()
    content[at] ^= 1 << bit
    with pytest.raises(BadPage):
        LAYOUT.decode(memoryview(content))


@given(length=st.integers(0, LAYOUT.object_bytes + 64))
def test_any_other_length_is_truncated(length):
    content = (encoded() + bytes(64))[:length]
    if length == LAYOUT.object_bytes:
        LAYOUT.decode(memoryview(content))
        return
    with pytest.raises(BadPage) as caught:
        LAYOUT.decode(memoryview(content))
    assert caught.value.reason == "truncated"


@pytest.mark.parametrize(
    "other",
    [
        PageLayout("f" * 16, 3, 2, 4, "float32", 8),
        PageLayout("0123456789abcdef", 2, 3, 4, "float32", 8),
        PageLayout("0123456789abcdef", 3, 4, 4, "float32", 8, 1, 2),
        PageLayout("0123456789abcdef", 3, 2, 4, "bfloat16", 8),
    ],
)
def test_a_page_of_another_layout_is_foreign(other):
    with pytest.raises(BadPage) as caught:
        LAYOUT.decode(memoryview(encoded(other)))
    assert caught.value.reason == "foreign"


@pytest.mark.parametrize(
    "bad",
    [
        {"fingerprint": "../../../etc/pass"},
        {"dtype": "float8"},
        {"rank": 2, "tp_size": 2},
        {"kv_heads": 3, "tp_size": 2},
    ],
)
def test_layout_refuses_what_cannot_be(bad):
    fields = {
        "fingerprint": "0" * 16, "layers": 1, "kv_heads": 2, "head_dim": 4,
        "dtype": "float32", "page_size": 8,
    }  # fmt: skip
    with pytest.raises(ValueError):
        PageLayout(**(fields | bad))


def test_directory_is_private(store):
    assert stat.S_IMODE(store.root.stat().st_mode) == 0o700
    store.put(LAYOUT, KEYS[0], page(), Provenance.COMPUTED)
    modes = {stat.S_IMODE(p.stat().st_mode) for p in store.root.rglob("*") if p.is_dir()}
    assert modes == {0o700}


def test_opening_an_existing_directory_closes_it_to_others(tmp_path):
    (tmp_path / "open").mkdir(mode=0o755)
    assert stat.S_IMODE(DirectoryStore(tmp_path / "open", 1).root.stat().st_mode) == 0o700


def test_prefix_ends_at_the_first_gap(store):
    for index in (0, 1, 3):
        store.put(LAYOUT, KEYS[index], page(), Provenance.COMPUTED)
    assert store.prefix(LAYOUT, KEYS[:4]) == 2


def test_an_existing_page_is_kept(store):
    store.put(LAYOUT, KEYS[0], page(1), Provenance.COMPUTED)
    assert store.put(LAYOUT, KEYS[0], page(2), Provenance.MAPPED)
    read, provenance = store.get(LAYOUT, KEYS[0])
    assert torch.equal(read, page(1)) and provenance is Provenance.COMPUTED


@pytest.mark.parametrize("damage", ["flip", "cut", "grow", "empty", "foreign"])
def test_a_damaged_page_is_a_counted_miss_and_is_removed(store, damage):
    store.put(LAYOUT, KEYS[0], page(), Provenance.COMPUTED)
    (file,) = store.root.rglob("*.kv")
    content = bytearray(file.read_bytes())
    if damage == "flip":
        content[-1] ^= 1
    elif damage == "cut":
        content = content[:-5]
    elif damage == "grow":
        content += b"\0"
    elif damage == "empty":
        content = bytearray()
    else:
        content = encoded(PageLayout("f" * 16, 3, 2, 4, "float32", 8))
    file.write_bytes(content)
    assert store.get(LAYOUT, KEYS[0]) is None
    assert sum(count for name, count in store.counters.items() if name.startswith("bad_")) == 1
    assert not file.exists() and store.prefix(LAYOUT, KEYS[:1]) == 0


def test_full_store_evicts_the_least_recently_used(store):
    for index in range(20):
        store.put(LAYOUT, KEYS[index], page(index), Provenance.COMPUTED)
        store.touch(LAYOUT, [KEYS[index]])
        time.sleep(0.002)
    store.touch(LAYOUT, [KEYS[0]])
    for index in range(20, 30):
        assert store.put(LAYOUT, KEYS[index], page(index), Provenance.COMPUTED)
    assert store.usage()[1] <= store.max_bytes
    assert store.get(LAYOUT, KEYS[0]) is not None
    assert store.get(LAYOUT, KEYS[1]) is None
    assert store.counters["evicted"] >= 10


def test_a_chain_loses_its_end_first(store):
    for index in range(20):
        store.put(LAYOUT, KEYS[index], page(index), Provenance.COMPUTED)
    store.touch(LAYOUT, KEYS[:20])
    store.put(LAYOUT, KEYS[40], page(), Provenance.COMPUTED)
    kept = store.prefix(LAYOUT, KEYS[:20])
    assert 0 < kept < 20
    assert not any(store.prefix(LAYOUT, [key]) for key in KEYS[kept:20])


def test_pinned_pages_outlive_pressure_and_pins_lapse(store):
    for index in range(20):
        store.put(LAYOUT, KEYS[index], page(index), Provenance.COMPUTED)
    store.touch(LAYOUT, KEYS[:20], pin_seconds=60)
    assert not store.put(LAYOUT, KEYS[40], page(), Provenance.COMPUTED)
    assert store.counters["full"] == 1
    store.touch(LAYOUT, KEYS[:20])
    assert store.prefix(LAYOUT, KEYS[:20]) == 20, "a plain touch must not end a pin"
    for file in store.root.rglob("*.kv"):
        os.utime(file, (time.time() - 1,) * 2)
    assert store.put(LAYOUT, KEYS[40], page(), Provenance.COMPUTED)


def test_a_mapped_page_stays_readable_after_its_eviction(store):
    store.put(LAYOUT, KEYS[0], page(5), Provenance.COMPUTED)
    read, _ = store.get(LAYOUT, KEYS[0])
    store.remove(LAYOUT, KEYS[0])
    assert torch.equal(read, page(5))


def test_changing_a_read_page_changes_no_file(store):
    store.put(LAYOUT, KEYS[0], page(5), Provenance.COMPUTED)
    store.get(LAYOUT, KEYS[0])[0].zero_()
    assert torch.equal(store.get(LAYOUT, KEYS[0])[0], page(5))


def test_links_share_bytes_and_count_once(store):
    store.put(LAYOUT, KEYS[0], page(5), Provenance.COMPUTED)
    assert store.link(LAYOUT, KEYS[0], KEYS[1]) and store.link(LAYOUT, KEYS[0], KEYS[1])
    assert torch.equal(store.get(LAYOUT, KEYS[1])[0], page(5))
    assert store.usage() == (1, LAYOUT.object_bytes)
    assert not store.link(LAYOUT, KEYS[2], KEYS[3])


def test_a_bad_page_is_a_miss_under_every_key_linked_to_it(store):
    store.put(LAYOUT, KEYS[0], page(5), Provenance.COMPUTED)
    store.link(LAYOUT, KEYS[0], KEYS[1])
    (file, _) = store.root.rglob("*.kv")
    with file.open("r+b") as content:
        content.seek(200)
        content.write(b"\xff\xff")
    assert store.get(LAYOUT, KEYS[0]) is None
    assert store.prefix(LAYOUT, [KEYS[1]]) == 0
    assert store.get(LAYOUT, KEYS[1]) is None
    assert store.put(LAYOUT, KEYS[1], page(6), Provenance.COMPUTED)
    assert torch.equal(store.get(LAYOUT, KEYS[1])[0], page(6))


def test_a_page_larger_than_the_store_is_refused_not_fatal(tmp_path):
    tiny = DirectoryStore(tmp_path, 100)
    assert not tiny.put(LAYOUT, KEYS[0], page(), Provenance.COMPUTED)
    assert tiny.counters["full"] == 1


def test_writers_in_two_processes_keep_the_limit(tmp_path):
    stores = [DirectoryStore(tmp_path, 20 * LAYOUT.object_bytes) for _ in range(2)]
    for index in range(60):
        stores[index % 2].put(LAYOUT, KEYS[index], page(index), Provenance.COMPUTED)
    # Each may write what it was last granted, a tenth of the limit, before it looks again.
    assert stores[0].usage()[1] <= 1.2 * stores[0].max_bytes


def test_announced_models_come_back_latest_last(store):
    store.announce("a" * 16, {"n": 1})
    time.sleep(0.01)
    store.announce("b" * 16, {"n": 2})
    assert [description["n"] for description in store.announced()] == [1, 2]
