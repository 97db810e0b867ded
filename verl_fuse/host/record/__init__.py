"""Keeps the record of a run: spans, accounts, log lines."""
