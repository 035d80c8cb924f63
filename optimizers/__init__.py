"""Optimizers and what they are made of: LAMB, LARS, estimates of NGD, schedules, groups."""
