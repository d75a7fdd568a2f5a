"""Prompts in, groups of trajectories out: chat templates, loss masks, filters and refilling."""
