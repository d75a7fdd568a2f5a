"""Commands on a run in progress or finished: watch, compare, evaluate, export."""
