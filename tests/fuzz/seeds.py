"""Good inputs to begin with, and random changes of them for runs without a fuzzer."""

from __future__ import annotations

import json
import random
import tempfile
from functools import cache
from pathlib import Path

from paceline.control.files import read_profile, to_json
from paceline.model.files.gguf_file import QUANTS
from tests.control.costs import H100
from tests.fuzz.targets import DATA, HEAD_TARGET, tokenizer_json

ODD = [
    b"\x00" * 8,
    b"\xff" * 8,
    b"\xff\xff\xff\x7f",
    (1 << 40).to_bytes(8, "little"),
    b"-1",
    b"1e999",
    b"null",
    b"{}",
]


@cache
def seeds(name: str) -> list[bytes]:
    """Good inputs of a target."""
    return {
        "gguf": _gguf,
        "safetensors": lambda: [path.read_bytes() for path in sorted(DATA.glob("*/*.safetensors"))],
        "quantised": _quantised,
        "tokenizer": lambda: [tokenizer_json(), *_tokenizers()],
        "head": _heads,
        "profile": _profiles,
        "bodies": _bodies,
        "border": lambda: [bytes([function] * 40) for function in range(64)],
    }[name]()


def _gguf() -> list[bytes]:
    import gguf

    from tests.model.helpers import byte_level_metadata, write_gguf
    from tests.tiny import tiny_config, tiny_weights

    config = tiny_config(vocab_size=320, num_layers=1, hidden_size=32, intermediate_size=32)
    with tempfile.TemporaryDirectory() as folder:
        found = []
        for quant in (None, gguf.GGMLQuantizationType.Q4_0, gguf.GGMLQuantizationType.Q8_0):
            path = Path(folder) / "m.gguf"
            write_gguf(path, config, tiny_weights(config), quant, byte_level_metadata())
            found.append(path.read_bytes())
    return [*found, _one_block_of_each_type()]


def _one_block_of_each_type() -> bytes:
    import gguf
    import numpy as np

    with tempfile.TemporaryDirectory() as folder:
        writer = gguf.GGUFWriter(Path(folder) / "m.gguf", "llama")
        for number, quant in QUANTS.items():
            kind = gguf.GGMLQuantizationType(number)
            writer.add_tensor(quant.name, np.zeros((1, quant.block_bytes), np.uint8), raw_dtype=kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return (Path(folder) / "m.gguf").read_bytes()


def _quantised() -> list[bytes]:
    found = []
    for path in sorted((DATA / "quantised").glob("*.safetensors")):
        data = path.read_bytes()
        header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
        said = header["__metadata__"]["quantization_config"].encode()
        found.append(len(said).to_bytes(4, "little") + said + data)
    return found


def _tokenizers() -> list[bytes]:
    values = json.loads(tokenizer_json())
    steps = {"type": "Sequence", "normalizers": [{"type": "NFC"}, {"type": "Prepend", "prepend": "_"}]}
    split = {"type": "Split", "pattern": {"Regex": r"\s+|\d"}, "behavior": "Isolated", "invert": False}
    fallback = {"type": "Sequence", "decoders": [{"type": "ByteFallback"}, {"type": "Fuse"}]}
    return [json.dumps(values | {"normalizer": steps, "pre_tokenizer": split, "decoder": fallback}).encode()]


def _heads() -> list[bytes]:
    found = []
    for folder in sorted(DATA.glob("speculators-*")):
        config = (folder / "config.json").read_bytes()
        found.append(len(config).to_bytes(4, "little") + config + (folder / "model.safetensors").read_bytes())
    assert HEAD_TARGET.vocab_size == 64  # as theirs
    return found


def _profiles() -> list[bytes]:
    from tests.engine.same_text import STAIRCASE

    found = [read_profile(Path(STAIRCASE)), read_profile(H100)]
    return [json.dumps(to_json(profile)).encode() for profile in found] + [H100.read_bytes()]


def _bodies() -> list[bytes]:
    chat = {
        "model": "tiny",
        "messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}],
        "max_tokens": 5,
        "n": 2,
        "stop": ["x"],
        "logit_bias": {"5": 1.5},
        "logprobs": True,
        "top_logprobs": 3,
        "stream": True,
        "stream_options": {"include_usage": True},
        "speculation": {"draft": "ngram", "k": 3},
        "seed": 7,
    }
    plain = {"prompt": ["a", "b"], "echo": True, "temperature": 0.5, "top_k": 3, "min_p": 0.1}
    ids = {"prompt": [[1, 2, 3]], "max_tokens": 1, "cache_salt": "s", "repetition_penalty": 1.1}
    return [json.dumps(body).encode() for body in (chat, plain, ids)]


def changed(data: bytes, draw: random.Random) -> bytes:
    """Change a good input in a few places."""
    found = bytearray(data)
    for _ in range(draw.choice((1, 1, 2, 4, 16))):
        at = draw.randrange(min(len(found), draw.choice((64, 512, 1 << 30))) or 1) if found else 0
        match draw.randrange(6):
            case 0:
                found[at : at + 1] = bytes([draw.randrange(256)])
            case 1:
                del found[at : at + draw.choice((1, 8, 1000))]
            case 2:
                found[at:at] = draw.choice(ODD)
            case 3:
                odd = draw.choice(ODD)
                found[at : at + len(odd)] = odd
            case 4:
                begin = draw.randrange(len(found)) if found else 0
                found[at:at] = found[begin : begin + draw.choice((4, 64))]
            case _:
                found[at : at + 1] = bytes([found[at] ^ 1 << draw.randrange(8)]) if at < len(found) else b""
    return bytes(found)
