"""prime-rl: its files of reinforcement learning."""
