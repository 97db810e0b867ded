"""The loss of each row of logits, which verl's log-probs are taken from. Where flash-attn lacks it, verl computes them
a row at a time: some 10,000 launches in a pass over 8,192 tokens, which a device then waits for.

flash-attn's kernel reads the logits once and overwrites them with their gradients; here torch does, ROWS at a time in
float32, so that no second copy of the logits is needed.
"""

import torch

ROWS = 1024


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, labels, ignored, inplace):
        log_sums = torch.cat([part.float().logsumexp(-1) for part in logits.split(ROWS)])
        kept = labels != ignored
        places = torch.where(kept, labels, 0)[:, None]
        ctx.save_for_backward(logits, log_sums, kept, places)
        ctx.inplace = inplace
        return (log_sums - logits.gather(-1, places).squeeze(-1).float()).where(kept, 0.0)

    @staticmethod
    def backward(ctx, *grads):
        logits, log_sums, kept, places = ctx.saved_tensors
        grad = grads[0].where(kept, 0.0)[:, None].float()
        found = logits if ctx.inplace else torch.empty_like(logits)
        for part, to, sums, scale, place in zip(
            *(each.split(ROWS) for each in (logits, found, log_sums[:, None], grad, places)), strict=True
        ):
            own = (part.float() - sums).exp_().mul_(scale)
            to.copy_(own.scatter_add_(-1, place, -scale))
        return found, None, None, None


def cross_entropy_loss(
    logits,
    labels,
    precomputed_lse=None,
    label_smoothing=0.0,
    logit_scale=1.0,
    lse_square_scale=0.0,
    ignore_index=-100,
    inplace_backward=False,
    process_group=None,
):
    """Return the loss of each row of logits, (rows,) in float32, and zeros for flash-attn's second loss, which is of
    the squared log-sums."""
    asked = {
        "precomputed_lse": precomputed_lse is not None,
        "label_smoothing": bool(label_smoothing),
        "logit_scale": logit_scale != 1.0,
        "lse_square_scale": bool(lse_square_scale),
        "process_group": process_group is not None,
    }
    if refused := [name for name, wanted in asked.items() if wanted]:
        raise NotImplementedError(f"flash-attn's stand-in computes without {', '.join(refused)}")
    losses = _CrossEntropy.apply(logits, labels, ignore_index, inplace_backward)
    return losses, torch.zeros_like(losses)
