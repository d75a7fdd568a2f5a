"""The HTTP endpoint: serves the policy in OpenAI's and Anthropic's protocols.

    http/server.py --> http/app.py --> protocols/ (one module for each wire format) --> policy.py --> engines

Start with `policy.py`. A request with the key of a trajectory is recorded token-exactly (`conversations.py`) and
becomes training rows.
"""
