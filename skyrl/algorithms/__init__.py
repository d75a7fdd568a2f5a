"""Pure tensor functions: advantages, losses, KL, corrections and reductions, each with its paper."""
