"""Arithmetic of sizes: which process computes on which GPUs, and which rank gets how many samples. Numbers in, numbers
out.

Read `layout.py` first: it is what a run looks like, and where it fits on a cluster. `sizes.py` makes a layout from
sizes; `batches.py` deals samples to ranks.
"""
