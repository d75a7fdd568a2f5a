"""Configurations and launch scripts of SkyRL."""
