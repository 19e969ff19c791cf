"""A tiny real model in a folder, and the real server over it."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import httpx
import psutil
import pytest
import torch
from safetensors.torch import save_file

from paceline.model.files import hf
from paceline.model.weights import canonical_names
from tests.tiny import END, tiny_config, tiny_raw_tokenizer, tiny_weights

if TYPE_CHECKING:
    from collections.abc import Iterator

LONGEST_S = 1800  # of a server: one serves a whole session, between whose tests others may run
PATIENCE_S = 120.0  # for what must come: bounds a hang, also on a machine that does much else
MAX_LEN = 16384  # long enough for answers that last several seconds
OUTLASTING_LEN = 1 << 17  # ... and that no test outlasts
OUTLASTING = ("--max-len", str(OUTLASTING_LEN))  # flags of a server over `long_model`
TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}<assistant>"
COMMAND = [sys.executable, "-c", "from paceline.cli import main; raise SystemExit(main())"]


def write_model(folder: Path, seed: int = 0, max_len: int = MAX_LEN, **sizes: Any) -> Path:
    config = tiny_config(max_context=max_len, **sizes)
    names = canonical_names(config, hf.MODEL_NAMES, hf.LAYER_NAMES, hf.LAYER_PREFIX)
    weights = tiny_weights(config, seed, embed_scale=3.0, dtype=torch.float32)
    save_file({names[name]: tensor.contiguous() for name, tensor in weights.items()}, folder / "model.safetensors")
    values = {
        "model_type": "llama",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": max_len,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
        "hidden_act": "silu",
        "eos_token_id": config.vocab_size - 1,
    }
    (folder / "config.json").write_text(json.dumps(values))
    (folder / "tokenizer.json").write_text(tiny_raw_tokenizer(config.vocab_size).to_str())
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE, "eos_token": END}))
    return folder


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def long_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with a longer context, see `OUTLASTING`."""
    return write_model(tmp_path_factory.mktemp("long_model"), max_len=OUTLASTING_LEN)


@pytest.fixture(scope="session")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A certificate and its key."""
    folder = tmp_path_factory.mktemp("tls")
    cert, key = folder / "cert.pem", folder / "key.pem"
    made = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost"]
    made += ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(key), "-out", str(cert)]
    try:
        subprocess.run(made, check=True, capture_output=True)
    except FileNotFoundError:
        pytest.skip("no openssl here to make a certificate")
    return cert, key


@dataclass
class Server:
    process: subprocess.Popen[str]
    url: str
    banner: str

    def client(self, **options: object) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=PATIENCE_S, **options)  # type: ignore[arg-type]

    def terminate(self) -> None:
        self.process.send_signal(signal.SIGTERM)

    def engine_pid(self) -> int:
        children = psutil.Process(self.process.pid).children()
        found: int = next(
            p.pid for p in children if any("paceline.serve.worker.process" in a for a in p.cmdline())
        )
        return found

    def health(self) -> int:
        return httpx.get(f"{self.url}/health", timeout=PATIENCE_S).status_code

    def metric(self, name: str, **headers: str) -> float:
        """A metric's value; 0 for a labelled one that has not been counted yet."""
        text = httpx.get(f"{self.url}/metrics", timeout=PATIENCE_S, headers=headers).text
        found = re.findall(rf"^{re.escape(name)} (\S+)$", text, re.MULTILINE)
        return float(found[0]) if found or "{" not in name else 0.0


@contextmanager
def running(
    model: Path, *flags: str, env: dict[str, str] | None = None, stderr: IO[str] | None = None
) -> Iterator[Server]:
    """A server in a process of its own, on a free port, with the model loaded. stderr: None inherits ours."""
    arguments = ["serve", "--port", "0", "--model", str(model), "--threads", "1", "--max-len", str(MAX_LEN)]
    arguments += ["--draft", "ngram:k=4"]  # the usual `auto` first measures what steps cost
    environment = os.environ | {"OMP_NUM_THREADS": "1"} | (env or {})
    process = subprocess.Popen(
        [*COMMAND, *arguments, *flags],
        stdout=subprocess.PIPE,
        stderr=stderr,
        text=True,
        env=environment,
        cwd=Path.cwd(),
    )
    watchdog = threading.Timer(LONGEST_S, process.kill)
    watchdog.start()
    try:
        assert process.stdout is not None
        banner = ""
        while "curl" not in banner:
            line = process.stdout.readline()
            assert line, "the server ended before it was ready"
            banner += line
        url = re.findall(r"serves at (\S+)", banner)[0]
        yield Server(process, url, banner)
    finally:
        watchdog.cancel()
        process.terminate()
        try:
            process.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        if process.stdout is not None:
            process.stdout.close()


@pytest.fixture(scope="session")
def server(model: Path) -> Iterator[Server]:
    with running(model) as found:
        yield found


@pytest.fixture
def http(server: Server) -> Iterator[httpx.Client]:
    with server.client() as client:
        yield client
