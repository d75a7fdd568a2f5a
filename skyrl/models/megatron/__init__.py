"""Models of Megatron-Core, and the conversion of their weights."""
