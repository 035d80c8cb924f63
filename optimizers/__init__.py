"""Optimizers and their parts: LAMB, LARS, the running estimates of NGD, parameter groups, learning-rate schedules."""
