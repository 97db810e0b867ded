"""Holds the host's contracts with upstream, one module per seam. The package is light: it imports no module of
upstream.

Every fingerprint was taken, and its code read, at the versions of READ_AT.
"""

READ_AT = {
    "verl": ("0.9.1",),
    "transfer_queue": ("0.1.11",),
    "vllm": ("0.24.0", "0.25.0", "0.25.1", "0.26.0", "0.27.0", "0.27.1", "0.28.0", "0.29.0", "0.31.0"),
    "torch": ("2.11.0", "2.13.0"),
    "megatron": ("0.16.1",),
    "mbridge": ("0.15.1",),
}
