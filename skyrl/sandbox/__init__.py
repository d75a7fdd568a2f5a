"""Sandboxes: run untrusted programs under limits of time, memory, files and network.

Start at `sandbox.py`; `tiers.py` says what each tier of confinement promises.
"""
