"""Variables that vLLM reads."""

environment_variables = {"VLLM_MLA_DISABLE": lambda: False, "VLLM_PORT": lambda: None}
