"""Commands that train: here, in the background, on a cluster, or many times with different values."""
