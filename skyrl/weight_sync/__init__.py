"""Weight transfer from learner to engines as one operation: pause, send, verify, reset caches, version, resume."""
