"""Engines of vLLM in the processes of a run."""
