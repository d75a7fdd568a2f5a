"""Starting things and talking to them, without knowing what they are: in this process, or as Ray actors.

Read `handles.py` first: it is how a caller sees what was started. `in_process.py` and `ray_processes.py` keep that
contract; the latter is put together from the cluster, the placement, the host (the actor around an object), the watch
and the handle. Nothing here imports torch, and only the modules named `ray_*` import ray.
"""
