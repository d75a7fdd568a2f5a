"""Folders of files, on a disk or in an object store, behind the same few operations: see `disk.py`."""
