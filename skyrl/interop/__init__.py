"""Converts files of other systems to layers of our tree, and reports the outcome of every line. Nothing is started.

Read `report.py` first (the result of a conversion), then `skyrl/scripts.py` and `areal/convert.py`.
"""
