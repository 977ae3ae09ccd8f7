"""The READMEs have every setting, metric, header and command, and none that is not there."""

import re
from pathlib import Path

import pytest
import typer
import yaml
from pydantic import BaseModel

from deploy import doctor
from mapper.service import metrics as mapper_metrics
from mapper.store import DirectoryStore
from router.cli import app
from router.drift.metrics import DriftMetrics
from router.metrics import Metrics
from router.settings import Drift, Settings

ROOT = Path(__file__).parents[2]
READMES = {
    str(path.relative_to(ROOT)): path.read_text()
    for path in (ROOT / "README.md", *ROOT.glob("[mpr]*/README.md"))
}
ALL = "\n".join(READMES.values())
# A mapping of the reader's own names.
OPEN = {"policy", "policies", "drift.audit_rates"}


def blocks():
    text = READMES["router/README.md"]
    return [yaml.safe_load(found) for found in re.findall(r"```yaml\n(.*?)```", text, re.DOTALL)]


def settings_block():
    return next(block for block in blocks() if "host" in block)


def keys(model: type[BaseModel], before=""):
    for name, field in model.model_fields.items():
        inner = [a for a in (field.annotation, *getattr(field.annotation, "__args__", ()))]
        sections = [a for a in inner if isinstance(a, type) and issubclass(a, BaseModel)]
        if sections:
            yield from keys(sections[0], f"{before}{name}.")
        else:
            yield before + name


def written(value, before=""):
    if before.removesuffix(".") in OPEN:
        value = None
    if isinstance(value, list) and value and isinstance(value[0], dict):
        value = {name: item for one in value for name, item in one.items()}
    if isinstance(value, dict) and value:
        return {key for name, item in value.items() for key in written(item, f"{before}{name}.")}
    return {before.removesuffix(".")}


def test_every_setting_is_described():
    described = {key for block in blocks() for key in written(block)}
    there = set(keys(Settings))
    assert not there - described
    sections = {key.rpartition(".")[0] for key in there} | {"prices.small", "prices.large"}
    assert not described - there - sections


def test_the_defaults_are_as_described():
    block = settings_block()
    needed = {name: block["workers"][0][name] for name in ("name", "tier", "url", "model")}
    assert Settings(**block) == Settings(workers=[needed])
    drift = next(block["drift"] for block in blocks() if "drift" in block)
    assert Drift(**{**drift, "audit_rates": {}}) == Drift()


@pytest.fixture
def metrics(tmp_path):
    gateway = Metrics()
    DriftMetrics(gateway.registry)
    mapper = mapper_metrics.Metrics(DirectoryStore(tmp_path / "pages", 1 << 20))
    families = [*gateway.registry.collect(), *mapper.registry.collect()]
    return {f"{one.name}_total" if one.type == "counter" else one.name for one in families}


def test_every_metric_is_described(metrics):
    described = set(re.findall(r"\bbaton_[a-z0-9_]+", ALL))
    assert metrics - described == set()
    assert described - metrics == set()


def test_every_header_is_described():
    code = "\n".join(path.read_text() for path in (ROOT / "router").rglob("*.py"))
    header = re.compile(r"x-baton-[a-z-]*[a-z]")
    assert set(header.findall(code)) == set(header.findall(ALL))


def options(command, path=()):
    if hasattr(command, "commands"):
        for name, inner in command.commands.items():
            yield from options(inner, (*path, name))
    else:
        yield " ".join(path), {name for one in command.params for name in one.opts}


def test_every_command_is_described_with_options_that_it_has():
    commands = dict(options(typer.main.get_command(app)))
    assert [name for name in commands if not re.search(rf"\b(baton|make) {name}\b", ALL)] == []
    for words, rest in re.findall(r"\bbaton ([a-z]+(?: [a-z]+)?)([^\n`#]*)", ALL):
        name = words if words in commands else words.split()[0]
        if name in commands:
            assert set(re.findall(r"--[a-z][a-z-]*", rest)) <= commands[name], words


def test_one_version_of_sglang():
    named = set(re.findall(r"SGLang\S* (\d+\.\d+\.\d+)|sglang==(\S+?)[\"\n]", ALL + pins()))
    assert {one or other for one, other in named} == {doctor.SGLANG}


def pins():
    files = [ROOT / "pyproject.toml", *(ROOT / "deploy/requirements").glob("*.txt")]
    return "\n".join(file.read_text() for file in files)
