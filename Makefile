# Makes .venv on first use; needs Python 3.11 or newer and nothing else.
PYTHON ?= python3

.PHONY: quickstart test slow-test lint

quickstart: .venv/installed
	.venv/bin/python -m vit_jax.main --config=configs/quickstart.py --workdir=runs/quickstart

test: .venv/installed
	.venv/bin/python -m pytest -n 2 --dist worksteal

slow-test: .venv/installed
	.venv/bin/python -m pytest -n 2 --dist worksteal -m slow

lint: .venv/installed
	.venv/bin/ruff check .

.venv/installed: requirements.txt setup.py
	$(PYTHON) -m venv .venv
	.venv/bin/pip install --quiet --disable-pip-version-check -r requirements.txt
	.venv/bin/pip install --quiet --disable-pip-version-check --no-deps -e .
	touch $@
