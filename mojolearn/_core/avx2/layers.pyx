include "../layers.pxi"
