# Everything a user or developer does. Needs Rust, Python 3 with pip, and make.

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

PYTHON ?= python3
CARGO ?= cargo
# Tools that tests install once, outside the clone.
CACHE ?= $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/kwire-dev
TARGET := $(or $(CARGO_TARGET_DIR),target)
KWIRE := $(TARGET)/release/kwire
MODEL ?= smollm2
PORT ?= 8000
# Other servers to measure beside, e.g. PEER_URLS="http://127.0.0.1:8081 http://127.0.0.1:8082"
PEER_URLS ?=
SUITE ?= cpu

.PHONY: help
help: ## Show this
	@echo "make TARGET, where TARGET is:"
	@grep -hE '^[a-z0-9-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z0-9-]+):.*## /  \1 ~/' | column -t -s '~'

.PHONY: build
build: ## Build the binary for release
	@$(CARGO) build --release --package kwire --bin kwire

.PHONY: cuda-toolchain
cuda-toolchain: ## Find a CUDA compiler (nvcc), or install one outside the clone
	@if [ -n "$${KWIRE_NVCC:-}" ] || [ -n "$${CUDA_HOME:-}" ] || command -v nvcc >/dev/null; then \
	  echo "using the CUDA toolkit of this machine"; \
	else \
	  $(MAKE) --no-print-directory $(CACHE)/cuda/ready; \
	  ln -sf $(CACHE)/cuda/lib/python3*/site-packages/nvidia/cu13/bin/nvcc $(CACHE)/cuda/nvcc; \
	fi

.PHONY: model
model: ## Fetch the small model behind the alias smollm2 (98 MB, once)
	@$(PYTHON) scripts/fetch_smollm2.py >/dev/null

.PHONY: demo
demo: build model ## Start a server, ask it one question, stream the answer, stop it
	@exec $(PYTHON) scripts/demo.py $(KWIRE)

.PHONY: serve
serve: build ## Serve MODEL (default smollm2) on PORT (default 8000)
	@exec $(KWIRE) serve $(MODEL) --port $(PORT)

.PHONY: bench
bench: build model ## Measure MODEL under load, beside the servers in PEER_URLS if given
	@$(PYTHON) scripts/bench.py --suite $(SUITE) --kwire $(KWIRE) --model $(MODEL) $(PEER_URLS)

.PHONY: test
test: lint test-rust test-clients ## Everything that must pass before a commit

.PHONY: lint
lint: fmt clippy tidy deny ## Formatting, lints, style, generated files, dependencies

.PHONY: fmt
fmt:
	$(CARGO) fmt --all --check

.PHONY: clippy
clippy:
	$(CARGO) clippy --workspace --all-targets --quiet -- --deny warnings

.PHONY: tidy
tidy: ## Style as a test, and that generated files are up to date
	$(CARGO) xtask tidy
	$(CARGO) xtask codegen --check

.PHONY: deny
deny: $(CACHE)/lint/ready
	PATH="$(CACHE)/lint/bin:$$PATH" $(CARGO) deny --log-level error check bans licenses sources

.PHONY: test-rust
test-rust: model ## Unit, integration and documentation tests
	$(CARGO) test --workspace

.PHONY: test-clients
test-clients: venv model ## The official OpenAI client against a running server
	@$(CARGO) build --package kwire --quiet
	@$(CACHE)/test/bin/python scripts/test_openai_client.py $(TARGET)/debug/kwire

.PHONY: venv
venv: $(CACHE)/test/ready ## The Python environment of the client tests, outside the clone

# One environment a requirements file; it is made anew when the file changes.
$(CACHE)/%/ready: scripts/requirements-%.txt
	@rm -rf $(@D) && mkdir -p $(dir $(@D))
	@$(PYTHON) -m venv $(@D)
	@$(@D)/bin/python -m pip install --quiet --disable-pip-version-check --requirement $<
	@touch $@
