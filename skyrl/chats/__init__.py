"""Conversations rendered with a model's chat template: text, tokens, and a mask of the learned tokens.

Start with `masks.py`: supervised training, evaluation and reward models all tokenize a chat there.
"""
