"""vLLM imports this name where flash-attn is installed, and calls it for models with images."""


def apply_rotary(*arguments, **named):
    raise NotImplementedError("flash-attn's stand-in has no rotary kernel")
