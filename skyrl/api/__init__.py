"""The library in Python: `skyrl.train`, `load`, `evaluate` and `generate`, and the `Run` that the first two return."""
