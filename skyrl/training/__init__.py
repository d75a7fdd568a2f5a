"""The loop, from groups of trajectories to updated weights, and evaluation. Its collaborators come built."""
