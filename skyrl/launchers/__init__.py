"""Starts runs on machines: this one, a running Ray cluster, or Slurm.

Read `job.py` first: what is started. `slurm.py`, `local.py` and `ray.py` each start, show and stop it; `sbatch.py`
writes the script of a Slurm job, and `node.py` is what that script runs on each node.
"""
