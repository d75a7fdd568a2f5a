"""Learning with DeepSpeed's ZeRO."""
