"""Reinforcement-learning post-training of language models, driven by a configuration that can be trusted.

`skyrl.config` defines the fields of a run's configuration, `skyrl.training` is the loop, and `skyrl.experiments`
assembles a run. Importing this package imports none of them.
"""

__version__ = "0.1.0"
