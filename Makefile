.PHONY: help venv venv-eval demo test test-slow test-oldest check format build clean
.DEFAULT_GOAL := help

PYTHON := .venv/bin/python
OLDEST := 5.19.0

help:  ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## /\1	/p' $(MAKEFILE_LIST) | expand -t 14

venv: .venv/.stamp  ## make .venv with everything in it

# The second way to a venv is for a Python that has pip but no ensurepip, as on Debian without python3-venv.
.venv/.stamp: pyproject.toml scripts/install_torch.sh
	@for py in python3.11 python3; do \
	    $$py -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && break || py=; \
	done; \
	[ -n "$$py" ] || { echo "momentkv needs Python 3.11 or newer: neither python3.11 nor python3 is" >&2; exit 1; }; \
	[ -x $(PYTHON) ] && $(PYTHON) -m pip --version >/dev/null 2>&1 || $$py -m venv --clear .venv 2>/dev/null || \
	    { $$py -m venv --clear --without-pip .venv && $$py -m pip --python $(PYTHON) install -q pip; }
	@echo "installing into .venv, a minute or two"
	bash scripts/install_torch.sh $(PYTHON)
	$(PYTHON) -m pip install -q -e ".[demo,dev]"
	@touch $@

venv-eval: .venv/.stamp-eval  ## the same, and what momentkv eval and its tests need

.venv/.stamp-eval: .venv/.stamp
	@echo "installing the evaluation extras, a minute or two"
	$(PYTHON) -m pip install -q -e ".[eval,ray]"
	@touch $@

demo: venv  ## run the demo; ARGS="..." adds options
	.venv/bin/momentkv demo $(ARGS)

test: venv-eval  ## run the tests; ARGS="..." goes to pytest
	$(PYTHON) -m momentkv.hf.models
	$(PYTHON) -m pytest -n 2 $(ARGS)

test-slow: venv-eval  ## run the quality tests on real models
	$(PYTHON) -m momentkv.hf.models
	$(PYTHON) -m pytest -m slow $(ARGS)

test-oldest: venv .oldest/.$(OLDEST)  ## run the transformers tests on the oldest version supported
	$(PYTHON) -m momentkv.hf.models
	PYTHONPATH=.oldest $(PYTHON) -m pytest -n 2 tests/test_hf*.py $(ARGS)

# Only transformers itself is older, so no second torch is needed.
.oldest/.$(OLDEST): | venv
	rm -rf .oldest
	$(PYTHON) -m pip install -q --no-deps --target .oldest transformers==$(OLDEST)
	@touch $@

check: venv  ## lint, formatting, types
	.venv/bin/ruff check
	.venv/bin/ruff format --check
	.venv/bin/mypy src

format: venv  ## format the code and fix what lint can fix
	.venv/bin/ruff check --fix
	.venv/bin/ruff format

build: venv  ## build the wheel into dist/
	$(PYTHON) -m build --wheel

clean:  ## remove what the other targets made, but not the models
	rm -rf .venv .oldest build dist src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
