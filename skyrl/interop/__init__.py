"""Converts files of other systems to layers of our tree, and reports the outcome of every line. Nothing is started.

Read `report.py` first (the result of a conversion), then `translation.py` (one setting), `systems.py` (a whole file by
the tables of its system), and a system, such as `verl/convert.py`.
"""
