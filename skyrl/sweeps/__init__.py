"""Sweeps: one run many times over, with other values.

Read `points.py` first: which values. `trials.py` gives each distinct training a number and a folder, `running.py`
trains what is not trained yet, and `results.py` compares.
"""
