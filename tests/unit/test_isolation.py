"""200 sessions of three tenants with one system prompt, exact and lossy mixed, over one store.

Every page gets a content of its own, and it is written down whose it is. Then every session asks
for everything, with its own names and with those of the others.
"""

from __future__ import annotations

import hashlib
import random
import time
from collections import defaultdict
from dataclasses import dataclass, field

import pytest
import torch

from mapper.keys import Namespace, page_keys
from mapper.service.pairs import Pairs
from mapper.service.protocol import TransferRequest
from mapper.service.transfer import Transfers
from mapper.store import DirectoryStore, PageLayout, Provenance
from tests.unit.test_mapper_service import IDS, LARGE, PAGE, SMALL, make_artifact

TENANTS = ("one", "two", "three")
SYSTEM = [*IDS[:1], *range(100, 111)]
LIVE = {"small": SMALL, "large": LARGE}


@dataclass
class Session:
    name: str
    tenant: str
    ids: list[int]
    # Per model the lossy lineage it runs on; None is exact.
    lineage: dict[str, str | None] = field(default_factory=dict)


class Node:
    """A store, a mapper, and what two workers do to the store."""

    def __init__(self, folder):
        self.store = DirectoryStore(folder / "pages", 1 << 30)
        for one in LIVE.values():
            self.store.announce(one.fingerprint, {"spec": one.model_dump(), "tp_size": 1})
        artifacts = [
            make_artifact(folder / "up"),
            make_artifact(folder / "down", source=LARGE, target=SMALL),
        ]
        self.transfers = Transfers(Pairs(self.store, artifacts, "cpu"))
        # By a page's bytes: the tenants that computed it exactly, the sessions that hold it lossy.
        self.exact = defaultdict(set)
        self.lossy = defaultdict(set)
        self.generator = torch.Generator().manual_seed(0)

    def pages(self, model, ids, namespace):
        """What a worker's lookup restores: digests, and whether mapped, of the longest prefix."""
        layout, found = PageLayout.of(LIVE[model]), []
        for key in page_keys(ids, PAGE, namespace):
            page = self.store.get(layout, key)
            if page is None:
                break
            digest = hashlib.sha256(page[0].contiguous().numpy().tobytes()).hexdigest()
            found.append((digest, page[1] is Provenance.MAPPED))
        return found

    def turn(self, session, model):
        """The worker restores what there is, and computes and stores the rest."""
        layout = PageLayout.of(LIVE[model])
        namespace = Namespace(session.lineage.get(model), session.tenant)
        keys = page_keys(session.ids, PAGE, namespace)
        for key in keys[self.store.prefix(layout, keys) :]:
            page = torch.randn(layout.shape, generator=self.generator)
            self.store.put(layout, key, page, Provenance.COMPUTED)
            digest = hashlib.sha256(page.contiguous().numpy().tobytes()).hexdigest()
            if namespace.extra_key is None:
                self.exact[digest].add(session.tenant)
            else:
                self.lossy[digest].add(session.name)

    def switch(self, session, source, target, number):
        lineage = session.lineage.get(target) or f"lossy:{session.name}:{number}-x"
        sides = {
            side: {"model": model, "extra_key": key, "cache_salt": session.tenant}
            for side, model, key in (
                ("source", source, session.lineage.get(source)),
                ("target", target, lineage),
            )
        }
        request = {"session": session.name, "token_ids": session.ids, "deadline_ms": 60_000}
        wanted = TransferRequest.model_validate(request | sides)
        result = self.transfers.run(wanted, time.monotonic() + 60)
        if result.mapped_tokens or result.reused_tokens:
            session.lineage[target] = lineage
            for digest, mapped in self.pages(
                target, session.ids, Namespace(lineage, session.tenant)
            ):
                if mapped:
                    self.lossy[digest].add(session.name)
        else:
            session.lineage[target] = None
        return result

    def may_have(self, session, digest):
        return session.tenant in self.exact[digest] or session.name in self.lossy[digest]


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    node = Node(tmp_path_factory.mktemp("isolation"))
    chance = random.Random(3)
    sessions, switched = [], 0
    for number in range(200):
        tenant = TENANTS[number % 3]
        # Half of the conversations say word for word what others say as well.
        subject = number % 7 if chance.random() < 0.5 else 1000 + number
        ids = [*SYSTEM, *(subject * 50 + i for i in range(chance.randint(12, 28)))]
        sessions.append(Session(f"session-{number}", tenant, ids))
    for turn in range(3):
        for session in chance.sample(sessions, len(sessions)):
            source, target = ("small", "large") if turn % 2 == 0 else ("large", "small")
            node.turn(session, source)
            kind = chance.random()
            if kind < 0.6:
                result = node.switch(session, source, target, turn + 1)
                switched += result.mapped_tokens > 0
            elif kind < 0.8:
                # Re-anchored, or prefilled natively.
                session.lineage[target] = None
            session.ids = [*session.ids, *(chance.randrange(9999) for _ in range(9))]
            node.turn(session, target)
    assert switched > 100
    return node, sessions


def test_an_exact_lookup_never_finds_lossy_pages(world):
    node, sessions = world
    looked = 0
    for session in sessions:
        for model in LIVE:
            for digest, mapped in node.pages(model, session.ids, Namespace(None, session.tenant)):
                looked += 1
                assert not mapped
                assert session.tenant in node.exact[digest]
                assert not node.lossy[digest]
    assert looked > 1000


def test_a_session_finds_its_tenants_exact_pages_and_its_own_lossy_ones(world):
    node, sessions = world
    lossy = 0
    for session in sessions:
        for model in LIVE:
            namespace = Namespace(session.lineage.get(model), session.tenant)
            for digest, _ in node.pages(model, session.ids, namespace):
                assert node.may_have(session, digest)
                lossy += session.name in node.lossy[digest]
    assert lossy > 500


def test_nobody_finds_anything_by_another_ones_names(world):
    """With its own tokens and the other's: guessed lineages, guessed tenants, both."""
    node, sessions = world
    chance = random.Random(5)
    for session in sessions:
        for other in chance.sample(sessions, 8):
            if other is session:
                continue
            for model in LIVE:
                lineage = other.lineage.get(model)
                if lineage is None:
                    continue
                # The gateway sets the tenant, so that a guess reaches no further than this.
                for ids in (session.ids, other.ids):
                    found = node.pages(model, ids, Namespace(lineage, session.tenant))
                    if session.tenant != other.tenant:
                        assert not found
                assert not node.pages(model, other.ids, Namespace(lineage, None))
