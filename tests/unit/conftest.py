"""What unit tests share."""

import pytest


@pytest.fixture(scope="module")
def redis_server():
    """One for a file: its tests leave it running, and do not mind what others have written."""
    from tests.redis_server import RedisServer

    server = RedisServer().start()
    yield server
    server.close()


@pytest.fixture
def trained():
    """A student whose low-rank additions and norms are no longer at their start."""
    # Torch and Transformers are slow to import, and most tests here need neither.
    import torch

    from mapper.demo.student import Student
    from mapper.demo.update import Recipe
    from tests.tiny_demo import REMOVED, tiny

    teacher = tiny()
    student = Student(teacher, Recipe(REMOVED, None).kept(6), rank=3, seed=0)
    generator = torch.Generator().manual_seed(1)
    for value in student.parameters().values():
        value.data += 0.1 * torch.randn(value.shape, generator=generator)
    return teacher, student


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """Two models and text to calibrate them on: `small`, `large`, `talks.jsonl`, `prose.txt`."""
    from tests.tiny_pair import write_pair

    return write_pair(tmp_path_factory.mktemp("pair"))


@pytest.fixture
def short_exam(monkeypatch) -> None:
    """Of a tiny pair ten documents of a kind tell as much as a hundred."""
    monkeypatch.setattr("mapper.calibrate.EXAM_TOKENS", 2000)
