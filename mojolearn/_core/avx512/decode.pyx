include "../decode.pxi"
