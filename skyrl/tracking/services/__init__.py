"""Trackers that are services, fed by a process of their own."""
