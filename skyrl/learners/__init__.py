"""Policy, critic, reference and teacher: models that score tokens; policy and critic learn, on one or more ranks.

Read `workers/roles.py` first: it defines the roles. `strategy.py` is the protocol for spreading a model over ranks.
"""
