"""Searches for settings that fit the machines: `skyrl plan --fit`."""
