"""Policy, critic and reference: models that score tokens and, but for the reference, learn."""
