"""Starts runs on machines: this one, a running Ray cluster, or Slurm.

Read `job.py` first: it defines a job. `local.py`, `ray.py` and `slurm.py` start, show and stop jobs; the script of a
Slurm job runs `node.py` on each node.
"""
