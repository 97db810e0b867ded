"""Judges upstream source against our contracts (verl_fuse/spec/contract.py); imports no module that it reads."""
