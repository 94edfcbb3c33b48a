// The one thread pool of the process.
//
// A decode step is some dozens of jobs of 5 to 500 microseconds each, so starting a job must cost well under a
// microsecond. After each job, workers spin for a short while. Chunks are claimed one by one: a worker that has lost
// its CPU delays only its own chunk, and a sleeping worker delays nothing. When other processes compete for the CPUs,
// waiting threads sleep, including the caller.
#pragma once

#include <cstdint>

namespace triforce {

/// Number of threads that was asked for, the caller included. At most usable_cpus() threads take part in a job; that is
/// also the default.
int threads();

/// Throws std::invalid_argument below 1. Waits for a job in progress.
void set_threads(int count);

void run_chunks(int chunks, void (*body)(const void* context, int chunk), const void* context);

/// Runs body(chunk) for each chunk in [0, chunks), in any order, and returns when all are done. A call from inside a
/// job, or while another Python thread has the pool, runs its chunks itself. `body` must not throw.
template <class Body>
void parallel(int64_t chunks, const Body& body) {
    const auto call = [](const void* context, int chunk) { (*static_cast<const Body*>(context))(chunk); };
    run_chunks(static_cast<int>(chunks), call, &body);
}

}  // namespace triforce
