"""Programs and configurations of TRL."""
