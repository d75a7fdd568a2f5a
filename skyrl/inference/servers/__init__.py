"""Engines behind HTTP servers: vLLM, SGLang and the policy of another run."""
