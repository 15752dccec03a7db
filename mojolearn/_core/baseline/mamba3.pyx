include "../mamba3.pxi"
