"""A session on a GPU that is rented for minutes, as a program: what it measures is rehearsed on a CPU before.

    python -m benchmarks.gpu_session run --list                       stages, in order of importance
    python -m benchmarks.gpu_session run --out OUT [--only STAGE ...]
    python -m benchmarks.gpu_session run --device cpu --shape tiny --out OUT
    python -m benchmarks.gpu_session merge OUT ... --page docs/gpu.md

`stages.py` lists the stages. `runner.py` runs each in a process of its own, which is killed at its limit and writes
`OUT/STAGE.json` after every measurement; the same command goes on with what is missing. `page.py` makes the tables of
docs/gpu.md from these files, `parts.py` carries packages and models to a machine without a network.
"""
