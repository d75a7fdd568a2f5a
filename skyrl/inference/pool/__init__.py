"""Several engines as one: admission, routing, restarts."""
