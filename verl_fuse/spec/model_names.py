"""Lists the sizes of the LLaMA and Qwen families by name. Source: each model's published `config.json`."""

import difflib
import os
import re
from pathlib import Path

from verl_fuse.errors import FuseError
from verl_fuse.spec.model import Model

# name: layers, hidden, heads, kv_heads, head_dim, intermediate, vocabulary, tied_embeddings[, experts,
# experts_per_token, shared_intermediate]
_SIZES: dict[str, tuple] = {
    "llama-7b": (32, 4096, 32, 32, 128, 11008, 32000, False),
    "llama-13b": (40, 5120, 40, 40, 128, 13824, 32000, False),
    "llama-33b": (60, 6656, 52, 52, 128, 17920, 32000, False),
    "llama-65b": (80, 8192, 64, 64, 128, 22016, 32000, False),
    "llama-2-7b": (32, 4096, 32, 32, 128, 11008, 32000, False),
    "llama-2-13b": (40, 5120, 40, 40, 128, 13824, 32000, False),
    "llama-2-34b": (48, 8192, 64, 8, 128, 22016, 32000, False),
    "llama-2-70b": (80, 8192, 64, 8, 128, 28672, 32000, False),
    "llama-3-8b": (32, 4096, 32, 8, 128, 14336, 128256, False),
    "llama-3-70b": (80, 8192, 64, 8, 128, 28672, 128256, False),
    "llama-3.1-8b": (32, 4096, 32, 8, 128, 14336, 128256, False),
    "llama-3.1-70b": (80, 8192, 64, 8, 128, 28672, 128256, False),
    "llama-3.1-405b": (126, 16384, 128, 8, 128, 53248, 128256, False),
    "llama-3.2-1b": (16, 2048, 32, 8, 64, 8192, 128256, True),
    "llama-3.2-3b": (28, 3072, 24, 8, 128, 8192, 128256, True),
    "qwen2-0.5b": (24, 896, 14, 2, 64, 4864, 151936, True),
    "qwen2-1.5b": (28, 1536, 12, 2, 128, 8960, 151936, True),
    "qwen2-7b": (28, 3584, 28, 4, 128, 18944, 152064, False),
    "qwen2-72b": (80, 8192, 64, 8, 128, 29568, 152064, False),
    "qwen2-57b-a14b": (28, 3584, 28, 4, 128, 2560, 151936, False, 64, 8, 20480),
    "qwen2.5-0.5b": (24, 896, 14, 2, 64, 4864, 151936, True),
    "qwen2.5-1.5b": (28, 1536, 12, 2, 128, 8960, 151936, True),
    "qwen2.5-3b": (36, 2048, 16, 2, 128, 11008, 151936, True),
    "qwen2.5-7b": (28, 3584, 28, 4, 128, 18944, 152064, False),
    "qwen2.5-14b": (48, 5120, 40, 8, 128, 13824, 152064, False),
    "qwen2.5-32b": (64, 5120, 40, 8, 128, 27648, 152064, False),
    "qwen2.5-72b": (80, 8192, 64, 8, 128, 29568, 152064, False),
    "qwen3-0.6b": (28, 1024, 16, 8, 128, 3072, 151936, True),
    "qwen3-1.7b": (28, 2048, 16, 8, 128, 6144, 151936, True),
    "qwen3-4b": (36, 2560, 32, 8, 128, 9728, 151936, True),
    "qwen3-8b": (36, 4096, 32, 8, 128, 12288, 151936, False),
    "qwen3-14b": (40, 5120, 40, 8, 128, 17408, 151936, False),
    "qwen3-32b": (64, 5120, 64, 8, 128, 25600, 151936, False),
    "qwen3-30b-a3b": (48, 2048, 32, 4, 128, 768, 151936, False, 128, 8, 0),
    "qwen3-235b-a22b": (94, 4096, 64, 4, 128, 1536, 151936, False, 128, 8, 0),
}

MODEL_NAMES = tuple(_SIZES)
# Models with these words in their names have layers beside those of the text model of the family and size.
_OTHER_LAYERS = {"vl", "omni", "audio", "vision"}


def model_named(name: str) -> Model:
    """Return a model by size name; a FuseError suggests the nearest names."""
    key = name.lower()
    if key not in _SIZES:
        near = difflib.get_close_matches(key, _SIZES, n=3, cutoff=0.5)
        hint = f"did you mean {', '.join(near)}?" if near else f"known: {', '.join(_SIZES)}."
        raise FuseError(f"model {name!r}: unknown; {hint} Any other model: give the path of its config.json")
    return Model(key, *_SIZES[key])


def model_from(text: str, base: Path = Path()) -> Model:
    """Return a model by size name, or by the path of a `config.json` or its folder, relative to `base`."""
    path = base / text
    # Unlike Path.exists, this call answers False for a name too long for a file.
    return Model.read(path) if os.path.exists(path) else model_named(text)


def model_of_path(path: object) -> str | None:
    """Return the folder of a model that is there, or the size name with the most parts that are all in the path's last
    name, as `Qwen/Qwen2.5-Math-7B` has qwen2.5 and 7b; None where there is neither."""
    text = str(path or "")
    if os.path.isfile(os.path.join(text, "config.json")):
        return str(Path(text).absolute())
    parts = parts_of_name(text)
    fitting = [name for name in MODEL_NAMES if parts.issuperset(name.split("-")) and not parts & _OTHER_LAYERS]
    return max(fitting, key=lambda name: name.count("-"), default=None)


def parts_of_name(path: object) -> set[str]:
    """Return the parts of a path's last name, in lower case."""
    return set(re.split(r"[-_ ]", Path(str(path or "")).name.lower()))


def parameters_of_path(path: object) -> int | None:
    """Return the parameters of the model that `model_of_path` finds; None where it finds none, or none of a kind that
    is known here."""
    name = model_of_path(path)
    if name is None:
        return None
    try:
        return model_from(name).parameters
    except FuseError:
        return None
