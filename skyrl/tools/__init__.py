"""Offline tools over finished or recorded runs: replay, bisect, compare, export, simulate."""
