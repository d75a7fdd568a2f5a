"""Processes on Ray."""
