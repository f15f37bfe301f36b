# From a fresh clone to a clip and to green tests. Needs Python 3.11 or later, git and make.
#   make demo                   make PYTHON=python3.12 test ARGS="-k transport"

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# The demos need the product alone, which takes less time to install than what tests need too.
RUNTIME := $(if $(BUNDLE)$(wildcard $(STAMP)),$(STAMP),$(VENV)/.installed-runtime)
DEMO := demo-out
SERVED := serve-demo-data
TORCHAO := $(CURDIR)/build/torchao
ARGS ?=
FOR ?= 3.12

# pip shows its progress on a terminal; in a log, only its errors.
QUIET := $(if $(MAKE_TERMOUT),,-qq)

# Tests start hundreds of processes; without bytecode each would compile the same files.
# pip makes none: for all packages that takes a minute, and few of their modules are imported.
unexport PYTHONDONTWRITEBYTECODE

# import-linter cannot forbid a module inside an external package, so ruff checks this contract.
NO_RANKS := lint.flake8-tidy-imports.banned-api={ \
  "torch.distributed".msg = "models and media must not depend on ranks", \
  "torch.multiprocessing".msg = "models and media must not depend on ranks" }

.DELETE_ON_ERROR:
.DEFAULT_GOAL := help
.PHONY: help demo serve-demo test test-ci test-torchao test-full test-jitter test-gpu rehearse-gpu offline-bundle soak soak-serve soak-fleet \
  lint format types imports pre-commit coverage docs check-docs clean

help: ## Show these targets
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1|\2/p' $(MAKEFILE_LIST) | \
	  while IFS='|' read -r target what; do printf '%-24s%s\n' "  $$target" "$$what"; done

demo: $(RUNTIME) ## Animate four images on two CPU ranks, then prove one clip bitwise
	$(BIN)/svdpp run svdpp/assets/photos/*.jpg --device cpu --world 2 --model demo \
	  --out $(DEMO) --overwrite
	$(BIN)/svdpp verify $(DEMO)/astronaut_0.mp4
	@echo "The clips:"
	@ls -1 $(DEMO)/*.mp4

serve-demo: $(RUNTIME) ## Serve the demo model on two CPU ranks: open http://127.0.0.1:8000
	$(BIN)/svdpp serve --device cpu --model demo --data $(SERVED) $(ARGS)

test: $(STAMP) ## Test the installation in two minutes; ARGS="-k name" selects some tests
	$(BIN)/python -m pytest -n $(or $(WORKERS),2) --dist worksteal -m "not slow and not gpu" $(ARGS)

test-ci: $(STAMP) ## Run the other tests: processes, faults, commands, rehearsed GPU tests
	GPU_REHEARSAL=1 GPU_REPORT=build $(BIN)/python -m pytest -n $(or $(WORKERS),4) --dist worksteal \
	  -m "(slow or gpu) and not full" $(ARGS)

# With torchao installed, every process of every test would import it, so it is kept apart.
test-torchao: $(STAMP) ## Run the tests of int8 checkpoints, with torchao in a folder of its own
	$(BIN)/python -m pip install $(QUIET) --disable-pip-version-check --no-deps --upgrade \
	  --target $(TORCHAO) -c constraints.txt torchao
	PYTHONPATH=$(TORCHAO) $(BIN)/python -m pytest -n $(or $(WORKERS),2) --dist worksteal \
	  -m "not full" tests/models/test_torchao.py $(ARGS)

test-full: $(STAMP) ## Run what test-ci leaves out, which takes hours: full grids, more kills
	$(BIN)/python -m pytest -n $(or $(WORKERS),3) --dist worksteal -m "full and not gpu" $(ARGS)

test-jitter: $(STAMP) ## Run the tests with random pauses of processes and threads; JITTER_SEED=7
	$(BIN)/python -m pytest -p tools.jitter.plugin -n $(or $(WORKERS),2) --dist worksteal \
	  -m "not slow and not gpu" $(ARGS)

test-gpu: $(STAMP) ## Run the GPU tests (docs/gpu.md); GPU_TESTS=small; BUNDLE=FOLDER: no network
	$(BIN)/python -m pytest -m gpu tests/gpu $(ARGS)

rehearse-gpu: $(STAMP) ## Run the code of the GPU tests alone on the CPU, with small models
	GPU_REHEARSAL=1 GPU_REPORT=build $(BIN)/python -m pytest -m gpu -n $(or $(WORKERS),2) --dist worksteal \
	  tests/gpu $(ARGS)

offline-bundle: $(STAMP) ## Collect wheels of constraints.txt, without torch: FOR=3.12 [ONLY="name|name"]
	mkdir -p bundle
	grep -E "^($(or $(ONLY),[^#]*))==" constraints.txt | grep -v ^torch== > bundle/wheels.txt
	$(BIN)/python -m pip download $(QUIET) --no-deps --only-binary=:all: --python-version $(FOR) \
	  --platform manylinux_2_28_x86_64 --platform manylinux_2_17_x86_64 \
	  --platform manylinux2014_x86_64 --dest bundle -r bundle/wheels.txt

soak: $(STAMP) ## Kill and resume a run repeatedly for half an hour
	$(BIN)/python -m tools.soak.soak $(ARGS)

soak-serve: $(STAMP) ## Kill a server, its ranks and fork server while clients use it
	$(BIN)/python -m tools.soak.serve_soak $(ARGS)

soak-fleet: $(STAMP) ## Kill servers of a fleet, ranks and PostgreSQL while clients use it
	$(BIN)/python -m tools.soak.serve_soak --servers 3 $(ARGS)

lint: $(STAMP) ## Check style and formatting
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(STAMP) ## Fix style and formatting
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

types: $(STAMP) ## Check the types
	$(BIN)/mypy

imports: $(STAMP) ## Check which package imports which
	$(BIN)/lint-imports
	@echo "Models and media import no torch.distributed:"
	@$(BIN)/ruff check --isolated --select TID251 --config '$(NO_RANKS)' svdpp/models svdpp/media

pre-commit: $(STAMP) ## Run the hooks on all files: style, files, types, imports, pure tests
	$(BIN)/pre-commit run --all-files --show-diff-on-failure

coverage: $(STAMP) ## Measure which lines of svdpp `make test` runs, in all its processes
	mkdir -p build/coverage
	$(BIN)/coverage erase
	$(BIN)/coverage run -m pytest -n $(or $(WORKERS),2) --dist worksteal $(ARGS)
	$(BIN)/coverage combine -q
	$(BIN)/coverage report

docs: $(STAMP) ## Generate docs/cli.md, and parts of docs/models.md and docs/architecture.md
	$(BIN)/python docs/generate_cli_reference.py

check-docs: $(STAMP) ## Check that these are up to date
	$(BIN)/python docs/generate_cli_reference.py --check

clean: ## Remove caches, builds and the demos' clips; the virtual environment stays
	rm -rf $(DEMO) $(SERVED) build dist \
	  .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find . -path ./$(VENV) -prune -o -path ./.git -prune -o \
	  -type d -name __pycache__ -exec rm -rf {} +

# The environment is created once, and updated when a prerequisite changes. With BUNDLE it takes the
# packages of PYTHON's environment, including torch, and the wheels in that folder.
ifdef BUNDLE
$(STAMP): $(BUNDLE)
	$(PYTHON) -m venv --clear $(VENV)
	@packages=$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))'); \
	  $(PYTHON) -c 'import site; print(*site.getsitepackages(), sep="\n")' > $$packages/outer.pth; \
	  echo "$(CURDIR)" >> $$packages/outer.pth
	$(BIN)/python -m pip install $(QUIET) --no-index --no-deps $(BUNDLE)/*.whl
	@touch $@
else
$(STAMP): EXTRAS := dev
$(VENV)/.installed-runtime: EXTRAS := serve,lora
$(STAMP) $(VENV)/.installed-runtime: pyproject.toml constraints.txt
	@$(BIN)/python -c 'import pip, sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
	  $(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
	    echo "error: svdpp needs Python 3.11 or later; $(PYTHON) --version says" \
	      "$$($(PYTHON) --version 2>&1 || true) - name another: make PYTHON=python3.11" >&2; \
	    exit 1; }; \
	  $(PYTHON) -m venv --clear $(VENV); }
	@echo "Installing the tested versions into $(VENV): PyTorch is large, this may take minutes."
	@$(BIN)/python -m pip install $(QUIET) --no-compile --disable-pip-version-check -c constraints.txt -e '.[$(EXTRAS)]' || { \
	  echo "error: the installation failed; if one was interrupted before: rm -rf $(VENV)" >&2; exit 1; }
	@touch $@
endif
