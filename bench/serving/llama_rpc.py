"""llama.cpp over the same emulated links as ``thinwire serve``: one machine, and half the layers on another.

Its RPC offers the processor of the other machine as a device, to which half the layers go. Weights are
bfloat16, which its kernels have instructions for here; one thread a machine. ``make setup-llama`` builds it
of the sources that ``llama-cpp-python`` carries, in an environment of its own.
"""

from __future__ import annotations

import json
import queue
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

from bench.serving import llama_program
from bench.study.cells import ROOT
from thinwire.links.profile import profiles
from thinwire.runs.emulator.session import Emulation
from thinwire.runs.machine.cache import cache_folder
from thinwire.runs.machine.interrupts import stop
from thinwire.runs.models.model_source import ModelSource, resolve_model
from thinwire.runs.models.smollm import smollm_folder
from thinwire.types import LinkError, MeasurementError
from thinwire.uses.serving.run.measured_program import prompts_of
from thinwire.uses.serving.run.options import MeasuredConfig

PYTHON = ROOT / ".venv-llama" / "bin" / "python"
PORT = 50052
LOAD, TEXT = 400.0, 300.0  # seconds to load, when half the weights cross the link, and for a text
TEMPERATURE = 0.8
COMPARED = 16  # likeliest tokens
ONE, RPC = "one", "rpc"


def there() -> bool:
    """Return whether ``make setup-llama`` has built it."""
    return PYTHON.exists()


def measure(link: str, sizes: Sequence[int], texts: int, tokens: int) -> dict[str, Any]:
    """Return first tokens and tokens a second of both ways, in turn, by the tokens of prompts."""
    source = resolve_model("smollm2-135m", None)
    model, layers = written(source), source.config.num_hidden_layers
    with Emulation(profiles(link.split(";"), 2)) as net:
        server = f"{net.address(1)}:{PORT}"
        with ExitStack() as ends:
            serving = ends.enter_context(_program(net, 1, "serve", server))
            one, split = (ends.enter_context(_program(net, 0, "go-on")) for _ in range(2))
            _listening(net, server, serving)
            asked = {"model": str(model), "layers": layers // 2 + 1}
            for client, where in ((one, None), (split, server)):
                client.ask(asked | {"server": where}, LOAD)
            net.restart()
            found = [_prompts(source, n, texts, tokens, one, split) for n in sizes]
        network = net.describe()
    return {"prompts": found, "network": {k: network[k] for k in ("valid", "load", "lateness", "profiles")}}


def _prompts(
    source: ModelSource, size: int, texts: int, tokens: int, one: Program, split: Program
) -> dict[str, Any]:
    config = MeasuredConfig(data="wikitext-2", texts=texts, prompt_tokens=size)
    rows: dict[str, list[dict[str, Any]]] = {ONE: [], RPC: []}
    for prompt in prompts_of(config, source):
        for way, client in ((ONE, one), (RPC, split)):
            likely = client.ask({"prompt": prompt, "tokens": COMPARED, "temperature": 0.0}, TEXT)["made"]
            drawn = {"prompt": prompt, "tokens": tokens, "temperature": TEMPERATURE}
            times = client.ask(drawn, TEXT)["times"]
            rate = (tokens - 1) / (times[-1] - times[0])
            rows[way].append({"first_token_s": times[0], "tokens_per_second": rate, "likely": likely})
    same = sum(a["likely"] == b["likely"] for a, b in zip(rows[ONE], rows[RPC], strict=True))
    figures = {
        way: {name: median(t[name] for t in own) for name in ("first_token_s", "tokens_per_second")}
        for way, own in rows.items()
    }
    return {"prompt": size, "ways": figures, "equal_texts": same / texts}


class Program:
    """A process of ``llama_program`` that answers lines."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        threading.Thread(target=self._read, daemon=True).start()

    def ask(self, what: dict[str, Any], seconds: float) -> dict[str, Any]:
        """Return the answer. Errors: ``LinkError`` where none comes in so many seconds."""
        if self.process.stdin is None:
            raise LinkError("llama.cpp's process cannot be asked")
        self.process.stdin.write(json.dumps(what) + "\n")
        self.process.stdin.flush()
        try:
            line = self._lines.get(timeout=seconds)
        except queue.Empty:
            raise LinkError(f"llama.cpp gave no answer for {seconds:g} s") from None
        if not line:
            raise LinkError(f"llama.cpp ended with exit code {self.process.wait()}; see above")
        found: dict[str, Any] = json.loads(line)
        return found

    def _read(self) -> None:
        for line in self.process.stdout or ():
            self._lines.put(line)
        self._lines.put("")


@contextmanager
def _program(net: Emulation, rank: int, *words: str) -> Iterator[Program]:
    command = [str(PYTHON), str(Path(llama_program.__file__).resolve()), *words]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    process = net.popen(rank, command, stderr=subprocess.DEVNULL, **pipes)
    try:
        yield Program(process)
    finally:
        stop([process])


def _listening(net: Emulation, server: str, program: Program, seconds: float = 60.0) -> None:
    """Wait until the other machine can be reached. Errors: ``MeasurementError``."""
    host, _, port = server.partition(":")
    end = time.monotonic() + seconds
    while time.monotonic() < end and program.process.poll() is None:
        with net.socket(0) as tried:
            tried.settimeout(5.0)
            if not tried.connect_ex((host, int(port))):
                return
        time.sleep(0.5)
    raise MeasurementError(f"llama.cpp's server at {server} did not listen within {seconds:g} s")


def written(source: ModelSource) -> Path:
    """Return the model as a GGUF file of bfloat16 without its tokens' texts, written at the first call."""
    import gguf

    file = cache_folder() / "bench-llama" / "smollm2-135m-bf16.gguf"
    if file.exists():
        return file
    file.parent.mkdir(parents=True, exist_ok=True)
    half = file.with_suffix(".part")
    writer = gguf.GGUFWriter(half, "llama")
    _describe(writer, source.config)
    for name, x in _tensors(source.config):
        kind = gguf.GGMLQuantizationType.BF16 if x.dim() > 1 else gguf.GGMLQuantizationType.F32
        data = x.bfloat16().view(torch.uint8).numpy() if x.dim() > 1 else x.float().numpy()
        writer.add_tensor(name, np.ascontiguousarray(data), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return half.replace(file)


def _describe(writer: Any, config: Any) -> None:
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("no_vocab")


def _tensors(config: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the model's tensors by their names in GGUF, rotary ones in its order: pairs side by side."""
    import gguf
    from safetensors.torch import load_file

    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    for name, x in load_file(smollm_folder() / "model.safetensors").items():
        heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
        many = next((n for part, n in heads.items() if f".{part}." in name), None)
        if many is not None:
            x = x.view(many, 2, -1, x.shape[1]).transpose(1, 2).reshape(x.shape)
        yield names.get_name(name, try_suffixes=(".weight", ".bias")), x
