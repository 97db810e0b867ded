"""Finds the devices and the layout of each model call of a step: legal options, exact evaluation, search with a
bound."""
