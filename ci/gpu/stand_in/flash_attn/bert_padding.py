"""Takes padding out of rows and puts it in again, with the functions that verl has for devices without flash-attn."""

from verl.utils.attention_utils import _fallback_index_first_axis as index_first_axis
from verl.utils.attention_utils import _fallback_pad_input as pad_input
from verl.utils.attention_utils import _fallback_rearrange as rearrange
from verl.utils.attention_utils import _fallback_unpad_input as unpad_input

__all__ = ["index_first_axis", "pad_input", "rearrange", "unpad_input"]
