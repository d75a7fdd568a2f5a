"""Configurations of verl."""
