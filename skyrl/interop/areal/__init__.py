"""Configurations of AReaL."""
