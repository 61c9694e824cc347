# Makes .venv on first use; needs Python 3.11 or newer and nothing else.
PYTHON ?= python3

.PHONY: quickstart test slow-test nightly-test test-newest campaign lint docs

quickstart: .venv/installed
	.venv/bin/python -m vit_jax.main --config=configs/quickstart.py --workdir=runs/quickstart

test: .venv/interop
	.venv/bin/python -m pytest -n 2 --dist worksteal

# Many of these wait for processes or time limits: four workers keep two cores busy.
slow-test: .venv/interop
	.venv/bin/python -m pytest -n 4 --dist worksteal -m 'slow and not nightly'

nightly-test: .venv/interop
	.venv/bin/python -m pytest -n 2 --dist worksteal -m nightly

# The newest JAX on a newer Python, in .venv-newest, where the machine has one.
test-newest:
	.ci/test-newest

# What computes models in browsers; needs npm. Without it the tests of such pages are skipped.
.venv/onnxruntime-web: .venv/installed
	.venv/bin/python -c 'from vit_jax.web import runtime; runtime.read()'
	touch $@

# Damages files and kills runs in thousands of ways: docs/explanation/fault-campaign.md.
campaign: .venv/interop
	.venv/bin/python -m tests.campaign --minutes=$(or $(MINUTES),30) --seed=$(or $(SEED),0)

lint: .venv/installed
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy vit_jax

# Builds the documentation in site/. A broken link or a missing page is an error.
docs: .venv-docs/installed
	.venv-docs/bin/mkdocs build --strict

.venv/installed: requirements.txt setup.py
	$(PYTHON) -m venv .venv
	.venv/bin/pip install --quiet --disable-pip-version-check -r requirements.txt
	.venv/bin/pip install --quiet --disable-pip-version-check --no-deps -e .
	touch $@

.venv-docs/installed: requirements-docs.txt
	$(PYTHON) -m venv .venv-docs
	.venv-docs/bin/pip install --quiet --disable-pip-version-check -r requirements-docs.txt
	touch $@

# The tests compare with PyTorch's models; nothing else needs it. torch comes first, with all that
# its build for this machine needs; then the list as it stands.
.venv/interop: .venv/installed requirements-interop.txt
	.venv/bin/pip install --quiet --disable-pip-version-check \
		-c requirements.txt -c requirements-interop.txt torch
	.venv/bin/pip install --quiet --disable-pip-version-check --no-deps -r requirements-interop.txt
	touch $@
