"""The host's contracts with upstream, one module per seam. Light: nothing of upstream is imported.

Every fingerprint was taken, and the code behind it read, at the versions of READ_AT.
"""

READ_AT = {"verl": "0.9.1", "transfer_queue": "0.1.11", "vllm": "0.28.0"}
