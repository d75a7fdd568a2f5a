"""Arithmetic of sizes: which process computes on which GPUs, and how many samples each rank gets. Pure functions.

Read `layout.py` first: it lays out a run of given sizes, and fits the layout on a cluster; `batches.py` distributes
samples over ranks.
"""
