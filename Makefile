# make install   a virtual environment in .venv with everything the tests need
# make demo      the default training run: a tiny model, on a CPU
# make test      style, types, tests
# make audit     known advisories for the versions in constraints.txt
# make fuzz      ten minutes of coverage-guided fuzzing of what reads files and answers (FUZZ_SECONDS=600)
# make soak      hours: 10,000 updates, 1,000 sandboxed programs
# make clean     removes what the other targets made

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: install demo test audit fuzz soak clean

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

# Both tools are for these targets alone, so neither is in dev; a machine that cannot fetch them is told so.
audit: install
	-@$(BIN)/python -m pip install --quiet --disable-pip-version-check pip-audit 2>/dev/null
	$(BIN)/python benchmarks/advisories.py

FUZZ_SECONDS ?= 600
fuzz: install
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[fuzz]' -c constraints.txt || { \
	  echo "atheris has no wheel for this Python: take 3.11" >&2; exit 1; }
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/fuzz.py --seconds $(FUZZ_SECONDS)

soak: install
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/soak.py sandbox --programs 1000
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/soak.py train --updates 10000

clean:
	rm -rf $(VENV) build dist fuzz .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find unmask tests -type d -name __pycache__ -prune -exec rm -rf {} +
