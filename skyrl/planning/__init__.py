"""Arithmetic of sizes: which process computes on which GPUs, and how many samples each rank gets. Pure functions.

Read `layout.py` first: it defines the layout of a run, and fits it on a cluster. `sizes.py` makes a layout from sizes;
`batches.py` distributes samples over ranks.
"""
