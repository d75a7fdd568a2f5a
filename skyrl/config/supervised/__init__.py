"""Supervised fine-tuning and reward models: their trees (`root.py`), rules, checks, effects and kinds of run."""
