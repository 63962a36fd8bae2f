# Every target works alone on a fresh clone. `make` lists them.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
MAKEFLAGS += --no-print-directory

# Arguments for the programs behind `test`, `bench` and `cluster`, such as TEST_ARGS="-p branchpool-crds".
TEST_ARGS ?=
BENCH_ARGS ?= all
CLUSTER_ARGS ?=

.PHONY: help
help: ## List the targets
	@awk -F ':.*## ' '/^[a-z][a-z-]*:.*## / { printf "  make %-13s %s\n", $$1, $$2 }' Makefile

.PHONY: demo
demo: setup ## Start one node, lease branches of a sample database, show that they are separate (root)
	@scripts/demo

.PHONY: cluster
cluster: ## Leave a Kubernetes with two nodes, the chart and a sample pool running here (root)
	@scripts/setup cluster
	@scripts/build-kubernetes >/dev/null
	@cargo run --quiet --locked --package branchpool-e2e-kubernetes --bin branchpool-cluster -- up $(CLUSTER_ARGS)

.PHONY: cluster-down
cluster-down: ## Remove that cluster
	@cargo run --quiet --locked --package branchpool-e2e-kubernetes --bin branchpool-cluster -- down

.PHONY: images
images: ## Build the images of operator and agent as OCI archives in target/images (root)
	@scripts/setup cluster
	@scripts/build-images --release

.PHONY: test
test: ## Run every test, against real Btrfs and real Postgres, with real drivers (root)
	@scripts/setup test $(TEST_ARGS)
	@scripts/test $(TEST_ARGS)

.PHONY: lint
lint: ## Format, clippy, generated files, minimum Rust, licences, documentation
	@scripts/lint

.PHONY: fmt
fmt: ## Format the code
	@cargo fmt --all

.PHONY: bench
bench: ## Measure hand-out and refill beside bare system calls, the gateway beside pgbouncer, Kubernetes beside bare objects (root)
	@scripts/setup bench $(BENCH_ARGS)
	@cargo build --quiet --locked --release --package branchpool-agent --package branchpool-operator
	@cargo run --quiet --locked --release --package branchpool-bench -- $(BENCH_ARGS)

.PHONY: generate
generate: ## Write the generated files anew: CRD manifests, their reference page, metrics, golden files of the chart
	@cargo run --quiet --locked --package branchpool-crds --bin crdgen
	@BRANCHPOOL_GENERATE=1 cargo test --quiet --locked --package branchpool-agent --package branchpool-operator --lib metrics >/dev/null
	@BRANCHPOOL_GENERATE=1 cargo test --quiet --locked --package branchpool-e2e-chart >/dev/null

.PHONY: audit
audit: ## Look for known vulnerabilities in the dependencies (network)
	@cargo deny --all-features check advisories

.PHONY: setup
setup: ## Install what the demo needs and the machine lacks (root; silent when nothing is missing)
	@scripts/setup

.PHONY: clean
clean: ## Remove everything that was built, and the cluster if it runs
	@[ ! -e "$${CARGO_TARGET_DIR:-target}/kubernetes/clusters/cluster.lock" ] || $(MAKE) cluster-down
	@cargo clean
