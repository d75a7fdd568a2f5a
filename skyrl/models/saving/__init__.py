"""Models written as files that transformers and vLLM load."""
