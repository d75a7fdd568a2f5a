"""Attention of packed rows, of shared prompts and of sequences that are cut over ranks."""
