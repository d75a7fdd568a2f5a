"""Running a run: its folder and lock, resuming, checkpoints, what is recorded, and how it ends."""
