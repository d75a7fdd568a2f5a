"""The HTTP endpoint: the policy, as programs that speak OpenAI's or Anthropic's protocol see it.

    server.py --> app.py --> chat.py, completions.py, ... (one module for each wire format) --> policy.py --> engines

Start with `policy.py`. A request that brings the key of a trajectory is recorded token-exactly (`conversations.py`),
and becomes rows of training.
"""
