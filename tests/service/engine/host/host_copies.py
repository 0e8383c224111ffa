"""Host memory for the fake runner's documents."""

import time

import numpy as np


class Done:
    def wait(self) -> None:
        pass


class FakeCopies:
    """Room for `capacity` tokens; counts layers that were copied, can be slow or fail at a chosen copy."""

    def __init__(self, runner, capacity: int) -> None:
        self._runner = runner
        self.capacity = capacity
        self.used = 0
        self.n_out = self.n_in = 0
        self.delay_s = 0.0
        self.fail_out = self.fail_in = -1
        self.closed = False

    @property
    def used_nbytes(self) -> int:
        return self.nbytes_of(self.used)

    def nbytes_of(self, n_tokens: int) -> int:
        return self._runner.document_nbytes(n_tokens)

    def take(self, n_tokens: int):
        if self.used + n_tokens > self.capacity:
            return None
        self.used += n_tokens
        return [None] * self._runner.layout.n_layers, n_tokens

    def give_back(self, memory) -> None:
        layers, n_tokens = memory
        layers[:] = ["freed"]
        self.used -= n_tokens

    def copy_out(self, document, memory, layer: int) -> None:
        self._runner._check_document(document)
        time.sleep(self.delay_s)
        if self.n_out == self.fail_out:
            raise RuntimeError("a copy out failed")
        self.n_out += 1
        memory[0][layer] = document.rows[layer].copy()

    def copy_in(self, memory, document, layer: int) -> None:
        self._runner._check_document(document)
        time.sleep(self.delay_s)
        if self.n_in == self.fail_in:
            raise RuntimeError("a copy in failed")
        self.n_in += 1
        document.rows[layer] = np.asarray(memory[0][layer])
        document.loaded[layer] = document.rows.shape[2]

    def mark(self) -> Done:
        return Done()

    def close(self) -> None:
        self.closed = True
