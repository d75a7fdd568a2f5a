"""Policy, critic and reference: models that score tokens and, but for the reference, learn, on one rank or on many.

Read `workers.py` first: it is the roles. `strategy.py` is what a way of spreading a model has to offer.
"""
