# make install   a virtual environment in .venv with everything the tests need
# make demo      the default training run: a tiny model, on a CPU
# make test      style, types, tests
# make clean     removes what the other targets made

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: install demo test clean

install: $(STAMP)

# Some distributions ship python3 without ensurepip; the environment then gets its pip from the outer one.
$(STAMP): pyproject.toml constraints.txt
	@command -v $(PYTHON) >/dev/null || { \
	  echo "unmask needs Python 3.11 or newer, and '$(PYTHON)' was not found." \
	       "Install it, or name one: make install PYTHON=/path/to/python3.11" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "unmask needs Python 3.11 or newer, and '$(PYTHON)' is $$($(PYTHON) -V 2>&1)." \
	       "Name a newer one: make install PYTHON=python3.11" >&2; exit 1; }
	@$(PYTHON) -m venv $(VENV) >/dev/null 2>&1 || { \
	  $(PYTHON) -m venv --without-pip $(VENV) && \
	  $(PYTHON) -m pip --python $(BIN)/python install --quiet pip; }
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[dev]' -c constraints.txt
	@touch $@

demo: install
	$(BIN)/unmask train

# One thread a process: two pytest workers share the cores instead of fighting over them.
test: install
	$(BIN)/ruff check .
	$(BIN)/mypy unmask
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadgroup

clean:
	rm -rf $(VENV) build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find unmask tests -type d -name __pycache__ -prune -exec rm -rf {} +
