"""Sources of prompts, their filters and order, and the cursor for resuming."""
