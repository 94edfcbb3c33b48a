"""A replica of two ranks in its process, without Ray. Prints its text, then waits.

Run as: python one_replica.py FOLDER PROMPT, the folder being that of a tiny pair.
"""

from __future__ import annotations

import asyncio
import sys

from triforce.interface.outputs import RequestOutput
from triforce.interface.sampling_params import SamplingParams
from triforce.llm import LLM
from triforce.replicas.tp_workers import start_ranks
from triforce.server.engine_client import GenerationRequest
from triforce.server.engine_thread import Worker
from triforce.server.limits import Limits


async def main(folder: str, prompt: str) -> None:
    settings = {"model": f"{folder}/target", "draft": f"{folder}/draft", "retrieval_budget": 64, "device": "cpu"}
    llm, limits = LLM(**settings | start_ranks(settings, Limits(), 2, True, 1)), Limits()  # type: ignore[arg-type]
    worker = Worker(llm, limits)
    params = SamplingParams(temperature=0.8, seed=5, max_tokens=24, ignore_eos=True)
    (answer,) = worker.submit([GenerationRequest(llm.encode(prompt), params)])
    async for event in answer:
        if isinstance(event, RequestOutput):
            print(event.outputs[0].text.encode().hex(), flush=True)
    await asyncio.sleep(600)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
