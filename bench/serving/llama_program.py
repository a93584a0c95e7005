"""llama.cpp on one side of a link, run by the Python of ``make setup-llama``: it needs nothing of thinwire.

``serve HOST:PORT`` offers this machine's processor as a device, as llama.cpp's ``rpc-server`` does. ``go-on``
reads lines of JSON: the first says ``model``, ``server`` (or null) and ``layers``, how many layers go to
it, the output's included; each further one is a text, ``prompt``, ``tokens`` and ``temperature``. It
answers each with a line.
"""

from __future__ import annotations

import ctypes
import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

CONTEXT = 2304  # tokens
THREADS = 1
PROCESSOR = 0  # a kind of device of ggml


def library() -> Any:
    """Return ggml's functions, with those of its RPC backend."""
    import llama_cpp

    folder = Path(llama_cpp.__file__).parent / "lib"
    found = [ctypes.CDLL(str(folder / f"lib{name}.so")) for name in ("ggml-base", "ggml", "ggml-rpc")]
    rpc = found[2]
    rpc.ggml_backend_rpc_add_server.restype = ctypes.c_void_p
    rpc.ggml_backend_reg_dev_get = found[0].ggml_backend_reg_dev_get
    rpc.ggml_backend_reg_dev_get.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    rpc.ggml_backend_reg_dev_get.restype = ctypes.c_void_p
    rpc.ggml_backend_register = found[1].ggml_backend_register
    rpc.ggml_backend_register.argtypes = [ctypes.c_void_p]
    rpc.ggml_backend_dev_by_type = found[1].ggml_backend_dev_by_type
    rpc.ggml_backend_dev_by_type.restype = ctypes.c_void_p
    return rpc


def serve(endpoint: str) -> None:
    """Offer this machine's processor until somebody ends this process."""
    rpc = library()
    devices = (ctypes.c_void_p * 1)(rpc.ggml_backend_dev_by_type(PROCESSOR))
    sizes = ctypes.c_size_t(THREADS), ctypes.c_size_t(len(devices))
    rpc.ggml_backend_rpc_start_server(endpoint.encode(), None, *sizes, devices)


class Continued:
    """A model, some of whose layers are elsewhere."""

    def __init__(self, model: str, server: str | None, layers: int) -> None:
        import llama_cpp

        self._llama, own = llama_cpp, llama_cpp.llama_model_default_params()
        devices = (ctypes.c_void_p * 2)()
        if server is not None:
            rpc = library()
            found = rpc.ggml_backend_rpc_add_server(server.encode())
            rpc.ggml_backend_register(found)
            devices[0] = rpc.ggml_backend_reg_dev_get(found, 0)
        own.devices = ctypes.cast(devices, ctypes.c_void_p)
        own.n_gpu_layers = layers if server else 0
        self._model = llama_cpp.llama_model_load_from_file(model.encode(), own)
        if not self._model:
            raise SystemExit(f"llama.cpp cannot load {model}")
        asked = llama_cpp.llama_context_default_params()
        asked.n_ctx, asked.n_threads, asked.n_threads_batch = CONTEXT, THREADS, THREADS
        self._context = llama_cpp.llama_init_from_model(self._model, asked)
        self._words = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self._model))

    def text(self, prompt: list[int], tokens: int, temperature: float) -> dict[str, Any]:
        """Return the tokens that follow a prompt, and when they came [s]."""
        self._llama.llama_memory_clear(self._llama.llama_get_memory(self._context), True)
        random, began = np.random.default_rng(0), time.monotonic()
        made, times = [self._pick(self._behind(prompt), temperature, random)], [time.monotonic() - began]
        while len(made) < tokens:
            made.append(self._pick(self._behind(made[-1:]), temperature, random))
            times.append(time.monotonic() - began)
        return {"made": made, "times": times}

    def _behind(self, tokens: list[int]) -> Any:
        """Return the logits behind the last of some tokens."""
        held = (self._llama.llama_token * len(tokens))(*tokens)
        if self._llama.llama_decode(self._context, self._llama.llama_batch_get_one(held, len(tokens))):
            raise SystemExit("llama.cpp cannot go on")
        found = self._llama.llama_get_logits_ith(self._context, -1)
        return np.ctypeslib.as_array(found, (self._words,)).astype(np.float64)

    def _pick(self, logits: Any, temperature: float, random: Any) -> int:
        noise = random.gumbel(size=len(logits)) * temperature if temperature else 0.0
        return int((logits + noise).argmax())


def go_on() -> None:
    """Continue texts as they are asked for."""
    held = None
    for line in sys.stdin:
        asked = json.loads(line)
        if held is None:
            held = Continued(**asked)
            print(json.dumps({"loaded": True}), flush=True)
        else:
            print(json.dumps(held.text(**asked)), flush=True)


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        serve(sys.argv[2])
    else:
        go_on()
