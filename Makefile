# Each target makes or reuses .venv by itself; `make help` lists them.
.DEFAULT_GOAL := help
.PHONY: help setup demo up test test-fast lint doctor
baton := .venv/bin/baton

help: ## this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 12

setup: ## .venv with pinned versions, and the system packages
	@deploy/setup.sh

demo: setup ## a conversation that changes model, with and without its KV cache
	@$(baton) demo

up: setup ## the demo stack, left running for you to talk to
	@$(baton) up

doctor: setup ## what works on this machine, and what to do about the rest
	@$(baton) doctor

test: setup ## all tests, with two real SGLang workers and a real Redis
	@.venv/bin/python -m pytest

test-fast: setup ## the tests that need no worker
	@.venv/bin/python -m pytest -m "not e2e"

lint: setup ## style and unused code
	@.venv/bin/ruff check . && .venv/bin/ruff format --check .
