# Every target sets itself up: a virtual environment in .venv, pinned by constraints.txt. `make` lists the targets.
PYTHON ?= python3
VENV := .venv
RESHARD := $(VENV)/bin/reshard
PIP_INSTALL := -m pip install --quiet --disable-pip-version-check -c constraints.txt
SOURCE := fixtures/dcp/fsdp2
OUT := demo-output

.PHONY: help install demo test check docs release clean

help: ## List the targets (default).
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-9s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

install: $(VENV)/installed ## Install reshard from this tree into .venv, with what the tests need.

demo: $(VENV)/installed ## Convert a bundled FSDP2 checkpoint of 4 ranks for vLLM on 2, and verify it.
	@rm -rf $(OUT)
	$(RESHARD) inspect $(SOURCE)/checkpoint --model $(SOURCE)/model
	@echo
	$(RESHARD) convert $(SOURCE)/checkpoint $(OUT) --to vllm --tp 2 --model $(SOURCE)/model --dry-run
	@echo
	$(RESHARD) convert $(SOURCE)/checkpoint $(OUT) --to vllm --tp 2 --model $(SOURCE)/model --progress
	@echo
	ls -l $(OUT)
	@echo
	$(RESHARD) verify $(SOURCE)/checkpoint $(OUT)
	$(RESHARD) roundtrip $(SOURCE)/checkpoint --to vllm --tp 2 --model $(SOURCE)/model
	@echo
	$(RESHARD) fingerprint $(SOURCE)/checkpoint --model $(SOURCE)/model
	$(RESHARD) fingerprint $(OUT)

test: $(VENV)/installed ## Run the tests that need no framework except torch.
	$(VENV)/bin/python -m pytest

check: $(VENV)/checked ## Check style and types.
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

docs: .venv-docs/installed ## Build the site in docs/_build; a broken link or an orphaned page fails.
	.venv-docs/bin/sphinx-build --quiet --fail-on-warning --keep-going --nitpicky docs docs/_build

release: .venv-release/installed ## Make the wheel, the source distribution, the SBOM and the checksums in dist/.
	rm -rf dist reshard.egg-info
	.venv-release/bin/python .ci/release.py dist

clean: ## Remove everything that the other targets make.
	rm -rf $(VENV) .venv-* build dist docs/_build *.egg-info $(OUT) .pytest_cache .mypy_cache .dmypy.json .ruff_cache .hypothesis
	find reshard formats cli plugins tests -name __pycache__ -prune -exec rm -rf {} +

# compileall also writes .pyc files where PYTHONDONTWRITEBYTECODE is set, and so commands start faster there. (pip does it for a wheel.)
$(VENV)/installed: pyproject.toml setup.py constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python $(PIP_INSTALL) -e '.[test]'
	$(VENV)/bin/python -m compileall -q reshard formats cli plugins
	@touch $@

$(VENV)/checked: $(VENV)/installed
	$(VENV)/bin/python $(PIP_INSTALL) -e '.[check]'
	@touch $@

.venv-release/installed: .ci/release-requirements.txt constraints.txt
	$(PYTHON) -m venv .venv-release
	.venv-release/bin/python $(PIP_INSTALL) -r .ci/release-requirements.txt
	@touch $@

.venv-docs/installed: docs/requirements.txt
	$(PYTHON) -m venv .venv-docs
	.venv-docs/bin/python -m pip install --quiet --disable-pip-version-check -r docs/requirements.txt
	@touch $@
