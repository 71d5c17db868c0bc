# The same commands for people and for CI. Each sets up .venv (test-vllm: .venv-vllm) by itself.
.PHONY: demo test test-python test-vllm check chaos soak bench format clean

demo:      ; @scripts/demo $(ARGS)
test:      ; @scripts/test $(ARGS)
test-vllm: ; @scripts/test-vllm $(ARGS)
check:     ; @scripts/check
.PHONY: demo test test-python test-vllm check chaos soak bench format clean
bench:     ; @scripts/bench $(ARGS)

format:
	@scripts/setup
	@.venv/bin/ruff format .
	@.venv/bin/ruff check --fix .

clean:
	rm -rf .venv .venv-* .setup.lock .setup-vllm.lock .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis
