"""`SambaInference`: forward passes and decoding on packed weights."""

import numpy as np

from mojolearn import checkpoint, lowbit
from mojolearn._arrays import as_float32, describe
from mojolearn._core import decode, layers, linalg
from mojolearn._numerics import get_num_threads, mode_index
from mojolearn.blocks.transformer import rope_table
from mojolearn.config import SambaConfig
from mojolearn.errors import CheckpointError, NonFiniteError
from mojolearn.interop import SafetensorsReader
from mojolearn.model import SambaModel

__all__ = ["SambaInference"]

# Matrices of these names are kept as packed panels; the others are small and stay float32 arrays.
_PANELS = (
    "in_proj.weight",
    "out_proj.weight",
    "q_proj.weight",
    "k_proj.weight",
    "v_proj.weight",
    "o_proj.weight",
    "gate_proj.weight",
    "up_proj.weight",
    "down_proj.weight",
    "embed.weight",
    "lm_head.weight",
)


class SambaInference(SambaModel):
    """Forward-only Samba language model on the CPU.

    Maps (B, L) token ids to (B, L, vocab) float32 logits with the forward of `SambaStack` (no dropout): embedding, each
    block in stack order, final RMSNorm and the tied or untied output head.

    Parameters
    ----------
    config : SambaConfig
        Model configuration.
    weights : dict
        By registry name: float32 arrays, or weights packed by `mojolearn.lowbit`. Float32 tensors may stand beside
        tensors of one packed format. The weights are copied, the matrices into panels that the kernels read in order;
        packed ones stay packed in memory and give the bits of the float32 weights that they unpack to.
    numeric_mode : {"identical", "deterministic", "fast"} or None, default None
        None uses the library default.

    Attributes
    ----------
    config : SambaConfig
        The configuration.
    weight_format : str
        ``"float32"``, ``"bfloat16"`` or ``"int8"``.

    Raises
    ------
    TypeError
        `config` is not a SambaConfig, `weights` is not a dict, or a tensor has another dtype.
    ValueError
        Missing or unknown names, wrong shapes, non-finite values, or two packed formats.

    Notes
    -----
    Two Python threads may call one model at once, each with its own state.

    Examples
    --------
    >>> import numpy as np, mojolearn
    >>> from mojolearn.training import Generator
    >>> cfg = mojolearn.SambaConfig(vocab=16, d_model=32, layers=("mamba3",))
    >>> lm = mojolearn.SambaInference(cfg, mojolearn.SambaStack(cfg, generator=Generator(0)).parameters())
    >>> prompt = np.array([[1, 2, 3]])
    >>> state = lm.allocate_state(batch_size=1, max_tokens=8)
    >>> logits = lm.forward(prompt, state)
    >>> next_logits = lm.step(logits[:, -1].argmax(1), state)
    >>> next_logits.shape
    (1, 16)
    """

    def __init__(self, config, weights, *, numeric_mode=None):
        if not isinstance(config, SambaConfig):
            raise TypeError(f"config must be a SambaConfig, got {describe(config)}")
        if not isinstance(weights, dict):
            raise TypeError(f"weights must be a dict of arrays, got {describe(weights)}")
        mode = mode_index(numeric_mode)
        check_names(config, weights)
        self._load(config, ((name, weights[name]) for name, _ in config.registry()), mode)

    def _load(self, config, tensors, mode):
        """Check and pack (name, tensor) pairs in registry order, one at a time."""
        shapes = dict(config.registry())
        packed_format = None
        bound = {}
        for name, tensor in tensors:
            label = f"weights[{name!r}]"
            if lowbit.is_packed(tensor):
                if packed_format not in (None, tensor.format):
                    raise ValueError(f"weights must have one packed format, got {packed_format} and {tensor.format}")
                packed_format = tensor.format
            bound[name] = _pack(tensor, label, shapes[name], panels=name.endswith(_PANELS))
        self._set_weights(config, mode, packed_format or "float32", bound)

    def _set_weights(self, config, mode, weight_format, weights):
        self.weight_format = weight_format
        self._weights = weights
        self._bind(config, mode, weights)
        self._decoder = decode.Decoder(config, weights, mode)

    @classmethod
    def from_checkpoint(cls, path, *, numeric_mode=None):
        """Build from a `SambaStack.save_checkpoint` file or an exported archive; the layout is found from the content.

        Parameters
        ----------
        path : str or path-like
            Checkpoint file. Optimizer, schedule and random state of a training checkpoint are checked and dropped.
        numeric_mode : {"identical", "deterministic", "fast"} or None, default None
            None uses the mode stored in the file, or the library default when it stores none.

        Returns
        -------
        SambaInference

        Raises
        ------
        CheckpointError
            The file is damaged, or its weights do not fit its configuration.
        """
        if numeric_mode is not None:
            mode_index(numeric_mode)
        get_num_threads()  # a wrong environment variable is no fault of the file
        with checkpoint.WeightsReader(path) as reader:
            config = SambaConfig.from_dict(reader.config)
            mode = mode_index(numeric_mode or reader.numeric_mode)
            return cls._from_tensors(path, config, _lowbit_tensors(reader), mode)

    @classmethod
    def from_safetensors(cls, path, config=None, *, numeric_mode=None):
        """Build from a safetensors file written by `mojolearn export` or by other software.

        Parameters
        ----------
        path : str or path-like
            The file; see `mojolearn.interop` for the names and metadata it must have.
        config : SambaConfig or None, default None
            For files whose metadata has no configuration. One that differs from the file's is refused.
        numeric_mode : {"identical", "deterministic", "fast"} or None, default None
            None uses the library default.

        Returns
        -------
        SambaInference

        Raises
        ------
        CheckpointError
            The file is damaged, or its tensors do not fit the configuration.
        """
        mode = mode_index(numeric_mode)
        get_num_threads()  # a wrong environment variable is no fault of the file
        with SafetensorsReader(path, config) as reader:
            return cls._from_tensors(path, reader.config, reader, mode)

    @classmethod
    def _from_tensors(cls, path, config, tensors, mode):
        """A model from the (name, tensor) pairs of a file, which may find damage as late as its last tensor."""
        model = cls.__new__(cls)
        try:
            model._load(config, tensors, mode)
        except CheckpointError:
            raise
        except (TypeError, ValueError) as error:
            raise CheckpointError(f"{path}: {error}") from error
        return model

    def __repr__(self):
        return (
            f"<SambaInference: {self.config.num_parameters:,} parameters in {len(self.config.layers)} layers, "
            f"{self.weight_format}, mode {self.numeric_mode}>"
        )

    def __call__(self, inputs, state=None, *, lengths=None, last_only=False):
        """The same as `forward`."""
        return self.forward(inputs, state, lengths=lengths, last_only=last_only)

    def logits(self, inputs, state=None, *, lengths=None, last_only=False):
        """The same as `forward`."""
        return self.forward(inputs, state, lengths=lengths, last_only=last_only)

    def step(self, inputs, state):
        """Decode one token per row and update `state` in place.

        The logits equal, in every bit, those that one forward over the whole sequence gives at that position.

        Parameters
        ----------
        inputs : array of int, shape (B,) or (B, 1)
            Token ids.
        state : SambaState
            From `allocate_state`.

        Returns
        -------
        ndarray of float32, shape (B, vocab)

        Notes
        -----
        Up to 8 rows go through the whole model in one compiled call, on what the state's Mamba-3 layers keep ready for
        the next token. That is rebuilt when the state's arrays have been replaced or, as a restored snapshot has, hold
        other angles, tokens or first state rows than the last step left. After any finer edit of the arrays set
        ``state.layers`` anew: ``state.layers = list(state.layers)``.
        """
        return super().step(inputs, state)

    def _step(self, ids, state):
        if state.batch_size > decode.MAX_STEP_ROWS:
            return super()._step(ids, state)
        session = state._session
        threads = get_num_threads()
        if session is None or not session.suits(self._decoder, state, threads):
            session = self._new_session(state, threads)
        if not session.prepare(state, lambda i: self._check_layer_state(i, state, 1)):
            return super()._step(ids, state)
        logits = np.empty((len(ids), self.config.vocab), np.float32)
        status = session.step(ids.reshape(-1), state, logits)
        if status == decode.CACHE_NOT_FINITE:
            raise NonFiniteError("state must be finite, got NaN or infinity in a used slot of a key/value cache")
        if status != decode.DONE:
            self._refuse_activation(status)
        return logits

    def _new_session(self, state, threads):
        self._check_layer_states(state, 1)
        cosines = sines = None
        if self._has_attention:
            cosines, sines = rope_table(self.config.head_dim, 10000.0, state.max_tokens)
        state._session = decode.Session(self._decoder, state, cosines, sines, threads)
        return state._session

    def parameters(self):
        """An independent float32 copy of every weight, keyed by registry name; packed ones are unpacked exactly."""
        return {name: _unpack(weight) for name, weight in self._weights.items()}

    def loss(self, inputs, targets):
        """Not available: inference only. Raises NotImplementedError; use `SambaStack`."""
        raise NotImplementedError("SambaInference has no loss; use SambaStack")

    def train_step(self, inputs, targets):
        """Not available: inference only. Raises NotImplementedError; use `SambaStack`."""
        raise NotImplementedError("SambaInference cannot train; use SambaStack")

    def __getstate__(self):
        return {
            "config": self.config,
            "mode": self._mode,
            "weight_format": self.weight_format,
            "weights": self._weights,
        }

    def __setstate__(self, state):
        self._set_weights(state["config"], state["mode"], state["weight_format"], state["weights"])

    def __deepcopy__(self, memo):
        # Weights never change after construction, so a copy may share them.
        other = type(self).__new__(type(self))
        other.__setstate__(self.__getstate__())
        return other


def _lowbit_tensors(reader):
    """(name, tensor) pairs of a file, packed ones as `mojolearn.lowbit` weights."""
    for name, tensor in reader:
        if isinstance(tensor, tuple):
            yield name, lowbit.Int8Weight(*tensor)
        elif tensor.dtype == np.uint16:
            yield name, lowbit.BF16Weight(tensor)
        else:
            yield name, tensor


def check_names(config, weights, name="weights"):
    """Refuse a dict of weights whose keys are not exactly the registry's names."""
    wanted = {entry for entry, _ in config.registry()}
    missing = sorted(wanted - weights.keys())
    unknown = sorted(str(key) for key in weights.keys() - wanted)
    if missing or unknown:
        parts = []
        if missing:
            parts.append(f"missing {_some(missing)}")
        if unknown:
            parts.append(f"unknown {_some(unknown)}")
        raise ValueError(f"{name} must have exactly the registry's names: {'; '.join(parts)}")


def _some(names):
    shown = ", ".join(names[:4])
    return shown if len(names) <= 4 else f"{shown} and {len(names) - 4} more"


def _pack(tensor, label, shape, panels):
    if not lowbit.is_packed(tensor):
        array = as_float32(tensor, label, shape)
        packed = linalg.PackedWeight.from_float32(array, get_num_threads()) if panels else None
        if not (packed.finite if panels else layers.all_finite(array, get_num_threads())):
            as_float32(array, label, finite=True)  # names the place
        return packed if panels else np.array(array, order="C")
    if tuple(tensor.shape) != shape:
        raise ValueError(f"{label} must have shape {shape}, got {tuple(tensor.shape)}")
    _check_packed_finite(tensor, label)
    if not panels:
        return lowbit.materialize_one(tensor, label)
    if tensor.format == "bfloat16":
        return linalg.PackedWeight.from_bfloat16(np.ascontiguousarray(tensor.bits))
    return linalg.PackedWeight.from_int8(np.ascontiguousarray(tensor.codes), np.ascontiguousarray(tensor.exponents))


def _check_packed_finite(tensor, label):
    if tensor.format == "bfloat16":
        finite = ((tensor.bits & 0x7F80) != 0x7F80).all(axis=1)
    else:
        # 2**128 and above is infinite; below that the largest code of the row decides.
        exponents = tensor.exponents.astype(np.int64)
        largest = np.abs(tensor.codes.astype(np.int16)).max(axis=1)
        finite = (exponents <= 127) & (np.frexp(largest.astype(np.float64))[1] + exponents <= 128)
    if not finite.all():
        raise ValueError(f"{label} must be finite, got NaN or infinity in row {int(np.argmin(finite))}")


def _unpack(weight):
    return weight.copy() if isinstance(weight, np.ndarray) else weight.unpack()
