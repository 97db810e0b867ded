"""Computes a checksum of a buffer, the same on every device.

Invariants (tests/unit/runtime/test_holding.py):
- a changed byte, or two different words in exchanged places, change the checksum.
"""

import torch

# Words summed at a time: the number keeps the sums within 64 bits.
WORDS = 1 << 18
CHECKSUM_BYTES = 16


def checksum(buffer: torch.Tensor) -> torch.Tensor:
    """Return the sum and the place-weighted sum of a buffer's bytes, as 16 bytes."""
    total = torch.zeros(2, dtype=torch.int64, device=buffer.device)
    for begin in range(0, buffer.numel(), WORDS):
        words = buffer[begin : begin + WORDS].to(torch.int64)
        places = torch.arange(begin + 1, begin + 1 + words.numel(), device=buffer.device)
        total += torch.stack([words.sum(), (words * places).sum()])
    return total.view(torch.uint8)
