"""Workers, one for each engine: a task comes on stdin, a result goes out as the last line of stdout.

Run as: python -m triforce.bench.compare.workers ENGINE. Each runs by itself, in a process and perhaps with an
interpreter of its own, so that neither threads nor versions of one engine meet those of another. They import the engine
that they are for, and but for that engine nothing of triforce's dependencies.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from time import perf_counter, process_time
from typing import Any

from triforce.bench.compare.gguf_file import converted

Task = dict[str, Any]
"""`model`, `draft`: folders; `ids`: the prompt; `tokens`: new ones; `threads`; `variant`; `work`: to convert in."""


class Clock:
    """Told of new tokens as they come. What comes first ends the prefill, and is no part of decoding."""

    def __init__(self) -> None:
        self.began = perf_counter()
        self.ticks: list[tuple[float, float, int]] = []

    def tick(self, tokens: int) -> None:
        """Record that so many new tokens are there."""
        self.ticks.append((perf_counter(), process_time(), tokens))

    def result(self, ids: list[int]) -> dict[str, Any]:
        """Seconds of prefill and of decoding, the tokens of the latter, and the cores that were busy meanwhile."""
        (start, cpu, first), (end, cpu_end, last) = self.ticks[0], self.ticks[-1]
        return {
            "prefill_seconds": start - self.began,
            "seconds": end - start,
            "decoded": last - first,
            "busy_cores": (cpu_end - cpu) / (end - start) if end > start else 0.0,
            "ids": ids,
        }


def triforce(task: Task) -> dict[str, Any]:
    """Triforce, through its public interface; the variant is a mode."""
    from triforce import LLM, SamplingParams, __version__
    from triforce.interface.outputs import RequestOutput

    llm = LLM(task["model"], task["draft"], mode=task["variant"])
    for tokens in (8, task["tokens"]):  # the first time a look is taken at what passes cost
        params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
        clock, ids = Clock(), list[int]()
        llm.reset_prefix_cache()
        for piece in llm.stream(task["ids"] if tokens > 8 else task["ids"][:512], params):
            if not isinstance(piece, RequestOutput):
                ids += piece.token_ids
                clock.tick(len(ids))
    return clock.result(ids) | {"version": __version__}


def transformers(task: Task) -> dict[str, Any]:
    """transformers' generate: plain, with the draft as its assistant, or prompt lookup; variants are `dtype way`."""
    import torch
    import transformers

    torch.set_num_threads(task["threads"])
    dtype, _, way = task["variant"].partition(" ")
    model = _transformer(task["model"], dtype)
    more: dict[str, Any] = {"prompt_lookup_num_tokens": 10} if way == "lookup" else {}
    if way == "assisted":
        more = {"assistant_model": _transformer(task["draft"], dtype)}
    prompt, clock = torch.tensor([task["ids"]]), Clock()

    class Ticker(transformers.StoppingCriteria):
        """Never stops a text, but is asked after each pass."""

        def __call__(self, input_ids: Any, scores: Any, **_: Any) -> Any:
            clock.tick(input_ids.shape[1] - prompt.shape[1])
            return torch.zeros(len(input_ids), dtype=torch.bool)

    with torch.inference_mode():
        made = model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            do_sample=False,
            max_new_tokens=task["tokens"],
            stopping_criteria=transformers.StoppingCriteriaList([Ticker()]),
            **more,
        )
    return clock.result(made[0, prompt.shape[1] :].tolist()) | {"version": transformers.__version__}


def _transformer(folder: str, name: str) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    dtype = {"bf16": torch.bfloat16, "f32": torch.float32}[name]
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="sdpa")
    model.generation_config.eos_token_id = None  # texts do not end before their time
    model.generation_config.pad_token_id = 0
    return model


def openvino(task: Task) -> dict[str, Any]:
    """OpenVINO GenAI, which reads the same GGUF file; variants: the precision of its KV cache, lookup in the prompt.

    Its speculative decoding takes no draft model from a GGUF file.
    """
    import numpy as np
    import openvino
    import openvino_genai

    way: str = task["variant"]
    settings: dict[str, Any] = {"INFERENCE_NUM_THREADS": task["threads"], "PERFORMANCE_HINT": "LATENCY"}
    config = openvino_genai.GenerationConfig()
    if way == "lookup":
        settings["prompt_lookup"] = True
        config.num_assistant_tokens, config.max_ngram_size = 10, 3
    elif way != "default":
        settings["KV_CACHE_PRECISION"] = way
    pipe = openvino_genai.LLMPipeline(str(converted(task["model"], task["work"])), "CPU", **settings)
    config.max_new_tokens, config.ignore_eos, config.do_sample = task["tokens"], True, False
    ids_1T = np.array([task["ids"]], dtype=np.int64)
    inputs = openvino_genai.TokenizedInputs(openvino.Tensor(ids_1T), openvino.Tensor(np.ones_like(ids_1T)))
    clock, ids = Clock(), list[int]()

    class Streamer(openvino_genai.StreamerBase):  # type: ignore[misc]
        def write(self, token: Any) -> Any:
            ids.extend(token if isinstance(token, list) else [token])
            clock.tick(len(ids))
            return openvino_genai.StreamingStatus.RUNNING

        def end(self) -> None: ...

    pipe.generate(inputs, config, Streamer())
    return clock.result(ids) | {"version": openvino_genai.__version__}


def llamacpp(task: Task) -> dict[str, Any]:
    """llama.cpp, by llama-cpp-python, on a GGUF file in f16; variants: its flash attention, lookup in the prompt."""
    import llama_cpp
    from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

    lookup = LlamaPromptLookupDecoding(num_pred_tokens=10) if task["variant"] == "lookup" else None
    llm = llama_cpp.Llama(
        str(converted(task["model"], task["work"])),
        n_ctx=len(task["ids"]) + task["tokens"] + 8,
        n_threads=task["threads"],
        n_threads_batch=task["threads"],
        n_batch=512,
        flash_attn=task["variant"] == "flash attention",
        draft_model=lookup,
        logits_all=lookup is not None,  # else it fails
        verbose=False,
    )
    clock, ids = Clock(), list[int]()
    for token in llm.generate(task["ids"], temp=0.0, reset=True):
        ids.append(int(token))
        clock.tick(len(ids))
        if len(ids) == task["tokens"]:
            break
    return clock.result(ids) | {"version": llama_cpp.__version__}


def onnx(task: Task) -> dict[str, Any]:
    """ONNX Runtime GenAI, on a model that its own builder makes; the variant is the precision of the weights."""
    import onnxruntime_genai

    folder = _built(task)
    config = onnxruntime_genai.Config(str(folder))
    config.overlay(f'{{"model": {{"decoder": {{"session_options": {{"intra_op_num_threads": {task["threads"]}}}}}}}}}')
    model = onnxruntime_genai.Model(config)
    params = onnxruntime_genai.GeneratorParams(model)
    length = len(task["ids"]) + task["tokens"]
    params.set_search_options(do_sample=False, min_length=length, max_length=length)
    generator = onnxruntime_genai.Generator(model, params)
    clock, ids = Clock(), list[int]()
    generator.append_tokens(task["ids"])
    while not generator.is_done() and len(ids) < task["tokens"]:
        generator.generate_next_token()
        ids.append(int(generator.get_next_tokens()[0]))
        clock.tick(len(ids))
    return clock.result(ids) | {"version": onnxruntime_genai.__version__}


def _built(task: Task) -> Path:
    """Made by the builder that comes with it, which is a script and wants to be run as one."""
    import onnxruntime_genai

    folder = Path(task["work"]) / f"onnx-{task['variant']}"
    if not (folder / "genai_config.json").exists():
        builder = Path(onnxruntime_genai.__file__).parent / "models" / "builder.py"
        asked = [*f"-p {task['variant']} -e cpu".split(), "-i", task["model"], "-o", folder, "-c", folder / "cache"]
        made = subprocess.run([sys.executable, builder, *asked], capture_output=True, text=True)
        if made.returncode:
            raise RuntimeError(f"its builder says: {made.stderr.strip().splitlines()[-1]}")
    return folder


def vllm(task: Task) -> dict[str, Any]:
    """vLLM's CPU build. It tells nothing until a text is done: a text of one token is the prefill of a longer one."""
    os.environ |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": str(task["threads"])}
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # so that the cores are counted
    import vllm

    length = len(task["ids"]) + task["tokens"]
    llm = vllm.LLM(
        task["model"], dtype="bfloat16", max_model_len=length, enable_prefix_caching=False,
        enforce_eager=task["variant"] == "eager",
    )  # fmt: skip
    prompt = {"prompt_token_ids": task["ids"]}
    clocks = []
    for tokens in (1, task["tokens"]):
        clock = Clock()
        params = vllm.SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
        (made,) = llm.generate([prompt], params, use_tqdm=False)
        clock.tick(tokens)
        clocks.append(clock)
    (one_began, one), (began, all_) = ((clock.began, clock.ticks[0]) for clock in clocks)
    prefill, whole = one[0] - one_began, all_[0] - began
    busy = (all_[1] - one[1]) / whole  # prefill included: it cannot be told apart
    return {
        "prefill_seconds": prefill, "seconds": whole - prefill, "decoded": task["tokens"] - 1, "busy_cores": busy,
        "ids": list(made.outputs[0].token_ids), "version": vllm.__version__,
    }  # fmt: skip


WORKERS = {each.__name__: each for each in (triforce, transformers, openvino, llamacpp, onnx, vllm)}


def main(engine: str) -> None:
    """Do the task on stdin."""
    task = json.load(sys.stdin)
    sys.stdout.flush()
    out = os.dup(1)
    os.dup2(2, 1)  # what an engine prints goes to stderr
    result = WORKERS[engine](task)
    with os.fdopen(out, "w") as stdout:
        stdout.write(json.dumps(result) + "\n")


if __name__ == "__main__":
    main(sys.argv[1])
