"""Estimates of memory and time for a resolved configuration."""
