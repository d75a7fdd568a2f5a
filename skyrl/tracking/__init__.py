"""Trackers: metrics and samples to console, files and tracking services."""
