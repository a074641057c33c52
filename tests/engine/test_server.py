"""`vllm serve` as a user starts it, spoken to by the client of OpenAI."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from openai import APIConnectionError, OpenAI
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from fxbackend.hf import tiny

TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }} {{ message['content'] }} {% endfor %}"
    "{% if add_generation_prompt %}assistant{% endif %}"
)
PROMPT = "w7 w9 w11 w7"


@dataclass(frozen=True)
class Server:
    """A running server, and what it serves."""

    client: OpenAI
    log: Path
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerFast

    def expected(self, ids: list[int], count: int) -> str:
        """The greedy text of Transformers."""
        done = list(ids)
        for _ in range(count):
            done.append(int(tiny.hf_logits(self.model, torch.tensor(done))[-1].argmax()))
        return str(self.tokenizer.decode(done[len(ids) :], skip_special_tokens=True))


def words(size: int) -> PreTrainedTokenizerFast:
    """A tokenizer of `size` words, each a token."""
    vocabulary = {word: number for number, word in enumerate(("<pad>", "<s>", "</s>", "<unk>", "user", "assistant"))}
    vocabulary |= {f"w{number}": number for number in range(len(vocabulary), size)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        chat_template=TEMPLATE,
    )


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("served")
    model = tiny.save_tiny("llama", folder / "model")
    tokenizer = words(model.config.vocab_size)
    tokenizer.save_pretrained(folder / "model")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("FXBACKEND_", "VLLM_"))} | {
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": "1",
    }
    log = folder / "log"
    command = [
        str(Path(sys.executable).with_name("vllm")),
        "serve",
        str(folder / "model"),
        "--model-impl",
        "transformers",
        "--dtype",
        "float32",
        "--enforce-eager",
        "--max-model-len",
        "64",
        "--max-num-seqs",
        "4",
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
        "--served-model-name",
        "tiny",
    ]
    with log.open("w") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out, env=environment, start_new_session=True)
    client = OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0, timeout=60)
    try:
        _wait(process, client, log)
        yield Server(client, log, model, tokenizer)
    finally:
        process.terminate()
        try:
            process.wait(20)
        finally:
            _end_session(process.pid)


def _wait(process: subprocess.Popen[bytes], client: OpenAI, log: Path) -> None:
    end = time.monotonic() + 240
    while time.monotonic() < end:
        try:
            client.models.list()
            return
        except APIConnectionError:
            if process.poll() is not None:
                break
            time.sleep(0.5)
    pytest.fail(f"the server did not start:\n{log.read_text()[-4000:]}")


def _end_session(leader: int) -> None:
    """Ends whatever the server left behind."""
    try:
        os.killpg(leader, signal.SIGKILL)
    except ProcessLookupError:
        return


def test_one_line_says_who_serves(server: Server) -> None:
    lines = [line for line in server.log.read_text().splitlines() if "fxbackend serves" in line]
    assert len(lines) == 1
    assert "fuse_qkv 2" in lines[0]


def test_completions(server: Server) -> None:
    answer = server.client.completions.create(
        model="tiny", prompt=PROMPT, max_tokens=9, temperature=0, extra_body={"ignore_eos": True}
    )
    assert answer.choices[0].text.split() == server.expected(server.tokenizer(PROMPT).input_ids, 9).split()


def test_completions_streamed(server: Server) -> None:
    pieces = server.client.completions.create(
        model="tiny", prompt=PROMPT, max_tokens=9, temperature=0, stream=True, extra_body={"ignore_eos": True}
    )
    texts = [piece.choices[0].text for piece in pieces if piece.choices]
    assert len(texts) > 3
    assert "".join(texts).split() == server.expected(server.tokenizer(PROMPT).input_ids, 9).split()


def test_chat(server: Server) -> None:
    messages = [{"role": "user", "content": PROMPT}]
    ids = server.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    whole = server.client.chat.completions.create(
        model="tiny", messages=messages, max_tokens=9, temperature=0, extra_body={"ignore_eos": True}
    )
    expected = server.expected(ids, 9).split()
    assert (whole.choices[0].message.content or "").split() == expected
    pieces = server.client.chat.completions.create(
        model="tiny", messages=messages, max_tokens=9, temperature=0, stream=True, extra_body={"ignore_eos": True}
    )
    texts = [piece.choices[0].delta.content or "" for piece in pieces if piece.choices]
    assert len(texts) > 3
    assert "".join(texts).split() == expected
