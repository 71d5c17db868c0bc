# The same commands for people and for CI. Each sets up .venv by itself.
.PHONY: demo test check bench format clean

demo:    ; @scripts/demo $(ARGS)
test:    ; @scripts/test $(ARGS)
check:   ; @scripts/check
bench:   ; @scripts/bench $(ARGS)

format:
	@scripts/setup
	@.venv/bin/ruff format .
	@.venv/bin/ruff check --fix .

clean:
	rm -rf .venv .setup.lock .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis
