# Every target makes its own environment first: `make quickstart` alone works on a fresh machine.
#
#   make PYTHON=/path/to/python3.10 VENV=.venv310 test    another interpreter, beside the first

VENV ?= .venv
PYTHON ?=
PYTEST_ARGS ?=
# Processes that run tests: most of their work is tracing, which has one thread in each.
WORKERS ?= 2
BIN := $(VENV)/bin
JAX := .venv-jax
TORCH := .venv-torch
DOCS := .venv-docs
STAMP := $(VENV)/.installed
CODE := tfp_dpvi tests examples benchmarks

# Real data where the checkout has it next door; unset, the loaders use Keras's cache or download.
ifeq ($(origin TFP_DPVI_DATA), undefined)
ifneq ($(wildcard ../shared/data/.),)
export TFP_DPVI_DATA := $(abspath ../shared/data)
endif
endif

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

.PHONY: help
help: ## Show this list
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1@\2/p' $(firstword $(MAKEFILE_LIST)) | awk -F@ '{printf "%-22s %s\n", $$1, $$2}'

.PHONY: quickstart
quickstart: $(STAMP) ## Make the environment and run the main job on real patient records
	@$(BIN)/python examples/quickstart.py

.PHONY: test
test: lint $(STAMP) ## Format check, lint, types and the fast tests
	$(BIN)/python -m pytest -m "not slow" -n $(WORKERS) $(PYTEST_ARGS)

.PHONY: lint
lint: $(STAMP) ## Format check, lint and types only
	$(BIN)/python -m ruff format --check .
	$(BIN)/python -m ruff check .
	$(BIN)/python -m mypy

.PHONY: test-slow
test-slow: $(STAMP) ## The slow tests
	$(BIN)/python -m pytest -m slow $(PYTEST_ARGS)

.PHONY: studies
studies: $(STAMP) ## The study of Adult and Abalone: accuracy over epsilon, sampling rate and clip
	$(BIN)/python examples/logistic_regression.py

.PHONY: bench
bench: $(STAMP) $(JAX)/.installed $(TORCH)/.installed ## Every case beside its peers: the table of the README
	$(BIN)/python benchmarks/suite.py --jax $(JAX)/bin/python --torch $(TORCH)/bin/python --check

.PHONY: bench-logistic
bench-logistic: $(STAMP) ## Logistic regression against TensorFlow Privacy
	$(BIN)/python benchmarks/logistic_regression.py

.PHONY: bench-vae
bench-vae: $(STAMP) ## A private VAE against non-private and TensorFlow Privacy
	$(BIN)/python benchmarks/vae.py

# The peers' environments: .venv-jax from benchmarks/peers/jax.txt, .venv-torch from torch.txt.
.venv-%/.installed: benchmarks/peers/%.txt $(STAMP)
	$(BIN)/python -m venv --clear $(@D)
	$(@D)/bin/python -m pip install --quiet --disable-pip-version-check -r $<
	touch $@

.PHONY: docs
docs: $(STAMP) ## The documentation, into build/site; warnings are errors
	$(BIN)/python -m venv $(DOCS)
	$(DOCS)/bin/python -m pip install --quiet --disable-pip-version-check -r docs/requirements.txt
	$(DOCS)/bin/python -m mkdocs build --quiet

.PHONY: format
format: $(STAMP) ## Format and mend what ruff can
	$(BIN)/python -m ruff check --fix-only .
	$(BIN)/python -m ruff format .

.PHONY: venv
venv: $(STAMP) ## Only make the environment

.PHONY: clean
clean: ## Remove the environment and everything that was built
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# A command that exists may still fail (version managers install such shims), so each candidate is run.
# --no-build-isolation: the pinned setuptools builds, and with everything installed nothing asks the network.
$(STAMP): pyproject.toml $(wildcard constraints/*.txt)
	@set -e; \
	supported='import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 11))'; \
	python=''; \
	for candidate in $(or $(PYTHON),python3.11 python3.10 python3); do \
		if $$candidate -c "$$supported" >/dev/null 2>&1; then python=$$candidate; break; fi; \
	done; \
	if [ -z "$$python" ]; then \
		echo "make: tfp_dpvi needs Python 3.10 or 3.11, and none of these is one that runs:" \
			"$(or $(PYTHON),python3.11 python3.10 python3)." >&2; \
		echo "make: install Python 3.11, or name one: make PYTHON=/path/to/python3.11 $(MAKECMDGOALS)" >&2; \
		exit 1; \
	fi; \
	version='import sys; print("%d%d" % sys.version_info[:2])'; \
	wanted=$$($$python -c "$$version"); \
	if [ "$$($(BIN)/python -c "$$version" 2>/dev/null)" != "$$wanted" ] \
			|| ! $(BIN)/python -m pip --version >/dev/null 2>&1; then \
		echo "make: $(VENV) from $$($$python --version)"; \
		$$python -m venv --clear $(VENV); \
	fi; \
	echo "make: installing the versions of constraints/py$$wanted.txt"; \
	$(BIN)/python -m pip install --quiet --disable-pip-version-check \
		-c constraints/py$$wanted.txt setuptools wheel; \
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-build-isolation \
		-c constraints/py$$wanted.txt -e '.[dev]'; \
	touch $@
