"""`python -m ci.gpu.attention` compares the flash-attn that is installed, or stands in, with plain attention.

Results and gradients of packed rows, causal and full, in bfloat16; both are compared with float32, and the flash
kernel may be FURTHER times as far from it as plain attention in bfloat16 is. It exits with 1 where it is further: a run
of verl would train on it all the same.
"""

import argparse
import sys
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

LENGTHS = (37, 64, 101)
HEADS, KEY_HEADS, WIDTH = 4, 2, 64
FURTHER = 2.0

Attention = Callable[[Tensor, Tensor, Tensor, Tensor, int, bool], Tensor]


def plain(query: Tensor, key: Tensor, value: Tensor, offsets: Tensor, longest: int, causal: bool) -> Tensor:
    """Return the attention of packed rows, a row after the other."""
    rows = []
    for begin, end in zip(offsets.tolist(), offsets.tolist()[1:], strict=False):
        q, k, v = (each[begin:end].transpose(0, 1)[None] for each in (query, key, value))
        rows.append(scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)[0].transpose(0, 1))
    return torch.cat(rows)


def installed(query: Tensor, key: Tensor, value: Tensor, offsets: Tensor, longest: int, causal: bool) -> Tensor:
    from flash_attn import flash_attn_varlen_func  # pyright: ignore[reportMissingImports]

    return flash_attn_varlen_func(query, key, value, offsets, offsets, longest, longest, causal=causal)


def compare(attention: Attention, device: str) -> dict[str, tuple[float, float]]:
    """Return, of the result and each gradient, how far `attention` and plain attention are from float32."""
    numbers = torch.Generator().manual_seed(0)
    tokens = sum(LENGTHS)
    offsets = torch.tensor([0, *torch.tensor(LENGTHS).cumsum(0).tolist()], dtype=torch.int32, device=device)
    shapes = [(tokens, heads, WIDTH) for heads in (HEADS, KEY_HEADS, KEY_HEADS, HEADS)]
    *given, grad = (torch.randn(shape, generator=numbers).bfloat16().to(device) for shape in shapes)

    def results(function: Attention, kind: torch.dtype, causal: bool) -> list[Tensor]:
        query, key, value = (each.to(kind).requires_grad_() for each in given)
        out = function(query, key, value, offsets, max(LENGTHS), causal)
        return [out.detach(), *torch.autograd.grad(out, [query, key, value], grad.to(kind))]

    found = {}
    for causal in (True, False):
        right = results(plain, torch.float32, causal)
        both = results(attention, torch.bfloat16, causal), results(plain, torch.bfloat16, causal)
        for name, *three in zip(("result", "query", "key", "value"), right, *both, strict=True):
            exact, flash, other = (each.float() for each in three)
            far = ((flash - exact).norm() / exact.norm()).item(), ((other - exact).norm() / exact.norm()).item()
            found[f"{'causal' if causal else 'full'}, {name}"] = far
    return found


def faults(found: dict[str, tuple[float, float]]) -> list[str]:
    # A NaN is not below anything.
    wrong = {name: both for name, both in found.items() if not both[0] <= FURTHER * both[1]}
    return [f"{name}: {far:.2e} from float32, plain attention {near:.2e}" for name, (far, near) in wrong.items()]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m ci.gpu.attention", description=__doc__)
    parser.add_argument("--device", default="cuda")
    options = parser.parse_args(arguments)
    found = compare(installed, options.device)
    for name, (far, near) in found.items():
        print(f"{name:16} {far:.2e} from float32, plain attention {near:.2e}")
    wrong = faults(found)
    for fault in wrong:
        print(f"ci.gpu.attention: {fault}", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
