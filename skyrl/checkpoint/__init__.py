"""Checkpoints: everything a run needs to resume, stored whole or not at all."""
