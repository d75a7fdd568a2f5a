"""Checks of a resolved reinforcement-learning run: one small function for each rule that involves several fields.

Each yields problems with a remedy, and is listed in the tuple at the end of its module, which
`loading/kinds.py` puts together.
"""
