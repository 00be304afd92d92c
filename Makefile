# Everything a fresh Debian 12 machine needs is installed by these targets. Run as root.
.PHONY: help demo test testbed build lint fmt up down bench bench-docker openapi deps clean
.DEFAULT_GOAL := help

CARGO ?= cargo
BIN := target/bin
STATE ?= /var/lib/dsec
LISTEN ?= 127.0.0.1:7420

help: ## This list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 16

deps: ## Installs what building, running and testing need
	@scripts/deps build run test

build: ## Builds the six programs into target/bin
	@scripts/deps build
	$(CARGO) build --release --locked -p dsec -p dsec-control -p dsec-edge -p dsec-fill -p dsec-sim
	@scripts/build-agent
	@mkdir -p $(BIN)
	@install -m 0755 $(addprefix target/release/,dsec dsec-control dsec-edge dsec-fill dsec-sim) $(BIN)/
	@install -m 0755 -s target/agent/release/dsec-aether $(BIN)/

demo: build ## Builds, starts the platform, runs 64 rollouts of real repositories, stops everything
	@scripts/deps run
	@demo/run

test: build ## Installs what is missing and passes all tests
	@scripts/deps run test
	@scripts/test

testbed: build ## What depends on the host's kernel, on Debian's 6.12 with cgroup version 2, under QEMU
	@scripts/testbed

lint: ## Formatting, lints and the repository's own rules
	$(CARGO) fmt --all --check
	$(CARGO) clippy --release --locked --workspace --all-targets -- -D warnings
	$(CARGO) run --release --locked -q -p xtask -- tidy

fmt: ## Formats the code
	$(CARGO) fmt --all

up: build ## Starts the platform and leaves it running (STATE=/var/lib/dsec LISTEN=127.0.0.1:7420)
	@scripts/deps run
	$(BIN)/dsec up --detach --state-dir $(STATE) --listen $(LISTEN)

down: ## Ends every sandbox and process of the platform and leaves nothing
	$(BIN)/dsec down --state-dir $(STATE)

bench: build ## Measures creates, execs, output and files on this machine
	@scripts/deps run
	@bench/run

bench-docker: build ## The same work on Docker, side by side
	@scripts/deps run docker
	@bench/vs-docker

openapi: ## Writes openapi/dsec.json from the code
	$(CARGO) run --release --locked -q -p xtask -- openapi

clean: ## Removes what was built
	$(CARGO) clean
	rm -rf .venv .dsec
