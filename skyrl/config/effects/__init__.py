"""Conditions under which a setting acts: what is set and has no effect is warned about."""
