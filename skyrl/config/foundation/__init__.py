"""What all other parts of the configuration rest on: the entry class, names, intervals, references to code."""
