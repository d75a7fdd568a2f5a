"""A stand-in for reasoning-gym: two tasks, with the names, fields and base class that the environment touches."""
