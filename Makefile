# Every target makes .venv and installs what it needs by itself.
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
PYTHON ?= $(shell for p in python3 python3.11 python3.12 python3.13 python3.14; do \
	$$p -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 14))' 2>/dev/null \
	&& echo $$p && break; done)
EXTRAS := dev,portal,view,wandb,onnx,video,atari,bsuite,crafter,dmc,envpool,memmaze,minigrid,mujoco,ray
LOGDIR ?= logdir/demo
# An environment that has the package as users install it, and nothing else.
WHEEL_VENV := .venv-wheel
WHEEL_BIN := $(WHEEL_VENV)/bin
WHEEL_EMPTY := $(WHEEL_VENV)/.empty
WHEEL_INSTALLED := $(WHEEL_VENV)/.installed
PACKAGED := $(shell find embodied dreamerv3 -type f -not -name '*.pyc')
# Bytecode is kept, whatever the environment says: tests start thousands of processes.
export PYTHONDONTWRITEBYTECODE :=
# Of packages it is made when they are first used: for all of them it takes a minute.
PIP_INSTALL := -m pip install --quiet --disable-pip-version-check --no-warn-script-location --no-compile -c constraints.txt

.PHONY: help venv wheel demo test test-slow lint format bench clean

help: ## Show what there is to do
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /  make \1\t/' | expand -t 20

venv: $(INSTALLED) ## Create .venv and install everything into it

$(INSTALLED): pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "Python 3.11 to 3.14 was not found. Install one of them, or pass its path: make PYTHON=/path/to/python3.11"; exit 1; }
	@echo "Installing into $(VENV) (a few minutes the first time) ..."
	@$(PYTHON) -m venv $(VENV) || { echo "python -m venv failed. On Debian and Ubuntu: apt install python3-venv"; exit 1; }
	@$(BIN)/python $(PIP_INSTALL) -e '.[$(EXTRAS)]'
	@$(BIN)/python $(PIP_INSTALL) --no-deps dm_control  # From Python 3.13 on not in the extra.
	@touch $(INSTALLED)

wheel: $(WHEEL_INSTALLED) ## Build the package, and install it without extras into .venv-wheel

# Begun anew when dependencies change: one that is not declared any more must go.
$(WHEEL_EMPTY): pyproject.toml constraints.txt $(INSTALLED)
	@$(BIN)/python -m venv --clear $(WHEEL_VENV)
	@touch $(WHEEL_EMPTY)

# Without what an earlier build has left: it would end up in the package.
$(WHEEL_INSTALLED): $(WHEEL_EMPTY) README.md LICENSE $(PACKAGED)
	@echo "Building the package and installing it into $(WHEEL_VENV) ..."
	@rm -rf build $(WHEEL_VENV)/dist
	@$(BIN)/python -m pip wheel --quiet --disable-pip-version-check --no-deps --wheel-dir $(WHEEL_VENV)/dist .
	@rm -rf build
	@$(WHEEL_BIN)/python $(PIP_INSTALL) --no-deps --force-reinstall $(WHEEL_VENV)/dist/*.whl
	@$(WHEEL_BIN)/python $(PIP_INSTALL) $(WHEEL_VENV)/dist/*.whl
	@touch $(WHEEL_INSTALLED)

demo: $(INSTALLED) ## Learn to balance a pole, in minutes on a CPU, and draw the curve
	@$(BIN)/python -m dreamerv3.main --configs demo --logdir $(LOGDIR) $(FLAGS)
	@$(BIN)/python -m dreamerv3.plot $(LOGDIR) --out $(LOGDIR)/scores.png

test: lint $(WHEEL_INSTALLED) ## Lint, then all tests that are quick
	@$(BIN)/python -m pytest -n 2 --dist loadfile -q $(PYTEST_FLAGS)

test-slow: $(INSTALLED) $(WHEEL_INSTALLED) ## The same tests with long rounds
	@$(BIN)/python -m pytest -n 2 --dist loadfile -q -m slow --timeout=3600 --durations=20 --ignore=tests/cluster
	@$(BIN)/python -m pytest -q -m slow --timeout=3600 tests/cluster  # With seconds to keep.

lint: $(INSTALLED) ## Formatting, lint, types, who may import whom, and declared dependencies
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports --no-cache
	@$(BIN)/deptry embodied dreamerv3

format: $(INSTALLED) ## Format and fix what can be fixed
	@$(BIN)/ruff format .
	@$(BIN)/ruff check --fix .

bench: $(INSTALLED) ## Benchmarks that are sized for a laptop
	@$(BIN)/python -m benchmarks.imports
	@$(BIN)/python -m benchmarks.rpc --quick
	@$(BIN)/python -m benchmarks.replay
	@$(BIN)/python -m benchmarks.simulated --seconds 20

clean: ## Remove .venv, .venv-wheel and caches
	rm -rf $(VENV) $(WHEEL_VENV) build .mypy_cache .ruff_cache .hypothesis .import_linter_cache
