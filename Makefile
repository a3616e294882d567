# make bench      run the experiment (without an NVIDIA GPU: a rehearsal of it)
# make test       run the tests
# make test-fast  one case of every contract: two minutes at most
# make check      lint and types
# make plot       draw the published picture and README tables again from results.json
#
# Each makes the environment it needs in .venv first. PYTHON=python3.12 picks another interpreter.

PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin/python

bench: $(VENV)/bench
	$(RUN) lora_bench.py

test: $(VENV)/dev
	$(RUN) -m pytest -n 2

test-fast: $(VENV)/dev
	$(RUN) -m pytest -n 2 -m fast

check: $(VENV)/dev
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy .

plot: $(VENV)/bench
	$(RUN) lora_bench.py --plot-only

clean:
	rm -rf $(VENV)

$(VENV)/base: requirements.txt
	$(PYTHON) -m venv $(VENV)
	$(RUN) -m pip install --quiet -r requirements.txt
	touch $@

# the peers want a GPU to be installed for; without one Unsloth is recorded as unavailable
$(VENV)/bench: $(VENV)/base requirements-peers.txt
	@if nvidia-smi >/dev/null 2>&1; then \
		$(RUN) -m pip install --quiet -r requirements.txt -r requirements-peers.txt \
		|| echo "The peers could not be installed: full Unsloth will be recorded as unavailable."; fi
	touch $@

$(VENV)/dev: $(VENV)/base requirements-dev.txt
	$(RUN) -m pip install --quiet -r requirements.txt -r requirements-dev.txt
	touch $@

.PHONY: bench test test-fast check plot clean
