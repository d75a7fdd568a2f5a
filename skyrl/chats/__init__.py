"""Conversations as a model's chat template writes them: text, tokens, and which tokens are learned.

Start with `masks.py`: supervised training, evaluation and reward models all tokenize a chat there.
"""
