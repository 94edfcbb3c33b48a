// The one thread pool of the process.
//
// A decode step is some dozens of jobs of 5 to 500 microseconds each, so a job costs well under a microsecond to hand
// out: workers spin for a short while after each, and chunks are claimed one by one, so that a worker which has lost
// its CPU holds up the one chunk it has, and a worker still asleep holds up nothing.
#pragma once

namespace triforce {

/// Threads that take part in a job, the caller's among them: at first as many as the CPUs this process may use.
int threads();

/// Throws std::invalid_argument below 1. Waits for a job in progress.
void set_threads(int count);

void run_chunks(int chunks, void (*body)(const void* context, int chunk), const void* context);

/// Runs body(chunk) for each chunk in [0, chunks), in any order, and returns when all are done. A call from inside a
/// job, or while another Python thread has the pool, runs its chunks itself. `body` must not throw.
template <class Body>
void parallel(int chunks, const Body& body) {
    const auto call = [](const void* context, int chunk) { (*static_cast<const Body*>(context))(chunk); };
    run_chunks(chunks, call, &body);
}

}  // namespace triforce
