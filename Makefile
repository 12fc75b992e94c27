# Everything a developer runs. `make` alone lists the targets.

FUZZTIME ?= 5s

.DEFAULT_GOAL := help

.PHONY: help
help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

.PHONY: build
build: ## build every package, and the launcher as .bin/launcher
	go build ./...
	go build -o .bin/launcher ./launcher

.PHONY: test
test: ## run all tests
	go test ./...

.PHONY: race
race: ## run the tests under the race detector, without the long ones
	go test -race -short ./...

.PHONY: fuzz-smoke
fuzz-smoke: ## run every fuzz target for FUZZTIME (5s)
	FUZZTIME=$(FUZZTIME) .ci/fuzz

.PHONY: vet
vet: ## run go vet
	go vet ./...

.PHONY: fmt
fmt: ## format all Go files
	gofmt -w .

.PHONY: lint
lint: ## run the linters of .golangci.yml
	.ci/lint

.PHONY: deadcode
deadcode: ## find functions that nothing calls
	.ci/deadcode

.PHONY: generate
generate: ## generate the assembly kernels again
	go generate ./internal/compute/kernel

.PHONY: bench
bench: ## run the Go benchmarks; bench/ has the comparisons with others
	go test -run '^$$' -bench . -count 3 ./...

.PHONY: ci
ci: ## run everything that a change has to pass
	.ci/run
