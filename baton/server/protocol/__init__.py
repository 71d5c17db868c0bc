"""The bodies of requests and answers: OpenAI's words and vLLM's extensions. Values only."""
