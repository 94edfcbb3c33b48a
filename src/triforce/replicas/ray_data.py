"""Batch lines on Ray Data: each actor runs an engine and the application, and answers lines as a server does.

Each line is one block. So no text waits for another one, and if an actor dies, exactly its unanswered lines are
retried.
"""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from typing import Any, BinaryIO

import ray
import ray.data
from ray.exceptions import RayError

from triforce.errors import RequestError, TriforceError
from triforce.replicas.cluster import ClusterPlan, connect, plan_cluster
from triforce.replicas.replica import load
from triforce.server.app import create_app
from triforce.server.batch import LIMITS, Answers, BatchLine, post
from triforce.server.engine_thread import Worker

RETRIES = 1
"""Retries of a line whose actor died, in each of two runs: the first with other lines, the second with this line alone.

The second run tells whether the line is the cause.
"""

Row = dict[str, Any]
EngineSettings = tuple[dict[str, Any], str, bool]
"""Settings of LLM, the model's name in answers, and `exact` as in `TPGroup`."""


class BatchActor:
    """An actor, which runs the first of `ranks` ranks. If the settings are faulty, each of its answers says so."""

    def __init__(self, engine_settings: EngineSettings, ranks: int) -> None:
        settings, name, exact = engine_settings
        self._settings_error = ""
        try:
            llm = load(settings, LIMITS, ranks, exact)
            self._app = create_app(llm, Worker(llm, LIMITS), name, limits=LIMITS, any_model=False)
        except TriforceError as error:
            self._settings_error = str(error)

    async def __call__(self, row: Row) -> Row:
        response = b"" if self._settings_error else json.dumps(await post(self._app, row["url"], row["body"])).encode()
        return {"place": row["place"], "response": response, "settings_error": self._settings_error}


def answer(
    settings: dict[str, Any],
    name: str,
    count: int,
    address: str | None,
    source: BinaryIO,
    answers: Answers,
    ranks: int = 1,
    exact: bool = True,
) -> None:
    """Answer the missing lines with `count` engines LLM(**settings) on the Ray at `address`; None starts one.

    ranks: number of processes that share the model in each engine. exact: see `TPGroup`. Raises RequestError. After an
    error the answers so far stay in the output.
    """
    missing = list(answers.missing(source))
    lines = {place: line for place, line in enumerate(missing) if line.error is None}
    for line in missing:
        if line.error is not None:
            answers.add(line)
    if lines:
        connect(address)
        try:
            for engines, concurrency in (min(count, len(lines)), LIMITS.rows), (1, 1):
                plan = plan_cluster(ray.nodes(), engines, settings["device"], ranks)
                _run_lines(lines, plan, concurrency, (settings, name, exact), answers)
        finally:
            ray.shutdown()
    for line in lines.values():
        replica_error = "each engine that ran this request died, the last one with this request alone; ask for less"
        answers.add(replace(line, error=replica_error, code="replica_lost"))


def _run_lines(
    lines: dict[int, BatchLine], plan: ClusterPlan, concurrency: int, engine_settings: EngineSettings, answers: Answers
) -> None:
    """Add answers as they arrive, and remove their lines from `lines`. Raises RequestError."""
    if not lines:
        return
    _configure_ray_data()
    dataset = _answer_dataset(lines, plan, concurrency, engine_settings)
    try:
        for batch in dataset.iter_batches(batch_size=None, prefetch_batches=0, batch_format="pyarrow"):
            for row in batch.to_pylist():
                if row["settings_error"]:
                    raise RequestError(row["settings_error"])
                answers.add(lines.pop(row["place"]), json.loads(row["response"]))
    except RayError as error:
        what = f"Ray gave up ({str(error).strip().splitlines()[-1]})"
        advice = "each machine of this Ray needs the model, and the same version of triforce[ray]; then start it again"
        raise RequestError(f"{what}; {advice}") from error


def _answer_dataset(
    lines: dict[int, BatchLine], plan: ClusterPlan, concurrency: int, engine_settings: EngineSettings
) -> ray.data.Dataset:
    rows = [{"place": place, "url": line.url, "body": line.body} for place, line in lines.items()]
    return ray.data.from_items(rows, override_num_blocks=len(rows)).map(
        BatchActor,
        fn_constructor_args=(engine_settings, plan.ranks),
        compute=ray.data.ActorPoolStrategy(
            size=plan.count, max_tasks_in_flight_per_actor=concurrency, max_concurrent_calls_per_actor=concurrency
        ),
        num_cpus=plan.cpus,
        num_gpus=plan.gpus,
        max_task_retries=RETRIES,
    )


def _configure_ray_data() -> None:
    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = context.print_on_execution_start = False
    context.execution_no_progress_timeout_s = -1  # the duration of a text is not limited
    context.max_errored_blocks = -1  # a line whose engine died is reported, and the others continue
    logging.getLogger("ray.data").setLevel(logging.ERROR)
