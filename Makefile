# Everything below sets itself up: a virtual environment in .venv, pinned by constraints.txt.
PYTHON ?= python3
VENV := .venv
RESHARD := $(VENV)/bin/reshard
SOURCE := fixtures/dcp/fsdp2
OUT := demo-output

.PHONY: demo test check docs clean

# The main job on a bundled checkpoint that real FSDP2 wrote on 4 ranks.
demo: $(VENV)/installed
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

test: $(VENV)/installed
	$(VENV)/bin/python -m pytest

check: $(VENV)/checked
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

# The site, in docs/_build: a broken link or a page that nothing leads to fails.
docs: .venv-docs/installed
	.venv-docs/bin/sphinx-build --quiet --fail-on-warning --keep-going --nitpicky docs docs/_build

.venv-docs/installed: docs/requirements.txt
	$(PYTHON) -m venv .venv-docs
	.venv-docs/bin/pip install --quiet --disable-pip-version-check -r docs/requirements.txt
	@touch $@

$(VENV)/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[test]'
	@touch $@

$(VENV)/checked: $(VENV)/installed
	$(VENV)/bin/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[check]'
	@touch $@

clean:
	rm -rf $(VENV) .venv-* build dist *.egg-info $(OUT) .pytest_cache .mypy_cache .ruff_cache .hypothesis
