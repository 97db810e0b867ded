"""What happened in a run: spans, accounts, log lines."""
