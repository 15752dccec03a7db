from types import ModuleType

INSTRUCTION_SETS: tuple[str, ...]
FAMILIES: tuple[str, ...]
BUILT: tuple[str, ...]
AVAILABLE: tuple[str, ...]
ISA: str

linalg: ModuleType
layers: ModuleType
attention: ModuleType
mamba3: ModuleType
decode: ModuleType
