"""A model of llama.cpp with one KV cache for many sequences. Not thread-safe."""

import ctypes
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from service.engine.llama_engine.library import api, why
from service.engine.llama_engine.state import Bytes

NO_ROOM, INVALID = 1, -1


class DecodeFailed(RuntimeError):
    """llama.cpp refused a batch, or had no room for it; its cache is as it was."""


class DeviceLost(RuntimeError):
    """Computing failed in llama.cpp: nothing in this process can be trusted any more."""


class Batch:
    """Room for `n_rows` rows, each of one sequence, in memory that llama.cpp reads from."""

    def __init__(self, n_rows: int) -> None:
        llama = api()
        self.tokens, self.positions, self.sequences = (np.zeros(n_rows, np.int32) for _ in range(3))
        self.wanted = np.zeros(n_rows, np.int8)
        self._ones = np.ones(n_rows, np.int32)
        self._of_row = self.sequences.ctypes.data + self.sequences.itemsize * np.arange(n_rows, dtype=np.uint64)
        pointer, number = ctypes.POINTER, ctypes.c_int32
        self._struct = llama.llama_batch(
            0,
            ctypes.cast(self.tokens.ctypes.data, pointer(number)),
            None,
            ctypes.cast(self.positions.ctypes.data, pointer(number)),
            ctypes.cast(self._ones.ctypes.data, pointer(number)),
            ctypes.cast(self._of_row.ctypes.data, pointer(pointer(number))),
            ctypes.cast(self.wanted.ctypes.data, pointer(ctypes.c_int8)),
        )

    def of(self, n_rows: int) -> Any:
        """The struct for the first `n_rows` rows."""
        self._struct.n_tokens = n_rows
        return self._struct


class LlamaContext:
    """`model` and `context` are llama.cpp's, and freed by `close`. `n_rows` rows, of which `n_outputs` give logits, go
    through it at once."""

    def __init__(self, model: Any, context: Any, n_rows: int, n_outputs: int) -> None:
        self._llama = api()
        self._model, self._context = model, context
        self._memory = self._llama.llama_get_memory(context)
        self._batch = Batch(n_rows)
        self._n_rows, self._n_outputs = n_rows, n_outputs
        self.n_vocab = int(self._llama.llama_vocab_n_tokens(self._llama.llama_model_get_vocab(model)))
        self._logits = ctypes.c_float * self.n_vocab

    def close(self) -> None:
        """Free all memory; a second call does nothing."""
        if self._context is not None:
            self._llama.llama_free(self._context)
            self._llama.llama_model_free(self._model)
            self._context = self._model = None

    def decode(
        self,
        tokens: npt.NDArray[np.int32],
        positions: npt.NDArray[np.int32],
        sequences: npt.NDArray[np.int32],
        wanted: npt.NDArray[np.bool_],
    ) -> torch.Tensor:
        """Compute rows and keep their KV; logits float32 ``[rows wanted, vocab]``. Raises DecodeFailed, DeviceLost."""
        logits = torch.empty(int(wanted.sum()), self.n_vocab, dtype=torch.float32)
        out, first, done = logits.numpy(), 0, 0
        while first < len(tokens):
            last = self._end(wanted, first)
            part = slice(first, last)
            self._put(tokens[part], positions[part], sequences[part], wanted[part])
            self._check(self._llama.llama_decode(self._context, self._batch.of(last - first)))
            for row in np.flatnonzero(wanted[part]).tolist():
                out[done] = self._logits_of(row)
                done += 1
            first = last
        return logits

    def _end(self, wanted: npt.NDArray[np.bool_], first: int) -> int:
        """Where the rows end that go through at once from `first` on."""
        last = min(first + self._n_rows, len(wanted))
        outputs = first + np.flatnonzero(wanted[first:last])
        return last if len(outputs) <= self._n_outputs else int(outputs[self._n_outputs])

    def _put(self, tokens: Any, positions: Any, sequences: Any, wanted: Any) -> None:
        batch, n = self._batch, len(tokens)
        batch.tokens[:n], batch.positions[:n] = tokens, positions
        batch.sequences[:n], batch.wanted[:n] = sequences, wanted

    def _check(self, status: int) -> None:
        if status == 0:
            return
        if status == NO_ROOM:
            raise DecodeFailed("llama.cpp's KV cache has no room for the rows of this step")
        if status >= INVALID:
            raise DecodeFailed(f"llama.cpp does not compute the rows of this step ({status}): {why()}")
        raise DeviceLost(f"llama.cpp failed while it computed ({status}): {why()}")

    def _logits_of(self, row: int) -> npt.NDArray[np.float32]:
        found = self._llama.llama_get_logits_ith(self._context, row)
        return np.frombuffer(memoryview(self._logits.from_address(ctypes.addressof(found.contents))), np.float32)

    def remove(self, sequence: int, first: int = -1, last: int = -1) -> None:
        """Take positions [first, last) from a sequence; cells that no sequence has are free again."""
        self._llama.llama_memory_seq_rm(self._memory, sequence, first, last)

    def share(self, source: int, target: int, first: int = -1, last: int = -1) -> None:
        """Let `target` see the cells of `source` at positions [first, last) too; nothing is copied."""
        self._llama.llama_memory_seq_cp(self._memory, source, target, first, last)

    def state(self, sequence: int) -> Bytes:
        """All cells of a sequence. Raises DeviceLost."""
        size = self._llama.llama_state_seq_get_size(self._context, sequence)
        state = np.empty(size, np.uint8)
        if self._llama.llama_state_seq_get_data(self._context, _pointer(state), size, sequence) != size:
            raise DeviceLost(f"llama.cpp does not give the state of a sequence: {why()}")
        return state

    def set_state(self, sequence: int, state: Bytes) -> None:
        """Put cells of a state made by `StateFormat` in place of a sequence's. Raises DecodeFailed when there is no
        room."""
        if not self._llama.llama_state_seq_set_data(self._context, _pointer(state), len(state), sequence):
            self.remove(sequence)
            raise DecodeFailed(f"llama.cpp's KV cache has no room for {len(state)} bytes: {why()}")


def _pointer(data: Bytes) -> Any:
    return ctypes.cast(data.ctypes.data, ctypes.POINTER(ctypes.c_uint8))
