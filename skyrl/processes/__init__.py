"""Starts objects and calls their methods, in this process or in Ray actors, without knowing what they do.

Read `handles.py` first: it defines how a caller sees the objects. `in_process.py` and `ray/processes.py` implement that
contract; the latter consists of the cluster, the placement, the host (the actor around an object) and the watch
with the handles. Nothing here imports torch, and only modules in `ray/`, and `naming/names_in_ray.py`, import ray.
"""
