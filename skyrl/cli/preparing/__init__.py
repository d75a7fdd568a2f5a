"""Commands before a run: a first task, its configuration, its data, its model, and this machine."""
