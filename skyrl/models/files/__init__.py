"""Files of a model: where they lie, what they say, how they are loaded."""
