"""What threads cost: a section without work, a pass with one and with all, and passes where others want the CPUs.

    python -m benchmarks.threads --json benchmarks/results/threads.json

Ratios are of medians of the same run; on a machine that does something else they say nothing.
"""

from __future__ import annotations

import multiprocessing
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from functools import partial
from multiprocessing.queues import Queue
from multiprocessing.synchronize import Barrier
from statistics import median
from time import perf_counter
from typing import Any

import torch

from benchmarks import study
from triforce.backends import dispatch
from triforce.backends.kernel_api import pages_for
from triforce.bench.kernels import MeasuredModel, one_pass
from triforce.bench.synthetic import fill
from triforce.cli.options import described, json_file
from triforce.errors import RequestError
from triforce.kvcache import FullView, PagePool

SHAPES = ("thin32", "30m")
CONTEXT = 1024


def timed(call: Callable[[], object], seconds: float) -> float:
    """Return the median seconds of a call, called for `seconds`."""
    took = []
    end = (last_time := perf_counter()) + seconds
    while last_time < end:
        start = last_time
        call()
        last_time = perf_counter()
        took.append(last_time - start)
    return median(took)


def section(threads: int) -> float:
    """Return the seconds that a section without work costs, one chunk for each thread."""
    assert dispatch.native, "main has asked"
    empty_section = partial(dispatch.native.compute, "float32", 0)
    dispatch.use_threads(1)
    inline = timed(empty_section, 0.2)
    dispatch.use_threads(threads)
    return timed(empty_section, 0.2) - inline


def run_passes(shape: str, threads: int, seconds: float, barrier: Barrier, times: Queue[float]) -> None:
    """Put the median seconds of a pass of one token into `times`, once all processes are ready."""
    dispatch.use_threads(threads)
    torch.set_num_threads(1)
    model = MeasuredModel(shape, CONTEXT + 64)
    pool = PagePool(model.config, 1, pages_for(CONTEXT + 64), model.decoder.dtype)
    pool.reserve(0, CONTEXT + 64)
    view = FullView(pool)
    view.observe(0)
    fill(pool, CONTEXT)
    step = partial(one_pass, model.decoder, view, 1)
    timed(step, 0.1)
    barrier.wait()
    times.put(timed(step, seconds))


def passes(shape: str, threads: int, seconds: float, processes: int = 1) -> float:
    """Return the slowest median seconds of a pass, of `processes` processes at once."""
    context = multiprocessing.get_context("spawn")
    barrier = context.Barrier(processes)
    times = context.Queue()
    workers = [
        context.Process(target=run_passes, args=(shape, threads, seconds, barrier, times)) for _ in range(processes)
    ]
    for process in workers:
        process.start()
    slowest: float = max(times.get() for _ in workers)
    for process in workers:
        process.join()
    return slowest


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("--seconds", type=float, default=2.0, metavar="S", help=described("seconds of a measurement"))
    json_file(parser)


def measure(options: Namespace) -> None:
    """Print a line for each shape. Raises RequestError without native kernels."""
    if not dispatch.native:
        raise RequestError(f"there are no native kernels to measure: {dispatch.missing_reason or dispatch.requested}")
    cpus = dispatch.usable_cpus()
    rows = list[dict[str, Any]]()
    empty_section = section(cpus)
    print(f"{cpus} CPUs; a section without work: {1e6 * empty_section:.2f} us")
    for shape in SHAPES:
        row = measured(shape, cpus, options.seconds)
        rows.append(row)
        print(
            f"{shape}: a pass {1e3 * row['one_thread_seconds']:.2f} ms with 1 thread, {1e3 * row['seconds']:.2f} with "
            f"{cpus} (as if {row['serial']:.0%} were serial); of that {row['twice_the_threads']:.2f} with {2 * cpus}, "
            f"{row['two_processes']:.2f} in each of two processes"
        )
    study.write(options, {"threads": cpus, "section_seconds": empty_section, "context": CONTEXT, "rows": rows})


def measured(shape: str, cpus: int, seconds: float) -> dict[str, Any]:
    """Seconds of a pass with one thread and with all, and, over the latter, with twice as many and beside another."""
    single, all_cpus, oversubscribed = (passes(shape, count, seconds) for count in (1, cpus, 2 * cpus))
    two = passes(shape, cpus, seconds, processes=2)
    return {
        "shape": shape,
        "one_thread_seconds": single,
        "seconds": all_cpus,
        "serial": (all_cpus / single - 1 / cpus) / (1 - 1 / cpus) if cpus > 1 else 1.0,
        "twice_the_threads": oversubscribed / all_cpus,
        "two_processes": two / all_cpus,
    }


main = study.command("threads", __doc__, add_arguments, measure)

if __name__ == "__main__":
    sys.exit(main())
