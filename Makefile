# fedtangent: `make help` lists the targets. `make run` and `make test` need nothing but Python 3.11 to 3.14 (the lock
# holds packages for these) and a network connection on the first call; everything is installed into .venv.

SHELL := bash
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.SUFFIXES:

VENV := .venv
BIN := $(VENV)/bin
CREATED := $(VENV)/.created
INSTALLED := $(VENV)/.installed
PIP := $(BIN)/python -m pip --disable-pip-version-check --no-input

# Set on the command line: make test PYTHON=/usr/bin/python3.12 PYTEST_ARGS=tests/test_imports.py
PYTHON ?=
CANDIDATES = $(or $(PYTHON),python3.13 python3.12 python3.11 python3.14 python3)
RUN_ARGS ?= --output results/compare --overwrite
BENCH_ARGS ?= --output results/bench
CHECK_ARGS ?= --output results/check-theory --overwrite
PYTEST_ARGS ?=
PYTEST_WORKERS ?= 2
LOCK_ARGS ?=
MUTANT_ARGS ?=
FUZZ_ARGS ?=

# What must hold to the bit, once more with all of the compiler's optimisations, which make test leaves out.
LAWS := tests/federated/test_laws.py tests/cli/test_resume.py tests/engine/test_checkpoint.py tests/engine/test_kill.py

BENCHMARKS := $(sort $(wildcard benchmarks/*.py))
NOTEBOOKS := $(sort $(wildcard notebooks/*.py))

.PHONY: help
help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-18s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

# ---- set-up: two stamps, each written only after its step has succeeded ----

$(CREATED):
	@for candidate in $(CANDIDATES); do \
	  if "$$candidate" -c 'import sys, ensurepip, venv; sys.exit(not (3, 11) <= sys.version_info < (3, 15))' 2>/dev/null; then \
	    echo "creating $(VENV) with $$("$$candidate" --version) ($$candidate)"; \
	    "$$candidate" -m venv --clear $(VENV) && touch $@; exit; \
	  fi; \
	done; \
	echo "fedtangent needs Python 3.11 to 3.14 with venv and ensurepip (Debian, Ubuntu: package python3-venv)." >&2; \
	echo "None of these will do: $(CANDIDATES). Name another: make PYTHON=/path/to/python3" >&2; exit 1

# setuptools first: it builds the one package of the lock that has no wheel, and this one.
$(INSTALLED): $(CREATED) constraints.txt setup.cfg pyproject.toml
	@rm -f $@
	sed -n '/^setuptools==/,/[^\\]$$/p' constraints.txt > $(VENV)/setuptools.txt
	$(PIP) install --no-deps --require-hashes -r $(VENV)/setuptools.txt
	$(PIP) install --no-deps --require-hashes --no-build-isolation -r constraints.txt
	$(PIP) install --no-deps --no-build-isolation --editable .
	touch $@

.PHONY: install
install: $(INSTALLED) ## set up .venv from the lock (the targets below do it themselves)

# ---- use ----

# OpenBLAS's threads spin beside XLA's when cores are few, and small eigendecompositions then take many times as long.
run notebooks docs bench benchmarks check-theory: export OPENBLAS_NUM_THREADS := 1

.PHONY: run
run: $(INSTALLED) ## the main job: simulation, NTK-FL and Gaussian-process limit side by side
	$(BIN)/fedtangent compare $(RUN_ARGS)

.PHONY: bench
bench: $(INSTALLED) ## how well the engine uses this machine's processor or accelerator: one table, and JSON
	$(BIN)/python benchmarks/engine.py $(BENCH_ARGS)

.PHONY: benchmarks
benchmarks: $(INSTALLED) ## every benchmarks/*.py: tables and JSON, which take hours
	@set -e; for source in $(BENCHMARKS); do echo "== $$source"; $(BIN)/python $$source $(BENCH_ARGS); done

.PHONY: notebooks
notebooks: $(INSTALLED) ## execute every notebooks/*.py into an .ipynb with its outputs
	@mkdir -p build/notebooks
	@set -e; for source in $(NOTEBOOKS); do \
	  name=$$(basename $$source .py); start=$$SECONDS; \
	  $(BIN)/jupytext --quiet --to ipynb --output build/notebooks/$$name.ipynb $$source; \
	  $(BIN)/jupyter-execute --NbClientApp.log_level=ERROR --kernel_name=python3 --inplace build/notebooks/$$name.ipynb; \
	  mv build/notebooks/$$name.ipynb notebooks/$$name.ipynb; echo "$$source: $$((SECONDS - start)) s"; \
	done

.PHONY: docs
docs: $(INSTALLED) ## build the documentation into build/docs, without warnings
	$(BIN)/python -m sphinx -W --keep-going -b html docs build/docs

# ---- check ----

.PHONY: test
test: $(INSTALLED) ## every test but the slow ones (PYTEST_ARGS selects some); in CI with coverage of src
	$(BIN)/python -m pytest -n $(PYTEST_WORKERS) --dist loadfile $(or $(PYTEST_ARGS),$(if $(CI),--cov --cov-report=term))

.PHONY: check-theory
check-theory: $(INSTALLED) ## every theorem against simulation: the slow tests, then all checks in one table
	status=0; \
	export XLA_FLAGS="$$XLA_FLAGS --xla_backend_optimization_level=3"; \
	$(BIN)/python -m pytest -n $(PYTEST_WORKERS) --dist loadfile -m "(slow or theory) and not versions" $(PYTEST_ARGS) || status=1; \
	$(BIN)/python -m pytest -n $(PYTEST_WORKERS) --dist loadfile $(LAWS) || status=1; \
	$(BIN)/python -m fedtangent check-theory $(CHECK_ARGS) || status=1; \
	exit $$status

.PHONY: test-jax-versions
test-jax-versions: $(INSTALLED) ## the wheel installed, and tested, under the oldest supported and the newest JAX
	$(BIN)/python tests/jax_versions.py

.PHONY: mutants
mutants: $(INSTALLED) ## put each fault of tests/mutants.toml into a copy: the tests must catch it
	$(BIN)/python tests/run_mutants.py $(MUTANT_ARGS)

.PHONY: fuzz
fuzz: $(INSTALLED) ## random command lines and calls end well or are refused; numbers agree with a second way (FUZZ_ARGS=--help)
	$(BIN)/python tests/fuzz $(FUZZ_ARGS)

.PHONY: lint
lint: $(INSTALLED) ## ruff check, ruff format --check, mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy src $(wildcard benchmarks/*.py) $(wildcard docs/*.py)

# ---- maintain ----

# One version of each package for every supported Python and platform, by the oldest Python's choice. TensorFlow and
# tf2jax are left out: neural-tangents names them, but only its experimental part, which is not used, imports them.
.PHONY: lock
lock: $(CREATED) ## write constraints.txt anew from setup.cfg (LOCK_ARGS=--upgrade for the newest versions)
	$(BIN)/python -m venv build/lock
	build/lock/bin/python -m pip install --quiet --disable-pip-version-check 'uv>=0.10'
	printf '%s\n' tensorflow tf2jax > build/lock/excludes.txt
	build/lock/bin/uv pip compile setup.cfg --extra notebooks --extra explore --extra tensorboard --extra test --extra docs --extra dev \
	  --output-file constraints.txt --universal --python-version 3.11 --fork-strategy fewest \
	  --excludes build/lock/excludes.txt --generate-hashes --no-annotate --no-emit-index-url --custom-compile-command 'make lock' --quiet $(LOCK_ARGS)

.PHONY: clean
clean: ## remove .venv, build and caches (results/ stays)
	rm -rf $(VENV) .venv-versions build dist htmlcov .coverage* .mypy_cache .pytest_cache .ruff_cache .hypothesis src/*.egg-info
	find src tests benchmarks notebooks -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true
