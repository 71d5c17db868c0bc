"""Request and response bodies of OpenAI's API with vLLM's extensions, as plain values."""
