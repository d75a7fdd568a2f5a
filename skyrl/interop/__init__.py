"""Files of other houses become layers of our tree, with a report of what became of every line. Nothing is started.

Read `report.py` first (what a conversion says), then `skyrl_scripts.py` and `areal.py`.
"""
