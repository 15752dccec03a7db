include "../linalg.pxi"
