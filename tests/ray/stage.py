"""One Ray for all tests of this folder, one service on it at a time, and ways to look at both from outside."""

from __future__ import annotations

import json
import shutil
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil
import ray
from safetensors.numpy import save_file

from cluster.registry import find_coordinator
from deploy.app import make_plan
from deploy.cluster import RayLink
from deploy.config import ClusterConfig
from deploy.service import Service

PATIENCE_S = 60.0


@dataclass
class Stage:
    """`show` brings a config up, in place of the one that is shown now."""

    link: RayLink
    run_dir: Path
    service: Service | None = None
    shown: ClusterConfig | None = None
    said: list[str] = field(default_factory=list)

    def show(self, config: ClusterConfig) -> Stage:
        if config != self.shown:
            self.service = self.service or Service(self.link, config.service_name, self.run_dir)
            self.said.clear()
            self.shown = None
            folders = [Path(section.model) for section in config.sections]
            self.service.start(make_plan(config, *folders), self.said.append)
            self.shown = config
        return self

    @property
    def url(self) -> str:
        assert self.service is not None
        return self.service.url

    @property
    def model(self) -> str:
        assert self.shown is not None
        return self.shown.names[0]

    def status(self) -> dict[str, Any]:
        return ray.get(find_coordinator("tidegate").status.remote())

    def groups(self) -> list[dict[str, Any]]:
        return self.status()["groups"]

    def total(self, name: str) -> int:
        """The sum over groups of a figure of the group or of its pool; a group that is not up has no pool."""
        rows = [group if name in group else group["pool"] for group in self.groups()]
        return sum(row[name] for row in rows if row is not None)

    def complete(self, prompt: object, **fields: object) -> dict[str, Any]:
        """One completion, not streamed."""
        body = {"model": self.model, "prompt": prompt, "temperature": 0, "ignore_eos": True, **fields}
        answer = httpx.post(f"{self.url}/v1/completions", json=body, timeout=PATIENCE_S)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def stream(self, prompt: object, **fields: object) -> Iterator[dict[str, Any]]:
        """The chunks of one streamed completion; leaving the loop disconnects."""
        body = {"model": self.model, "prompt": prompt, "temperature": 0, "ignore_eos": True, "stream": True, **fields}
        with httpx.stream("POST", f"{self.url}/v1/completions", json=body, timeout=PATIENCE_S) as answer:
            assert answer.status_code == 200, answer.read()
            for line in answer.iter_lines():
                if line.startswith("data: ") and line != "data: [DONE]":
                    yield json.loads(line.removeprefix("data: "))


def eventually(what: Callable[[], object], within_s: float = PATIENCE_S) -> Any:
    """The first true value of `what`; fails when there is none in time."""
    deadline = time.monotonic() + within_s
    while not (found := what()):
        assert time.monotonic() < deadline, f"not within {within_s} s"
        time.sleep(0.05)
    return found


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def processes() -> list[psutil.Process]:
    """This process and all that descend from it."""
    own = psutil.Process()
    return [own, *own.children(recursive=True)]


def command_line(process: psutil.Process) -> str:
    """As it was started; "" once it has ended: one that was listed a moment ago may be gone, or a zombie, by now."""
    try:
        return " ".join(process.cmdline())
    except psutil.NoSuchProcess:
        return ""


def listeners() -> list[tuple[str, str, int]]:
    """(process, address, port) of every socket that listens, of all our processes."""
    found = []
    for process in processes():
        try:
            for entry in process.net_connections(kind="inet"):
                if entry.status == psutil.CONN_LISTEN:
                    found.append((process.name(), entry.laddr.ip, entry.laddr.port))
        except psutil.NoSuchProcess:
            continue
    return found


def rank_processes() -> set[int]:
    """Process ids of all living rank actors."""
    return {process.pid for process in processes() if "RankActor" in command_line(process)}


def write_tiny_model(folder: Path, tokenizer_of: Path, seed: int = 7, head_dim: int = 16) -> Path:
    """A random two-layer Llama with the tokenizer of a real model: a step takes a few milliseconds."""
    folder.mkdir()
    hidden, heads, kv_heads, inner, vocab = 64, 4, 2, 96, 49_152
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": 2,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "vocab_size": vocab,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10_000.0,
        "tie_word_embeddings": True,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "torch_dtype": "float32",
    }
    (folder / "config.json").write_text(json.dumps(config))
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        if (tokenizer_of / name).exists():
            shutil.copy(tokenizer_of / name, folder / name)
    shapes = {"model.embed_tokens.weight": (vocab, hidden), "model.norm.weight": (hidden,)}
    for layer in range(2):
        at = f"model.layers.{layer}"
        shapes |= {
            f"{at}.self_attn.q_proj.weight": (heads * head_dim, hidden),
            f"{at}.self_attn.k_proj.weight": (kv_heads * head_dim, hidden),
            f"{at}.self_attn.v_proj.weight": (kv_heads * head_dim, hidden),
            f"{at}.self_attn.o_proj.weight": (hidden, heads * head_dim),
            f"{at}.mlp.gate_proj.weight": (inner, hidden),
            f"{at}.mlp.up_proj.weight": (inner, hidden),
            f"{at}.mlp.down_proj.weight": (hidden, inner),
            f"{at}.input_layernorm.weight": (hidden,),
            f"{at}.post_attention_layernorm.weight": (hidden,),
        }
    draw = np.random.default_rng(seed)
    weights = {
        name: np.ones(shape, np.float32) if "norm" in name else draw.normal(0, 0.2, shape).astype(np.float32)
        for name, shape in shapes.items()
    }
    save_file(weights, str(folder / "model.safetensors"), metadata={"format": "pt"})
    return folder
