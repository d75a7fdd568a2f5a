"""Sweeps: one run, repeated with different values.

Read `sweep_file.py` first: it defines the values. `trials.py` gives each distinct training a number and a folder,
`running.py` trains the ones that are missing, and `results.py` compares them.
"""
