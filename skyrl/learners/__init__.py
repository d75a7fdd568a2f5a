"""Policy, critic and reference: models that score tokens and, except for the reference, learn, on one or more ranks.

Read `workers/roles.py` first: it defines the roles. `strategy.py` is the protocol for spreading a model over ranks.
"""
