"""Names types of numpy arrays."""

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
# Token ids of any width: engines and files have 32 bits.
Tokens = NDArray[np.integer]
