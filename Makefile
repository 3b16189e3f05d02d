# Every target makes its own environment first: `make quickstart` alone works on a fresh machine.
#
#   make test STACK=tf215        TensorFlow 2.15 with TensorFlow Privacy, beside the current TensorFlow
#   make test PY=3.13            another Python; PYTHON=/path/to/python names one that is not on the PATH

STACK ?= current
PY ?=
PYTHON ?=
VENV ?= .venv$(if $(filter-out current,$(STACK)),-$(STACK))$(if $(PY),-py$(PY))
PYTEST_ARGS ?=
# Processes that run tests, a file in one of them: most of the work is tracing, which has one thread in each, and fixtures
# of a module are made once. In the order of their names, so that short files come last and no process waits for another.
# OpenBLAS has one thread in each: more of them only wait for one another on small matrices. Bytecode is kept: to rewrite
# the assertions of all tests takes each process five seconds.
WORKERS ?= 2
RUN_TESTS = PYTHONDONTWRITEBYTECODE= OPENBLAS_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) \
	--dist loadfile --no-loadscope-reorder
BIN := $(VENV)/bin
JAX := .venv-jax
TORCH := .venv-torch
DOCS := .venv-docs
SBOM := .venv-sbom
STAMP := $(VENV)/.installed
CODE := tfp_dpvi tests examples benchmarks
comma := ,
EXTRAS := dev$(if $(filter tf215,$(STACK)),$(comma)tensorflow-privacy)
# The Python of the other stack, where its environment has been made: files are tried across both.
OTHER := $(if $(filter tf215,$(STACK)),.venv/bin/python)
DIST_EXTRAS := examples$(if $(filter tf215,$(STACK)),$(comma)tensorflow-privacy)
# The versions that both stacks are tested on, the best one first.
PYTHONS := $(if $(filter tf215,$(STACK)),3.11 3.10,3.11 3.12 3.13 3.10)
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
	$(RUN_TESTS) -m "not slow" $(PYTEST_ARGS)

.PHONY: lint
lint: $(STAMP) ## Format check, lint and types only
	$(BIN)/python -m ruff format --check .
	$(BIN)/python -m ruff check .
	$(BIN)/python -m mypy

# To collect all the other files takes longer than to run these tests.
SMOKE = $$(grep -rl --include='test_*.py' 'mark\.smoke' tests)
.PHONY: smoke
smoke: $(STAMP) ## Gradients, privacy, one fit, saving, export and the quickstart: what another stack must pass
	$(if $(wildcard $(OTHER)),TFP_DPVI_OTHER_STACK=$(CURDIR)/$(OTHER)) \
		$(RUN_TESTS) -m "smoke and not slow" $(SMOKE) $(PYTEST_ARGS)

# Each environment in a make of its own; those whose Python this machine lacks are named and left out.
STACKS := current:3.10 current:3.11 current:3.12 current:3.13 tf215:3.10 tf215:3.11
.PHONY: test-stacks smoke-stacks
test-stacks: ## The fast tests on both stacks and on every Python that this machine has
	@$(MAKE) --no-print-directory on-stacks TARGET=test ON="$(STACKS)"
smoke-stacks: ## `make smoke` on the other stack, and on the first and the last Python
	@$(MAKE) --no-print-directory on-stacks TARGET=smoke ON="current:3.10 current:3.13 tf215:3.11"

.PHONY: on-stacks
on-stacks:
	@set -e; for each in $(ON); do \
		stack=$${each%:*}; py=$${each#*:}; \
		if .ci/find_python.sh $$py >/dev/null; then \
			echo "make: $(TARGET) on $$stack, Python $$py"; \
			$(MAKE) --no-print-directory $(TARGET) STACK=$$stack PY=$$py; \
		else \
			echo "make: no Python $$py here: $(TARGET) on $$stack is left out"; \
		fi; \
	done

# A slow test may take half an hour where the machine has other things to do: the limit of the fast
# ones ends the whole process, and with it every test that is left. What passed stands in a journal of the commit: a run
# that was stopped goes on. A new journal runs all of them anew.
JOURNAL ?= build/test-slow-$(shell git rev-parse --short HEAD 2>/dev/null).txt
.PHONY: test-slow
test-slow: $(STAMP) ## The rest of the tests, 300 kills among them, with new random numbers: about an hour and a half (an estimate)
	@mkdir -p build
	TFP_DPVI_TEST_SEED=$(or $(TFP_DPVI_TEST_SEED),$(shell date +%s)) \
		$(RUN_TESTS) -m slow --timeout 1800 --journal=$(JOURNAL) $(PYTEST_ARGS)

.PHONY: audit
audit: $(STAMP) ## Plant 24 faults in the private step: each must be found, and the clean step pass
	$(BIN)/python .ci/audit.py

.PHONY: studies
studies: $(STAMP) ## Ten models, the 2017 paper's mixture, d3p's groups, the bars: goes on where it stopped; FULL=1 adds two long cells
	$(BIN)/python benchmarks/run_studies.py --write $(if $(FULL),--full)

.PHONY: study-logistic
study-logistic: $(STAMP) ## The study of Adult and Abalone: accuracy over epsilon, sampling rate and clip
	$(BIN)/python examples/logistic_regression.py

.PHONY: studies-federated
studies-federated: $(STAMP) ## Several hospitals beside the fit that pools their records: hours; goes on where it stopped
	$(BIN)/python benchmarks/federated_studies.py $(FEDERATED_ARGS)

.PHONY: bench
bench: $(STAMP) $(JAX)/.installed $(TORCH)/.installed ## Every case beside its peers; with STACK=tf215 TensorFlow Privacy too
	$(BIN)/python benchmarks/suite.py --jax $(JAX)/bin/python --torch $(TORCH)/bin/python --check

.PHONY: bench-gpu
bench-gpu: $(STAMP) ## Our own cases on a GPU, into suite_gpu.json; without one it says so and measures nothing
	$(BIN)/python benchmarks/suite.py --gpu

.PHONY: bench-logistic
bench-logistic: $(STAMP) ## Logistic regression against TensorFlow Privacy: needs STACK=tf215
	$(BIN)/python benchmarks/logistic_regression.py

.PHONY: bench-vae
bench-vae: $(STAMP) ## A private VAE against non-private ones; with STACK=tf215 TensorFlow Privacy too
	$(BIN)/python benchmarks/vae.py

.PHONY: bench-layers
bench-layers: $(STAMP) ## Each kind of layer: a private step over a non-private one, beside the estimate of the warning
	$(BIN)/python benchmarks/layers.py

.PHONY: bench-calibration
bench-calibration: $(STAMP) ## Do private intervals cover? 200 simulated data sets a cell, or 40 with QUICK=1; goes on where it stopped
	$(BIN)/python benchmarks/calibration.py $(if $(QUICK),--quick) $(CALIBRATION_ARGS)

# The peers' environments: .venv-jax from benchmarks/peers/jax.txt, .venv-torch from torch.txt.
.venv-%/.installed: benchmarks/peers/%.txt $(STAMP)
	$(BIN)/python -m venv --clear $(@D)
	$(@D)/bin/python -m pip install --quiet --disable-pip-version-check -r $<
	touch $@

.PHONY: dist
dist: $(STAMP) ## Wheel, sdist and bill of materials, into dist/; each is installed afresh, and README and regression guide run
	rm -rf dist build
	$(BIN)/python -m build --no-isolation --outdir dist
	rm -rf build *.egg-info
	$(BIN)/python .ci/check_sdist.py dist/*.tar.gz
	@set -e; for file in dist/*; do \
		echo "make: README and regression guide with $$file, in an environment of its own"; \
		rm -rf .venv-dist; $(BIN)/python -m venv .venv-dist; \
		.venv-dist/bin/python -m pip install --quiet --disable-pip-version-check "$$file[$(DIST_EXTRAS)]"; \
		MPLBACKEND=Agg .venv-dist/bin/python .ci/run_readme.py README.md docs/regression.md >/dev/null; \
	done
	$(BIN)/python -m venv $(SBOM)
	$(SBOM)/bin/python -m pip install --quiet --disable-pip-version-check -r packaging/sbom.txt
	$(SBOM)/bin/python -m cyclonedx_py environment --output-reproducible \
		--output-file dist/tfp_dpvi.cdx.json .venv-dist/bin/python
	rm -rf .venv-dist

.PHONY: docs
docs: $(STAMP) ## The documentation, into build/site; warnings are errors
	$(BIN)/python -m venv $(DOCS)
	$(DOCS)/bin/python -m pip install --quiet --disable-pip-version-check -r docs/requirements.txt
	$(DOCS)/bin/python -m mkdocs build --strict --quiet

.PHONY: notebooks
notebooks: $(STAMP) ## Run the notebooks of docs/notebooks in place, with what their output and pictures are now
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --upgrade --target build/notebooks \
		-r docs/notebooks/requirements.txt
	JUPYTER_PATH=$(CURDIR)/build/notebooks/share/jupyter PYTHONPATH=$(CURDIR)/build/notebooks $(BIN)/python docs/notebooks/run.py

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

# --no-build-isolation: the pinned setuptools builds, and with everything installed nothing asks the network.
$(STAMP): pyproject.toml $(wildcard constraints/*.txt)
	@set -e; \
	python=$$(.ci/find_python.sh $(or $(PYTHON),$(PY),$(PYTHONS))); \
	version='import sys; print("%d%d" % sys.version_info[:2])'; \
	wanted=$$($$python -c "$$version"); \
	pins=constraints/$(STACK)-py$$wanted.txt; \
	if [ ! -f $$pins ]; then \
		echo "make: STACK=$(STACK) is not supported on $$($$python --version): there is no $$pins." >&2; \
		exit 1; \
	fi; \
	if [ "$$($(BIN)/python -c "$$version" 2>/dev/null)" != "$$wanted" ] \
			|| ! $(BIN)/python -m pip --version >/dev/null 2>&1; then \
		echo "make: $(VENV) from $$($$python --version)"; \
		$$python -m venv --clear $(VENV); \
	fi; \
	echo "make: installing the versions of $$pins"; \
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c $$pins setuptools wheel; \
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-build-isolation -c $$pins -e '.[$(EXTRAS)]'; \
	touch $@
