# make demo, make test: all the set-up a fresh machine needs is Python >= 3.10 and make.
#   PYTHON=python3.12     another interpreter        PIP_ARGS="--index-url URL"   another source of packages
#   PYTEST_ARGS="-k ilp"  options of pytest          DEMO_ARGS="..."              options of hpml demo
# make test-torch TORCH=2.15.0: the tests on another release of torch than that of development; TORCH=nightly: on the
#   newest nightly build.  NIGHTLY=URL    its index
# make gpu: what hpml does on a GPU, with the torch and the packages that the machine has; see benchmarks/gpu_pass.py.
#   GPU_PYTHON=python3    that machine's             GPU_ARGS="--models FILE"      options of gpu_pass.py
#   make gpu-wheels, on a machine with a package index, fetches what the other lacks (GPU_PYTHON_VERSION=3.12 there).
# make docs: the documentation, in docs/_build/html; warnings are errors. DOCS_ARGS="..."    options of sphinx-build
# make notebooks: runs them, and writes their outputs into the files.
.PHONY: demo docs notebooks test test-torch gpu gpu-wheels lint clean

# Where it is set, each process, and so each rank of a test, compiles the source of hpml anew (0.5 s of CPU).
unexport PYTHONDONTWRITEBYTECODE

PIP_ARGS ?=
PYTEST_ARGS ?= -n 2 --dist loadfile --no-loadscope-reorder
DEMO_ARGS ?=
DOCS_ARGS ?=
NIGHTLY ?= https://download.pytorch.org/whl/nightly/cpu
GPU_PYTHON ?= python3
GPU_PYTHON_VERSION ?= 3.12
GPU_ARGS ?=

# The first interpreter that runs, is new enough, and can make a virtual environment.
FITS := import sys, ensurepip, venv; sys.exit(sys.version_info < (3, 10))
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11 python3.10 python3.14 python; do \
	"$$p" -c "$(FITS)" >/dev/null 2>&1 && echo "$$p" && break; done)

# Made anew when what it was made from changes; the constraints keep pip from taking a torch of its own choice.
.venv-%/.made: pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "no Python >= 3.10 with venv found: install one (Debian: apt-get install \
	python3 python3-venv), or say make PYTHON=/path/to/python"; exit 4; }
	rm -rf .venv-$*
	"$(PYTHON)" -m venv .venv-$*
	.venv-$*/bin/python -m pip install --quiet $(PIP_ARGS) -c constraints.txt -e '.$(EXTRAS)'
	touch $@

.venv-test/.made: EXTRAS = [test,lint,examples]

demo: .venv-demo/.made
	.venv-demo/bin/hpml demo $(DEMO_ARGS)

# One thread to a process, as ranks have: the workers share the cores, and threads that wait for each other keep them busy.
# Without the notes for debuggers that inductor asks g++ for, which take a tenth of its time.
TESTING = OMP_NUM_THREADS=1 AOT_INDUCTOR_ENABLE_LINE_TABLES=0 AOT_INDUCTOR_ENABLE_FRAME_POINTER=0
test: .venv-test/.made
	$(TESTING) .venv-test/bin/python -m pytest $(PYTEST_ARGS)

# As above, with the constraints on everything but torch. What pip takes may be a build that needs gigabytes of CUDA
# packages, unless PIP_ARGS names an index of builds for CPUs.
.venv-torch-%/.made: pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "no Python with venv found: say make PYTHON=/path/to/python"; exit 4; }
	rm -rf .venv-torch-$*
	"$(PYTHON)" -m venv .venv-torch-$*
	{ grep -v '^torch==' constraints.txt; test '$*' = nightly || echo 'torch==$*'; } > .venv-torch-$*/constraints.txt
	test '$*' != nightly || .venv-torch-$*/bin/python -m pip install --quiet --pre torch --index-url $(NIGHTLY)
	.venv-torch-$*/bin/python -m pip install --quiet $(PIP_ARGS) -c .venv-torch-$*/constraints.txt -e '.[test]'
	touch $@

test-torch:
	@test -n "$(TORCH)" || { echo "say which torch: make test-torch TORCH=2.15.0"; exit 2; }
	$(MAKE) .venv-torch-$(TORCH)/.made
	$(TESTING) .venv-torch-$(TORCH)/bin/python -m pytest $(PYTEST_ARGS)

gpu:
	"$(GPU_PYTHON)" benchmarks/gpu_pass.py $(if $(wildcard gpu-wheels),--packages gpu-wheels) $(GPU_ARGS)

# Without what highspy and pulp need in their turn, which is numpy: torch's machine has that.
WHEELS = "$(PYTHON)" -m pip download --quiet $(PIP_ARGS) --only-binary=:all: --python-version $(GPU_PYTHON_VERSION) \
	-c constraints.txt --dest gpu-wheels
gpu-wheels:
	$(WHEELS) --no-deps pulp highspy psutil packaging networkx liger-kernel
	$(WHEELS) pydantic rich typer

lint: .venv-test/.made
	.venv-test/bin/ruff check .
	.venv-test/bin/pyright --pythonpath .venv-test/bin/python

.venv-docs/.made: EXTRAS = [docs]

docs: .venv-docs/.made
	.venv-docs/bin/python -m sphinx -W --keep-going -q -b html $(DOCS_ARGS) docs docs/_build/html

notebooks: .venv-test/.made
	.venv-test/bin/python -m tests.notebooks.outputs

clean:
	rm -rf .venv-demo .venv-docs .venv-test .venv-torch-* docs/_build docs/notebooks gpu-wheels *.egg-info build .pytest_cache .ruff_cache .hypothesis
