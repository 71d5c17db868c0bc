# Commands for developers and CI. Each first sets up .venv (test-vllm: .venv-vllm, or .venv-vllm-0.33.0 with V).
.PHONY: demo test test-clients test-machine test-python test-vllm check sim chaos soak mutants bench format clean

demo:      ; @scripts/demo $(ARGS)
test:      ; @scripts/test $(ARGS)
# Over the kernels of .venv-vllm, another release: make test-vllm V=0.33.0
test-vllm: ; @V=$(V) scripts/test-vllm $(ARGS)
# Clients that people use with vLLM (openai, LangChain, litellm, lm-eval and others), in .venv-clients
test-clients: ; @scripts/test-clients $(ARGS)
check:     ; @scripts/check
sim:       ; @scripts/sim $(ARGS)
chaos:     ; @scripts/chaos $(ARGS)
soak:      ; @scripts/soak $(ARGS)
mutants:   ; @scripts/mutants $(ARGS)
# Run the tests as on another machine: make test-machine M=avx2, M=load or M=python
test-machine: ; @scripts/test-machine $(M) $(ARGS)
# Run the tests with another Python: make test-python V=3.13
test-python: ; @PYTHON=python$(V) VENV=.venv-$(V) scripts/test $(ARGS)
bench:     ; @scripts/bench $(ARGS)

format:
	@scripts/setup
	@.venv/bin/ruff format .
	@.venv/bin/ruff check --fix .

clean:
	rm -rf .venv .venv-* .setup.lock .setup-vllm.lock .setup-clients.lock .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis mutants
