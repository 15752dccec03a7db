include "../attention.pxi"
