"""The loop, from groups of trajectories to updated weights, and evaluation. Collaborators are passed in ready-made."""
