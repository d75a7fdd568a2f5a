"""Starts runs on machines: this one, a running Ray cluster, or Slurm.

Read `job.py` first: it defines a job. `slurm.py`, `local.py` and `ray.py` start, show and stop jobs; `sbatch.py` writes
the script of a Slurm job, and that script runs `node.py` on each node.
"""
