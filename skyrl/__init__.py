"""Reinforcement-learning post-training of language models, driven by a configuration that can be trusted.

`skyrl.config` is what a run may say, `skyrl.training` is the loop, and `skyrl.experiments` puts a run together.
Importing this package imports none of them.
"""

__version__ = "0.1.0"
