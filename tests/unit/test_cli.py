"""The command line teaches, refuses with a reason, and prints what scripts can read."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from router.cli import app

runner = CliRunner()
COMMANDS = (
    "serve", "worker", "mapper", "up", "demo", "doctor", "calibrate", "inspect", "plan", "eval",
    "keys", "config", "outcomes", "tune", "replay", "policy",
)  # fmt: skip


def test_help_lists_every_command():
    text = runner.invoke(app, ["--help"]).output
    assert [command for command in COMMANDS if f" {command} " not in text] == []


@pytest.mark.parametrize("command", COMMANDS)
def test_each_command_explains_itself(command):
    result = runner.invoke(app, [command, "--help"])
    assert result.exit_code == 0 and len(result.output) > 200


def test_a_missing_artifact_is_one_line_and_exit_1(tmp_path):
    result = runner.invoke(app, ["inspect", str(tmp_path / "none")])
    assert result.exit_code == 1
    assert result.output.startswith("baton: ") and "Traceback" not in result.output


@pytest.mark.parametrize(
    ("option", "value", "allowed"),
    [
        ("--listen", "8401", "HOST:PORT"),
        ("--listen", "localhost:http", "unix:///"),
        ("--device", "tpu", "cuda"),
    ],
)
def test_a_bad_option_of_the_mapper_is_one_line(tmp_path, option, value, allowed):
    result = runner.invoke(app, ["mapper", "--store", str(tmp_path), option, value])
    assert result.exit_code == 1
    assert len(result.output.splitlines()) == 1
    assert value in result.output and allowed in result.output


def test_a_bad_configuration_names_file_and_key(tmp_path):
    file = tmp_path / "gateway.yaml"
    file.write_text("workers: []\nprot: 1\n")
    result = runner.invoke(app, ["config", "check", str(file)])
    assert result.exit_code == 2
    assert str(file) in result.output and "prot" in result.output


def test_keys_are_made_listed_and_revoked(tmp_path):
    file = str(tmp_path / "keys.yaml")
    key = runner.invoke(app, ["keys", "create", "acme", "--file", file]).output.strip()
    listed = runner.invoke(app, ["keys", "list", "--file", file]).output
    assert "acme" in listed and key.split("-", 2)[2] not in listed
    key_id = next(word for word in listed.split() if len(word) == 12 and word.isalnum())
    assert runner.invoke(app, ["keys", "revoke", key_id, "--file", file]).exit_code == 0
    assert runner.invoke(app, ["keys", "revoke", key_id, "--file", file]).exit_code == 1


def test_doctor_names_folders_and_remedies():
    result = runner.invoke(app, ["doctor", "--json"])
    report = json.loads(result.output)
    assert set(report["models"]) == {"small", "large"}
    assert set(report["artifacts"]) == {"small-large", "large-small"}
    assert all(check["ok"] or check["remedy"] for check in report["checks"])
    assert result.exit_code == (0 if report["ok"] else 1)


def test_an_unknown_preset_lists_those_there_are():
    result = runner.invoke(app, ["plan", "gpt"])
    assert result.exit_code == 1 and "qwen3-14b-32b" in result.output
