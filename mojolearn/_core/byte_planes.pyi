from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

def split_planes(data: npt.NDArray[np.uint8], planes: npt.NDArray[np.uint8]) -> None: ...
def join_planes(planes: Sequence[bytes], out: npt.NDArray[np.uint8]) -> None: ...
