"""Commands that estimate a run without starting it: GPUs, memory, time, and a rehearsal."""
