"""Judges upstream source against our contracts (verl_fuse/spec/contract.py); imports nothing of what it reads."""
