# make install   a virtual environment in .venv with everything the tests need
# make demo      the default training run: a tiny model, on a CPU
# make test      style, types, tests
# make system    bubblewrap, which runs the programs of code tasks, and chromium, for tests of the viewer's page (as root)
# make test-trl  the tests of the TRL adapter, with TRL installed
# make test-lm-eval  the tests of the lm-evaluation-harness adapter, with lm_eval installed
# make docs      the documentation as a site, in build/site
# make reference writes the pages of docs/reference and the tables of docs/methods/terms.md from the code
# make audit     known advisories for the versions in constraints.txt
# make fuzz      ten minutes of coverage-guided fuzzing of what reads files and answers (FUZZ_SECONDS=600)
# make soak      hours: 10,000 updates, 1,000 sandboxed programs, runs killed anywhere and resumed
# make web       the viewer's page, from web/ into unmask/view/page.html (Node 20.19 or newer)
# make web-test  types and tests of that page, in a browser too (chromium)
# make clean     removes what the other targets made

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

# What the tests use beyond Python. Debian and Fedora give both the same names.
PACKAGES ?= bubblewrap chromium

.PHONY: install demo system test test-trl test-lm-eval docs reference audit fuzz soak web web-test clean

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

# One package at a time: a distribution that lacks one still installs the other.
system:
	@[ "$$(id -u)" = 0 ] || { echo "make system installs packages and needs root: sudo make system" >&2; exit 1; }
	@if command -v apt-get >/dev/null; then apt-get update -qq; install="apt-get install -y -qq"; \
	elif command -v dnf >/dev/null; then install="dnf install -y -q"; \
	else echo "make system uses apt-get or dnf, and neither is here. Install by hand: $(PACKAGES)" >&2; exit 1; fi; \
	failed=; export DEBIAN_FRONTEND=noninteractive; \
	for package in $(PACKAGES); do $$install $$package </dev/null || failed="$$failed $$package"; done; \
	[ -z "$$failed" ] || { echo "these packages could not be installed:$$failed" >&2; exit 1; }

# One thread a process: two pytest workers share the cores instead of fighting over them. A file stays on one worker, so
# that what its tests share is made once. The order is that of tests/conftest.py, slow files first.
test: install
	@command -v bwrap >/dev/null || [ "$$(id -u)" != 0 ] || \
	  timeout 300 $(MAKE) system PACKAGES=bubblewrap >/dev/null 2>&1 || true
	@command -v bwrap >/dev/null || \
	  echo "bubblewrap is not installed: tests that run programs of code tasks are skipped. Install it with: make system"
	$(BIN)/ruff check .
	$(BIN)/mypy unmask
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder

# TRL brings 300 MB along, so it is not in dev; without it these tests are skipped, and say so.
test-trl: install
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[trl]' -c constraints.txt
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 tests/test_trl.py tests/test_examples.py

test-lm-eval: install
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[lm-eval]' -c constraints.txt
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/test_lm_eval.py

# For this target alone, so not in dev. A warning is an error, but for Material's own about its future.
docs: install reference
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[docs]' -c constraints.txt
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	@echo "build/site/index.html; with its search: $(BIN)/python -m http.server --directory build/site"

reference: install
	$(BIN)/python docs/reference.py

# Both tools are for these targets alone, so neither is in dev. If pip cannot fetch one, the target says so.
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
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/soak.py resume
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/soak.py torchrun
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/soak.py viewer --lines 1000000
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/soak.py train --updates 10000

NPM := npm --prefix web --loglevel=error

web/node_modules: web/package.json
	@command -v npm >/dev/null || { \
	  echo "the viewer's page is built with Node 20.19 or newer, and npm was not found" >&2; exit 1; }
	$(NPM) install
	@touch $@

web: web/node_modules
	$(NPM) run check
	$(NPM) run build

web-test: web
	$(NPM) test
	$(NPM) run e2e

clean:
	rm -rf $(VENV) build dist fuzz web/node_modules web/test-results .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find unmask tests -type d -name __pycache__ -prune -exec rm -rf {} +
