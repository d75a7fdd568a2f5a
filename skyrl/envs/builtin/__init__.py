"""Environments that come with skyrl; `search` and `text2sql` lie above, since the tools are made of them."""
