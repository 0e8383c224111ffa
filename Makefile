# One command each: `make demo` and `make test` do all their own set-up on an empty machine.
SHELL := /bin/bash
VENV := .venv
PY := $(VENV)/bin/python
# Where `preread serve` looks for the model by default.
DATA := $(or $(PREREAD_DATA_DIR),$(or $(XDG_DATA_HOME),$(HOME)/.local/share)/preread)
MODEL := $(DATA)/models/demo
ADAPTER := examples/demo_model/adapter/adapter_model.safetensors
MADE_OF := adapter.cksum

.PHONY: setup model demo serve servers test long llamacpp storms browser chaos fuzz check kernels docs bench bench-docs clean

# What runs Preread and makes the demo model.
$(VENV)/.run: pyproject.toml constraints.txt scripts/setup.sh
	scripts/setup.sh run $(VENV)

# What tests and checks it, beside that.
$(VENV)/.ready: $(VENV)/.run
	scripts/setup.sh tools $(VENV)

setup: $(VENV)/.ready

# Not a file target: make cannot name a file below a home folder with a blank in its name. A model of another adapter than
# the one that is here now, or of a version that looked for no index heads, is made again.
model: $(VENV)/.run
	@[ -f "$(MODEL)/index_heads.json" ] && [ "$$(cat "$(MODEL)/$(MADE_OF)" 2>/dev/null)" = "$$(cksum < $(ADAPTER))" ] || { \
		echo "Making the demo model (once, some minutes) ..." && \
		$(VENV)/bin/preread models demo --replace && cksum < $(ADAPTER) > "$(MODEL)/$(MADE_OF)"; }

demo: model
	$(PY) examples/demo.py

serve: model
	$(VENV)/bin/preread serve

check: setup
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/pyright
	$(VENV)/bin/lint-imports
	$(PY) scripts/size_budget.py

# Pages that are made from the code: the REST reference, the settings, .env.example.
docs: $(VENV)/.run
	$(PY) scripts/write_docs.py

# Tests of the card's engine without a card: its kernels in Triton's interpreter, and compiled for every architecture.
kernels: setup
	OMP_NUM_THREADS=1 $(PY) -m pytest -q -n 3 --dist loadfile tests/service/engine/exl2_engine

# The demo model on documents that are longer than its context, and on several at once.
long: setup model
	OMP_NUM_THREADS=1 OMP_WAIT_POLICY=PASSIVE PREREAD_TEST_MODEL="$(MODEL)" $(PY) -m pytest -q -n 3 --dist loadfile -m long \
		tests/benchmarks tests/e2e tests/service/engine/host

# The engine over llama.cpp, which is compiled for it: minutes the first time. The demo model is made as a GGUF beside the
# other one.
GGUF_MODEL := $(DATA)/models/demo-gguf
llamacpp: setup
	scripts/llamacpp.sh $(VENV)
	[ -f "$(GGUF_MODEL)/model.gguf" ] || $(VENV)/bin/preread models demo --engine llamacpp --name demo-gguf
	PREREAD_TEST_GGUF_MODEL="$(GGUF_MODEL)" $(PY) -m pytest -q tests/llamacpp

# Every fault of `make chaos` once.
storms: setup servers
	$(PY) -m pytest -q -m storm tests/chaos

# The page in real Chromium. SCREENSHOTS=docs/images writes the pictures of the docs again.
browser: setup
	scripts/browser.sh $(VENV)
	$(PY) -m pytest -q tests/browser $(if $(SCREENSHOTS),--screenshots $(SCREENSHOTS))

# Redis and PostgreSQL, which the tests start.
servers:
	scripts/servers.sh

# The model is made while the tools are installed and the checks run. Threads that spin while they wait would take the
# others' cores.
SIDE_BY_SIDE = --no-print-directory -j4 $(if $(filter output-sync,$(.FEATURES)),--output-sync=line)
test: export OMP_WAIT_POLICY := $(or $(OMP_WAIT_POLICY),PASSIVE)
test:
	@$(MAKE) $(SIDE_BY_SIDE) servers check model
	PREREAD_TEST_MODEL="$(MODEL)" scripts/test.sh

# Faults of every part at random moments, each TIMES times. `make chaos CASE=kill_redis TIMES=50` is one of them,
# `make chaos ENGINE=model` the worst five with the demo model; WORLDS installations share the cases, and WRITE=1 adds
# what was seen to docs/faults.md.
chaos: setup servers $(if $(filter model,$(ENGINE)),model)
	$(PY) -m tests.chaos.run --times $(or $(TIMES),$(if $(filter model,$(ENGINE)),5,20)) --worlds $(or $(WORLDS),1) \
		$(addprefix --case ,$(CASE)) $(if $(filter model,$(ENGINE)),--model "$(MODEL)") $(if $(WRITE),--write)

# Requests that nobody would write, made from the schema, and damaged files, against a real server with a fake engine:
# three quarters of an hour at most.
fuzz: setup
	$(PY) -m tests.fuzz.run_schema --minutes 12 --open --examples 30
	$(PY) -m tests.fuzz.run_schema --minutes 12 --examples 100 $(if $(WRITE),--write)
	$(PY) -m tests.fuzz.run_uploads --minutes 20 --total $(or $(TOTAL),2400) $(if $(WRITE),--write)

bench: model
	$(PY) benchmarks/resume.py --write
	$(PY) benchmarks/decode_parts.py --write

# What docs/bench.md shows, on a quiet machine: under eight minutes on two cores. NAME is that of the files in docs/bench,
# ARGS are for `preread bench`.
bench-docs: model
	$(VENV)/bin/preread bench --minutes 6 --out docs/bench/$(or $(NAME),cpu-$(shell nproc)-cores).json \
		--svg docs/bench/$(or $(NAME),cpu-$(shell nproc)-cores).svg $(ARGS)
	$(PY) scripts/write_docs.py

clean:
	rm -rf $(VENV) .demo
