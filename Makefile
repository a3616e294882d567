# make bench      run the experiment (without an NVIDIA GPU: a rehearsal of it)
# make test       run the tests that a change waits for: seven minutes on two slow cores
# make test-all   run all of them
# make test-rest  run those that make test leaves out
# make check      lint, types, and who may import whom
# make plot       draw the published pictures and tables again
# make test-newest     the kernels' and adoption's tests with the newest torch, triton, transformers, peft and TRL
# make resolve-peers   can the peers' pins be installed beside requirements.txt, and which releases are the newest? (installs nothing)
#
# Each makes the environment it needs in .venv first (test-newest in .venv-newest). PYTHON=python3.12 picks
# another interpreter. CPU=1 takes PyTorch's CPU build: without it an environment takes 5.4 GB, most of
# it CUDA.

PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin/python
NEWEST := .venv-newest
# a process a core, each of up to 2 GB of memory: make test PYTEST="-m pytest -n 2" takes less
PYTEST := -m pytest -n auto --maxprocesses 8

bench: $(VENV)/bench
	$(RUN) lora_bench.py

test: $(VENV)/dev
	$(RUN) $(PYTEST) --quick

test-all: $(VENV)/dev
	$(RUN) $(PYTEST)

test-rest: $(VENV)/dev
	$(RUN) $(PYTEST) --rest

test-newest: $(NEWEST)/done
	$(NEWEST)/bin/python $(PYTEST) --quick tests/fused_mlp tests/fused_lora

resolve-peers: $(VENV)/base
	$(RUN) -m pip install --quiet --dry-run -r requirements.txt -r dev/requirements/peers.txt
	$(RUN) -m pip install --dry-run --no-deps --upgrade $$(sed -n 's/==.*//p' dev/requirements/peers.txt) | tail -1

check: $(VENV)/dev
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy .
	PYTHONPATH=. $(VENV)/bin/lint-imports

plot: $(VENV)/bench
	$(RUN) lora_bench.py --plot-only

clean:
	rm -rf $(VENV) $(NEWEST)

TORCH := $(shell grep '^torch==' requirements.txt)

$(VENV)/base: requirements.txt
	$(PYTHON) -m venv $(VENV)
ifdef CPU
	$(RUN) -m pip install --quiet $(TORCH) --index-url https://download.pytorch.org/whl/cpu
else
	@nvidia-smi >/dev/null 2>&1 || [ "$$(uname)" != Linux ] || echo "No NVIDIA GPU here: pip will take" \
		"5 to 11 minutes and 5.4 GB, most of it CUDA. make $(MAKECMDGOALS) CPU=1 leaves that out."
endif
	$(RUN) -m pip install --quiet -r requirements.txt
	touch $@

# the peers want a GPU to be installed for; without one Unsloth is recorded as unavailable
$(VENV)/bench: $(VENV)/base dev/requirements/peers.txt
	@if nvidia-smi >/dev/null 2>&1; then \
		$(RUN) -m pip install --quiet -r requirements.txt -r dev/requirements/peers.txt \
		|| echo "The peers could not be installed: full Unsloth will be recorded as unavailable."; fi
	touch $@

$(VENV)/dev: $(VENV)/base dev/requirements/dev.txt
	$(RUN) -m pip install --quiet -r requirements.txt -r dev/requirements/dev.txt
	touch $@

$(NEWEST)/done: dev/requirements/newest.txt
	$(PYTHON) -m venv $(NEWEST)
	$(NEWEST)/bin/python -m pip install --quiet -r dev/requirements/newest.txt
	touch $@

.PHONY: bench test test-all test-rest test-newest check resolve-peers plot clean
