"""Stands for SGLang's package where a run starts its server."""
