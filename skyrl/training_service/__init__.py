"""The training service: clients hold the loop and call `forward_backward`, `optim_step` and `sample`; it holds the
model.
"""
