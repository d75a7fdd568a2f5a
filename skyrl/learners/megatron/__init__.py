"""Learning with Megatron-Core."""
