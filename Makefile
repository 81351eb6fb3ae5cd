# Every target sets itself up: a virtual environment in .venv, pinned by constraints.txt, each file by its digest in requirements/. `make` lists
# the targets.
PYTHON ?= python3
VENV := .venv
RESHARD := $(VENV)/bin/reshard
PIP_INSTALL := -m pip install --quiet --disable-pip-version-check
# For every Python and platform. torch is installed by its version alone (requirements/README.md), so its dependencies are named here.
LOCK := .venv-lock/bin/uv pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-header --no-annotate -c constraints.txt
WITHOUT_TORCH := torch; python_version < "3"
OF_TORCH := filelock fsspec jinja2 networkx sympy setuptools
SOURCE := fixtures/dcp/fsdp2
OUT := demo-output
# Each worker of pytest would compile all tests again.
export PYTHONDONTWRITEBYTECODE :=
# The rooms of the main way, without what takes longer than it tells every day: kills, published models, every degree.
ROOMS := house geometry storage containers index models canonical plans adapter engine opening measures training
LONGER := engine/test_resume engine/test_combining engine/test_computed_values engine/test_source_checks models/test_published_configs \
  models/test_known_models models/test_declarations containers/test_pickle_objects containers/test_inert_pickle canonical/test_trainer_names \
  canonical/test_tensor_classes canonical/test_unknown_weights
QUICKLY := $(ROOMS:%=tests/%) $(LONGER:%=--ignore tests/%.py)

.PHONY: help install demo quick test check docs release lock clean

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

quick: $(VENV)/installed ## Run the laws, the house, a conversion of each format and README's commands: half a minute.
	$(VENV)/bin/python -m pytest tests/quick $(QUICKLY) "tests/docs/test_commands.py::test_commands_print_what_the_page_shows[README.md]"

test: $(VENV)/installed ## Run the tests that need no framework except torch.
	$(VENV)/bin/python -m pytest

check: $(VENV)/installed ## Check style and types.
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

docs: .venv-docs/installed ## Build the site in docs/_build; a broken link or an orphaned page fails.
	.venv-docs/bin/sphinx-build --quiet --fresh-env --fail-on-warning --keep-going --nitpicky docs docs/_build

release: .venv-release/installed ## Make wheel, source distribution, SBOM, provenance and checksums in dist/.
	rm -rf dist reshard.egg-info
	.venv-release/bin/python .ci/release.py dist

lock: .venv-lock/installed ## Write requirements/*.txt from pyproject.toml and constraints.txt.
	$(LOCK) pyproject.toml -o requirements/image.txt
	echo '$(WITHOUT_TORCH)' > .venv-lock/without-torch
	printf '%s\n' $(OF_TORCH) | $(LOCK) --override .venv-lock/without-torch --extra test --extra check pyproject.toml - -o requirements/develop.txt
	printf '%s\n' build cyclonedx-bom setuptools | $(LOCK) - -o requirements/release.txt

clean: ## Remove everything that the other targets make.
	rm -rf $(VENV) .venv-* build dist docs/_build *.egg-info $(OUT) .pytest_cache .mypy_cache .dmypy.json .ruff_cache .hypothesis
	find reshard formats cli plugins tests -name __pycache__ -prune -exec rm -rf {} +

# compileall also writes .pyc files where PYTHONDONTWRITEBYTECODE is set, and so commands start faster there. (pip does it for a wheel.)
$(VENV)/installed: pyproject.toml setup.py constraints.txt requirements/develop.txt
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python $(PIP_INSTALL) --require-hashes -r requirements/develop.txt
	$(VENV)/bin/python $(PIP_INSTALL) -c constraints.txt torch
	$(VENV)/bin/python $(PIP_INSTALL) --no-deps --no-build-isolation -e .
	$(VENV)/bin/python -m compileall -q reshard formats cli plugins
	@touch $@

.venv-release/installed: requirements/release.txt
	$(PYTHON) -m venv .venv-release
	.venv-release/bin/python $(PIP_INSTALL) --require-hashes -r requirements/release.txt
	@touch $@

.venv-lock/installed: constraints.txt
	$(PYTHON) -m venv .venv-lock
	.venv-lock/bin/python $(PIP_INSTALL) -c constraints.txt uv
	@touch $@

.venv-docs/installed: docs/requirements.txt
	$(PYTHON) -m venv .venv-docs
	.venv-docs/bin/python -m pip install --quiet --disable-pip-version-check -r docs/requirements.txt
	@touch $@
